"""A shard process as its daemon has it, for tests of what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from mesh.shard.supervisor import ShardSupervisor
from tests import secure

TIMEOUT_S = 60.0

Sees = Callable[[Callable[[], bool]], Awaitable[None]]
"""Waits until something is so, looking whenever the daemon would."""


@asynccontextmanager
async def hosted(
    *shards: dict[str, Any], **more: Any
) -> AsyncIterator[tuple[ShardSupervisor, Sees]]:
    """The process, once it has loaded what it can of these."""
    changed = asyncio.Event()
    requests = [secure.request(**shard) for shard in shards]
    host = ShardSupervisor(secure.start_command(), requests, changed.set, **more)

    async def sees(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                changed.clear()
                await changed.wait()

    host.start()
    try:
        await sees(lambda: all(host.knows(name) for name in host.wanted))
        yield host, sees
    finally:
        await host.stop()
