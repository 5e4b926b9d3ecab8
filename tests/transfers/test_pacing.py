"""Weights make way: the pace falls while somebody is answered, not to nothing, and rises after."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.models.manifest import read_manifest
from mesh.transfers.pacing import FLOOR_BYTES_PER_S, SHARE, CpuShare, Pace
from tests.checkpoints import make_checkpoint
from tests.simulation.virtual_loop import VirtualLoop, run_virtually
from tests.transfers.house import MODEL, house, up
from tests.transfers.test_fetcher import weights_bytes
from tests.waiting import awake

MIB = 1 << 20


def flow(byte_s: float, steps: int, share: Callable[[Callable[[], float]], CpuShare]) -> float:
    """Bytes per second that come through, in virtual time, where each costs so many CPU seconds."""
    used = [0.0]

    async def run() -> float:
        bucket, begin = share(lambda: used[0]), asyncio.get_running_loop().time()
        bucket.make_way(True)
        for _ in range(steps):
            await bucket.take(MIB)
            used[0] += MIB * byte_s
        return steps * MIB / (asyncio.get_running_loop().time() - begin)

    return run_virtually(run)


@pytest.mark.parametrize("away_s", [0.0, 0.25, 0.9])
def test_a_limit_is_reached_on_a_machine_that_is_busy(away_s: float) -> None:
    """The processor is taken away again and again, for so long; what may flow then flows later."""
    rate, size = 40e6, 256 << 10

    async def run() -> float:
        loop, pace = asyncio.get_running_loop(), Pace()
        assert isinstance(loop, VirtualLoop)
        pace.limit(rate)

        async def others() -> None:
            while True:
                await asyncio.sleep(0.1)
                loop.advance(away_s)

        computing = asyncio.create_task(others())
        begin, taken, most = loop.time(), 0, 0.0
        while loop.time() < begin + 60:
            await pace.take(size)
            taken += size
            most = max(most, taken - rate * (loop.time() - begin))
        computing.cancel()
        assert most <= rate / 10, "never ahead of the limit by more than a tenth of a second"
        return taken / (loop.time() - begin)

    assert run_virtually(run) == pytest.approx(rate, rel=0.05)


def test_nothing_is_saved_up_while_nobody_wants_anything() -> None:
    async def run() -> None:
        loop, pace, rate = asyncio.get_running_loop(), Pace(), 1e6
        assert isinstance(loop, VirtualLoop)
        pace.limit(rate)
        for pause_s in (60.0, 0.3):
            late = asyncio.create_task(pace.take(rate / 20))
            await asyncio.sleep(0.01)
            loop.advance(1.5)  # it wakes up much too late, and had time for more than it takes
            await late
            await asyncio.sleep(pause_s)
            begin = loop.time()
            for _ in range(20):
                await pace.take(rate / 20)
            assert loop.time() - begin >= 0.9

    run_virtually(run)


@pytest.mark.parametrize("cores", [2, 16])
@pytest.mark.parametrize("byte_s", [1e-9, 10e-9])
def test_what_weights_compute_is_a_share_of_the_cores(cores: int, byte_s: float) -> None:
    rate = flow(byte_s, 2000, lambda cpu_s: CpuShare(cores, cpu_s))
    assert rate * byte_s == pytest.approx(SHARE * cores, rel=0.25)


def test_a_machine_that_is_slow_at_it_does_not_come_to_a_stop() -> None:
    rate = flow(1e-6, 400, lambda cpu_s: CpuShare(1, cpu_s))
    assert rate >= 0.99 * FLOOR_BYTES_PER_S


def test_who_waits_goes_on_at_once_when_nobody_is_answered_any_more() -> None:
    async def run() -> float:
        share = CpuShare(1, lambda: 0.0)
        share.make_way(True)
        waiting = [asyncio.create_task(share.take(64 * MIB)) for _ in range(4)]
        await asyncio.sleep(1.0)
        assert not any(task.done() for task in waiting)
        share.make_way(False)
        await asyncio.gather(*waiting)
        return asyncio.get_running_loop().time()

    assert run_virtually(run) == pytest.approx(1.0)


async def test_a_giver_makes_way_while_it_is_used(tmp_path: Path) -> None:
    """What one moves in the time is told by its own count; the other's fetch ends all the same."""
    directory = await asyncio.to_thread(
        make_checkpoint, tmp_path / "whole", "llama", layers=8, hidden=512, vocab=24000
    )
    whole = await asyncio.to_thread(read_manifest, directory, model_id=MODEL)
    is_used = True
    async with house(tmp_path, "full", "empty") as made:
        full, empty = made.start("full", directory, is_used=lambda: is_used), made.start("empty")
        await up(full, empty)
        made.introduce()
        fetch = asyncio.create_task(empty.supervisor.ensure(MODEL, whole.weights_sha256))
        while not full.supervisor.sent_bytes:  # noqa: ASYNC110 - a process has no event for it
            await asyncio.sleep(0.05)
        before, begin = full.supervisor.sent_bytes, time.monotonic()
        await awake(1.0)
        given = full.supervisor.sent_bytes - before
        slowly = given / (time.monotonic() - begin)
        assert 0 < given < weights_bytes(whole) / 2
        assert not fetch.done()
        is_used = False
        left = weights_bytes(whole) - full.supervisor.sent_bytes
        async with asyncio.timeout(left / slowly / 2):  # as slowly it would take twice as long
            await fetch
