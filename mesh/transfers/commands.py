"""What the fetcher is told, answers and says (see `mesh.processes.messages`). Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mesh.discovery.weights import HeldWeights
from mesh.errors import MeshError
from mesh.processes.messages import ProcessMessage, Request, Start
from mesh.transfers.hub import HubSettings
from mesh.transfers.meter import SourceBytes
from mesh.transfers.shelf import Holding
from mesh.types import LayerRange, ModelId, NodeId


@dataclass(frozen=True, slots=True)
class LocalCheckpoint:
    """A checkpoint in a directory that is not the fetcher's own."""

    model_id: ModelId
    directory: Path


@dataclass(frozen=True, slots=True)
class PeerHolding:
    """What another node advertises of one checkpoint."""

    node: NodeId
    node_name: str
    held: HeldWeights

    @property
    def arrived_bytes(self) -> int:
        """So many have come of what it fetches now."""
        return 0 if self.held.arriving is None else self.held.arriving.done_bytes


@dataclass(frozen=True, slots=True)
class Transfer:
    """A fetch under way, as people are told. `state` is ``waiting``, ``looking``, ``fetching`` or
    ``hub``; `eta_s` None while nothing comes."""

    id: str
    model_id: str
    weights_sha256: str
    state: str
    done_bytes: int
    total_bytes: int
    bytes_per_s: float
    eta_s: float | None
    sources: tuple[SourceBytes, ...]
    note: str = ""


class Lied(ProcessMessage, frozen=True):
    """A node gave bytes that are not those of the tensor; it is not asked again."""

    node: NodeId
    node_name: str
    weights_sha256: str
    tensor: str

    @property
    def why(self) -> str:
        """What is said of it where it would be asked."""
        return f"It gave wrong bytes of {self.tensor}, and is not asked again while it offers them."


# Commands

NICE = 15


class StartFetcher(Start[int], frozen=True):
    """See what is there and answer who asks for it, at the listener that the process was given;
    answered with its port.

    `models` are served from where they are, what is fetched lies below `models_dir`. Weights flow
    at `bytes_per_s` at most in each direction; 0: as fast as they can. `patience_s` is how long
    somebody who has what is missing is waited for, and `idle_s` after how long without anything to
    do it says so; after `unasked_s` when it never had.
    """

    listen_host: str
    models: tuple[LocalCheckpoint, ...]
    models_dir: Path
    cache_dir: Path
    interfaces: tuple[str, ...] | None = None
    bytes_per_s: float = 0.0
    patience_s: float = 60.0
    idle_s: float = 120.0
    unasked_s: float = 5.0


class Ensure(Request[Path], frozen=True):
    """Have these layers (None: everything) and perhaps the ends of a checkpoint on this disk.

    What nobody in the hearth has comes from the `hub`, if it is known from where; where there are
    `sources`, nothing comes from anybody else. The answer is its directory; until then a `Transfer`
    has this id.
    """

    id: str
    model_id: ModelId
    weights_sha256: str
    layers: tuple[LayerRange, ...] | None
    ends: bool
    hub: HubSettings | None = None
    sources: tuple[NodeId, ...] = ()


class PullRepository(Request[Path], frozen=True):
    """The same for a repository of the hub, whose hashes need not be known: if they are not, all of
    it is read once. What is not wanted of that is kept for others unless it is to `drop`. With
    `hub_alone` nobody else is believed what they are."""

    id: str
    repository: str
    revision: str
    layers: tuple[LayerRange, ...] | None
    ends: bool
    hub: HubSettings
    drop: bool = False
    hub_alone: bool = False


class FetchHeaders(Request[Path], frozen=True):
    """Have config and headers of a repository of the hub in the cache, see `hub_files`."""

    repository: str
    hub: HubSettings


class Peers(ProcessMessage, frozen=True):
    """All that other nodes advertise now; replaces what was said before. `neighbours` counts the
    nodes that are up, whether they have anything or not; `liars` are left out of `peers`."""

    peers: tuple[PeerHolding, ...]
    neighbours: int = 0
    liars: tuple[Lied, ...] = ()


class MakeWay(ProcessMessage, frozen=True):
    """Whether somebody is answered on this machine: then weights flow with a small part of its
    cores (`mesh.transfers.pacing.SHARE`), else with all that is idle."""

    is_on: bool


class ServeCheckpoint(ProcessMessage, frozen=True):
    """Serve this as well."""

    model: LocalCheckpoint


class WithdrawCheckpoint(ProcessMessage, frozen=True):
    """Serve no longer what lies there; it stays where it is."""

    place: Path


class RemoveCheckpoint(Request[Path], frozen=True):
    """Delete a checkpoint that was fetched."""

    directory: Path


class Reread(Request[int], frozen=True):
    """Have everything that is here read again, slowly, or a checkpoint at once; answered with how
    many tensors have changed on the disk."""

    weights_sha256: str = ""


# What it says


class Damaged(ProcessMessage, frozen=True):
    """A tensor has changed on the disk since it came, and counts as missing. With these layers
    (None: everything) and perhaps the ends all is here again that was; nothing can be done about a
    checkpoint that was not fetched. `is_old`: it was found by a fetcher before this one."""

    model_id: ModelId
    weights_sha256: str
    directory: Path
    error: MeshError
    is_fetched: bool
    layers: tuple[LayerRange, ...] | None
    ends: bool
    is_old: bool = False


class Idle(ProcessMessage, frozen=True):
    """For `idle_s` nothing was fetched, and nobody had a link to here."""


class Holds(ProcessMessage, frozen=True):
    """What is here now; said again whenever it changes."""

    holdings: tuple[Holding, ...]


class Moves(ProcessMessage, frozen=True):
    """The fetches under way, and the bytes sent to others since the start."""

    transfers: tuple[Transfer, ...]
    sent_bytes: int
