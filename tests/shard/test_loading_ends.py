"""Ends that are to be loaded where there is no room for them, with a real room and server."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mesh.errors import NotEnoughMemory
from mesh.models.cuts import ANYWHERE
from mesh.processes.headroom import Headroom
from mesh.shard.admission import LayerShape
from mesh.shard.loading import HeldShard
from mesh.shard.room import Room
from mesh.shard.scheduler import Scheduler
from mesh.shard.server import ShardServer
from mesh.shard.settings import ShardSettings
from mesh.types import ShardMemory


async def test_ends_without_room_do_not_wait_for_the_shard_that_waits_for_them() -> None:
    queue, held = Scheduler(1), list[HeldShard]()
    free = Headroom(free_mb=100, total_mb=1000, bound="here")
    room = Room(lambda main: free, lambda: list(held), lambda *_: None)
    some = cast("Any", SimpleNamespace(weight_bytes=1))
    server = ShardServer(
        cast("Any", None),
        lambda: some,
        ShardSettings(),
        shape=LayerShape(8, 8, ANYWHERE),
        scheduler=queue,
    )
    need = ShardMemory(weights_mb=500, caches_mb=0, headroom_mb=0)
    server.lend_ends(lambda: some, partial(room.loading, "the ends", need))
    await server.start()
    traces = cast("Any", SimpleNamespace(sessions=(), evict=lambda: None, weights_mb=0))
    held.append(HeldShard(server, traces, ShardMemory(1, 0, 0)))
    try:
        asking = asyncio.create_task(server.acquire_ends())
        await asyncio.sleep(0)
        asking.cancel()  # its link is gone; the load goes on, and nobody uses the shard now
        async with asyncio.timeout(10):
            with pytest.raises(NotEnoughMemory):
                await server.acquire_ends()
            async with room.loading("another", ShardMemory(10, 0, 0)):
                pass
    finally:
        queue.close()
