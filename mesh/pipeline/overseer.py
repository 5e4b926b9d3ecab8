"""Who is told what the stations of an asker do, and may refuse what they get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from mesh.errors import MeshError
from mesh.pipeline.claims import Claim
from mesh.routing.cover import ShardKey
from mesh.types import RouteHop
from mesh.wire.messages import WireTensor

if TYPE_CHECKING:
    from mesh.pipeline.station import Station


class Overseer(Protocol):
    """Who is told what stations do; the real one is `mesh.pipeline.oversight`."""

    def claim(self, hop: RouteHop) -> Claim:
        """A session on this hop is about to be opened."""

    def answered(
        self, station: Station, position: int, tensor: WireTensor, elapsed_s: float
    ) -> MeshError | None:
        """An answer of the right shape arrived, before anybody uses it; an error refuses it."""

    def corrupted(self, hop: RouteHop, what: str) -> MeshError:
        """A hop answered something else than activations of the right shape: the error of that."""

    def failed(self, hop: RouteHop, error: MeshError) -> None:
        """A hop could not be opened, or was lost."""

    def trusts(self, key: ShardKey) -> bool:
        """Whether a shard was not caught in a lie."""

    async def make_room(self, hop: RouteHop) -> bool:
        """A hop is full: free what is held there beside generations; whether anything was."""

    def cut(self, station: Station, position: int) -> None:
        """Everything from `position` on was forgotten."""

    def closed(self, station: Station) -> None:
        """The session ended, or was parked."""
