"""Ticks, at the same moments for all that tick, and waits that grow."""

from __future__ import annotations

import asyncio
import random

from mesh.clock import backoff_s, jittered_s, next_tick, tick
from tests.simulation.virtual_loop import run_virtually


def test_whoever_ticks_does_so_at_the_same_moments() -> None:
    async def moments(begins_s: float, every_s: float) -> list[float]:
        await asyncio.sleep(begins_s)
        return [await tick(every_s) for _ in range(3)]

    async def main() -> None:
        loop = asyncio.get_running_loop()
        begun_s = next_tick(1.0)
        one, other, halves = await asyncio.gather(
            moments(0.3, 1.0), moments(0.7, 1.0), moments(0.9, 0.5)
        )
        assert one == other == [begun_s, begun_s + 1, begun_s + 2]
        assert halves == [begun_s, begun_s + 0.5, begun_s + 1]
        assert next_tick(1.0) > loop.time()

    run_virtually(main)


def test_a_tick_can_be_given_up() -> None:
    async def main() -> None:
        ticking = asyncio.create_task(tick(60.0))
        await asyncio.sleep(0)
        ticking.cancel()
        await asyncio.wait([ticking])
        assert ticking.cancelled()

    run_virtually(main)


def test_waits_double_up_to_the_longest_with_jitter() -> None:
    for failures, whole_s in ((1, 0.5), (2, 1.0), (4, 4.0), (7, 30.0), (10_000, 30.0)):
        assert backoff_s(failures, 0.5, 30.0) == whole_s
        waits = {jittered_s(whole_s, random.SystemRandom()) for _ in range(50)}
        assert len(waits) > 1
        assert all(whole_s / 2 <= wait_s <= whole_s for wait_s in waits)
