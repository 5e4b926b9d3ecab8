"""How a shard leaves a process that goes on: nobody new, a while for those who are in, then memory.

Knows one shard and the links of its process; what else the process holds stays as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from mesh.errors import SessionGone
from mesh.shard.link import LinkSessions
from mesh.shard.loading import HeldShard
from mesh.shard.service import ShardService
from mesh.types import ShardId
from mesh.wire.messages import Drain

LOOK_EVERY_S = 0.1


class Leaving:
    """A shard that takes no new sessions; `end` has its memory given back."""

    def __init__(self, held: HeldShard, users: list[LinkSessions]) -> None:
        self.shard_id: ShardId = held.server.descriptor.shard_id
        self._held = held
        self._users = users

    async def end(self, grace_s: float, *, is_paused: Callable[[], bool]) -> int:
        """Give generations and jobs `grace_s` to move or end, end the others, free the weights.

        Returns how many were ended. The askers that were asked to move may come back to what this
        process serves beside it, unless the node is paused.
        """
        server, taps = self._held.server, self._held.taps
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while server.sessions.active or taps.sessions:  # noqa: ASYNC110 - two of them
                    await asyncio.sleep(LOOK_EVERY_S)
        left = server.sessions.active + taps.sessions
        taps.shutdown()
        await server.evict(
            SessionGone(
                f"{self.shard_id} was unloaded on this node.", fix="Ask again: another serves it."
            )
        )
        if not is_paused():
            for user in self._users:
                user.notify(Drain(""))
        return left


def withdraw(service: ShardService, held: HeldShard) -> Leaving:
    """Serve it no longer, and ask those who use it to move while they can."""
    shard_id = held.server.descriptor.shard_id
    service.remove(shard_id, end_jobs=False)
    return Leaving(held, service.tell_users(held.server, Drain(f"{shard_id} is unloaded here")))
