"""What the shard process is told, what it answers and what it says (see `mesh.processes.messages`).

Plain data: the daemon, which reads and writes these, loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesh.capacity import Measurement
from mesh.errors import MeshError
from mesh.processes.memory_budget import MemoryCaps
from mesh.processes.messages import ProcessMessage, Request, Start
from mesh.shard.room import Memory
from mesh.shard.settings import ShardSettings
from mesh.types import LayerRange, ModelId, ShardDescriptor, ShardHealth, ShardId, shard_id


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """Which layers of which checkpoint to serve, and how.

    `copy` tells it from others of the same layers in other processes of the node. `dtype` is auto,
    fp32, bf16 or fp16; `quant` is auto, none, int8 or int4, and `own_quant` what
    it is where nobody asks for one. Askers dial
    `advertise_host`, or where the process listens if that is empty. Jobs get `max_tap_sessions` at
    a time, with `tap_memory_mb` each.
    """

    directory: Path
    model_id: ModelId
    layers: LayerRange
    dtype: str = "auto"
    quant: str = "none"
    settings: ShardSettings = field(default_factory=ShardSettings)
    cache_dir: Path | None = None
    advertise_host: str = ""
    max_tap_sessions: int = 4
    tap_memory_mb: int = 4096
    own_quant: str = ""
    copy: int = 0

    @property
    def shard_id(self) -> ShardId:
        """Of the shard that it asks for."""
        return shard_id(self.model_id, self.layers, self.copy)


@dataclass(frozen=True, slots=True)
class ShardLoad:
    """What a shard holds right now. `kv_mb` is what the caches' buffers take, `parked_mb` what of
    that is of parked sessions, `weights_mb` what the weights do."""

    loaded: bool
    parked: int
    kv_tokens_used: int
    kv_tokens: int
    kv_mb: float
    weights_mb: float
    parked_mb: float = 0.0


@dataclass(frozen=True, slots=True)
class ShardReport:
    """How one shard does."""

    shard_id: ShardId
    health: ShardHealth
    load: ShardLoad


@dataclass(frozen=True, slots=True)
class Listening:
    """Where the process listens; `reasons` say how the device was chosen."""

    port: int
    device: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A shard that is served, and what loading it took."""

    descriptor: ShardDescriptor
    bytes_read: int
    load_ms: float
    reasons: tuple[str, ...]


# Commands


class StartShards(Start[Listening], frozen=True):
    """Listen, at `listen_port` or, if it is 0, at a free one; choose the device.

    Harvests are written to `harvest_dir`, those of other members to `harvest_mb` at most; with no
    directory none are. What is loaded stays within `caps`.
    """

    listen_host: str
    listen_port: int = 0
    interfaces: tuple[str, ...] | None = None
    device: str = "auto"
    threads: int = 0
    threads_dir: Path | None = None
    harvest_dir: Path | None = None
    harvest_mb: int = 0
    session_lease_s: float = ShardSettings().session_lease_s
    caps: MemoryCaps | None = None


class Load(Request[Loaded], frozen=True):
    """Load this and serve it; `because` is why it is loaded again, if it is."""

    request: ShardRequest
    because: str = ""


class Unload(Request[int], frozen=True):
    """Serve this shard no longer: its sessions get `grace_s` to move elsewhere, then its memory is
    given back. One that is not here, or has just been asked for, is unloaded all the same. Answered
    with how many sessions did not move in time and were ended."""

    shard_id: ShardId
    grace_s: float


class Distrust(ProcessMessage, frozen=True):
    """The files that this shard was loaded from were found changed, perhaps since before that:
    serve it no longer, which is said as of one whose weights have changed in memory."""

    shard_id: ShardId
    error: MeshError


class KeepResident(ProcessMessage, frozen=True):
    """The weights of exactly these shards stay on the device, whether or not they are used; one
    that is not here yet is loaded so."""

    shard_ids: tuple[ShardId, ...]


class RevokeTokens(ProcessMessage, frozen=True):
    """Exactly these tokens are revoked: sessions that were opened with one of them end."""

    token_ids: tuple[str, ...]


class Pause(Request[None], frozen=True):
    """Have askers move their sessions away, or take that back; answered once they were told."""

    paused: bool


class Measure(Request[Measurement], frozen=True):
    """To the process that measures: how fast are this device, with so many threads (0: as kept in
    `threads_dir`), in the formats of shards that are asked for in `dtype`, and an asker on it; with
    `memory_only`, just what is free there."""

    device: str
    threads: int
    threads_dir: Path | None
    memory_only: bool = False
    dtype: str = "auto"


# What it says of itself


class Withdrawn(ProcessMessage, frozen=True):
    """A shard is served no longer, as its weights have changed."""

    shard_id: ShardId
    error: MeshError


class Health(ProcessMessage, frozen=True):
    """How the shards do: every second and on every change.

    `sessions` and `accounts` are the rows of `ShardService.sessions` and `reports` as the status
    shows them, `rss_mb` is the whole process', `memory` what is free on the device and of main
    memory.
    """

    shards: tuple[ShardReport, ...] = ()
    rss_mb: float = 0.0
    sessions: list[dict[str, Any]] = []  # noqa: RUF012 - msgspec copies it
    accounts: list[dict[str, Any]] = []  # noqa: RUF012
    memory: Memory | None = None


def traces_of(name: ShardId) -> ShardId:
    """What the weights are called that a shard loads once more, for interventions."""
    return ShardId(f"{name} for traces")


def ends_of(name: ShardId) -> ShardId:
    """What the ends are called that a shard loads for askers without any."""
    return ShardId(f"the ends of {name}")
