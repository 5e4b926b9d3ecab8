"""A shard process that drains is the only one of its node until it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest

from mesh.errors import Busy
from mesh.models.builtin import checkpoint_dir
from mesh.shard.supervisor import ShardSupervisor
from tests import secure


async def test_going_home_while_the_node_drains_starts_no_second_process() -> None:
    host = ShardSupervisor(secure.start_command(), (), lambda: None)
    host.start()
    async with asyncio.timeout(60):
        await host.wait_up()
    first = host.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)  # as one whose sessions have not ended yet
    draining = asyncio.create_task(host.drain(30.0))
    await asyncio.sleep(0)
    try:
        home = {"directory": str(checkpoint_dir()), "model_id": "builtin", "layers": "0-3"}
        with pytest.raises(Busy, match="stopping"):
            async with asyncio.timeout(10):
                await host.ensure(secure.request(**home))
        assert host.pid == first
        assert not draining.done()
        os.kill(first, signal.SIGCONT)
        async with asyncio.timeout(20):
            await draining
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL)
        await host.stop()
