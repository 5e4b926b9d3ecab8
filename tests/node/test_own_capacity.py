"""A machine is measured once, by a real process, and its result holds for every node there."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

from mesh.capacity import Device
from mesh.node.own_capacity import OwnCapacity, OwnHooks
from mesh.processes.headroom import Headroom
from mesh.shard.commands import Measure
from mesh.shard.room import Memory

CPU = Measure("cpu", 1, None)
TOLD_S = 90.0


async def found(directory: Path, *, within_s: float, said: Memory | None = None) -> Device:
    """The device once it is known. Raises TimeoutError."""
    told = asyncio.Event()
    own = OwnCapacity(CPU, directory, OwnHooks(lambda: said, lambda: True, told.set))
    assert own.now() is None
    own.start()
    try:
        async with asyncio.timeout(within_s):
            await told.wait()
        capacity = own.now()
    finally:
        await own.stop()
    assert capacity is not None
    (device,) = capacity.devices
    return device


async def test_a_machine_is_measured_once(tmp_path: Path) -> None:
    first = await found(tmp_path, within_s=TOLD_S)
    assert {"fp32", "int8", "int4"} <= {speed.format for speed in first.speeds}
    for speed in first.speeds:
        rates = (speed.decode_gb_s, speed.prefill_gflops, speed.layer_ms)
        assert all(math.isfinite(rate) and rate > 0 for rate in rates)
    assert 0 < first.free_bytes <= first.total_bytes
    (kept,) = await asyncio.to_thread(lambda: list(tmp_path.iterdir()))
    text = await asyncio.to_thread(kept.read_text)

    # Sooner than anything could have been measured.
    second = await found(tmp_path, within_s=4.0)
    assert second.speeds == first.speeds
    assert await asyncio.to_thread(kept.read_text) == text

    # What is free on an accelerator is known to the process that uses it alone.
    card = text.replace('"name": "cpu"', '"name": "cuda:0"')
    await asyncio.to_thread(kept.write_text, card)
    said = Memory(Headroom(100, 200, "memory of a card"), 300)
    third = await found(tmp_path, within_s=4.0, said=said)
    assert (third.free_bytes, third.total_bytes) == (100 << 20, 200 << 20)
