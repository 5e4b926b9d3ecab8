"""One shard of the shard process, whole: what serves chat, what serves jobs, what both take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mesh.types import ShardMemory

if TYPE_CHECKING:
    from mesh.shard.server import ShardServer
    from mesh.shard.taps.server import TapServer


@dataclass(frozen=True, slots=True)
class HeldShard:
    """A `mesh.shard.room.Occupant`; `need` is what it was let in for."""

    server: ShardServer
    taps: TapServer
    need: ShardMemory

    @property
    def idle_s(self) -> float | None:
        """For how long nobody has used its weights; None while somebody does, or there are none."""
        return None if self.taps.sessions else self.server.idle_s

    @property
    def promised_mb(self) -> int:
        """What its caches may still take, beyond what they have."""
        load = self.server.load_now()
        return max(0, self.need.caches_mb - math.ceil(load.kv_mb)) if load.loaded else 0

    @property
    def memory(self) -> ShardMemory:
        """What it takes now."""
        load = self.server.load_now()
        return ShardMemory(
            math.ceil(load.weights_mb + self.taps.weights_mb),
            math.ceil(load.kv_mb),
            self.need.headroom_mb if load.loaded else 0,
        )

    async def evict(self) -> None:
        """Free its weights."""
        self.taps.evict()
        await self.server.evict()
