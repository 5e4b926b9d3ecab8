"""Thousands of ways to lose a node, in seconds: those of `tests.simulation.promises` hold."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.simulation.repeating import repeats, same_in_other_processes, unbroken
from tests.simulation.run import run
from tests.simulation.schedule import FAULTS
from tests.simulation.virtual_loop import Deadlock, run_virtually

MODULE = "tests.simulation"
QUICK = 250
MANY = 5000
BLOCK = 500


def check(seeds: range) -> Counter[str]:
    """Run them all; what happened in them."""
    return sum((each.tally() for each in unbroken(MODULE, run, seeds)), Counter())


def test_schedules_of_faults_never_change_a_token_or_leave_a_request_behind() -> None:
    tally = check(range(QUICK))
    # What makes the above worth something: every kind of fault befell some host, requests were
    # asked, hops were lost and replaced.
    assert all(tally[kind] >= 10 for kind in FAULTS), tally
    assert tally["done"] > QUICK
    assert tally["failovers"] > QUICK / 2
    assert tally["left"] > 10
    assert tally["liars caught"] > 5


def test_an_answer_that_comes_after_the_end_takes_no_stream() -> None:
    check(range(1542, 1543))


@pytest.mark.chaos
@pytest.mark.parametrize("first", range(QUICK, MANY + QUICK, BLOCK))
def test_thousands_of_schedules(first: int) -> None:
    tally = check(range(first, first + BLOCK))
    print(f"\nseeds {first}-{first + BLOCK - 1}: {dict(sorted(tally.items()))}")


def test_the_same_seed_gives_the_same_trace() -> None:
    repeats(run, range(7, 12))


def test_the_trace_does_not_depend_on_the_process() -> None:
    same_in_other_processes(MODULE, run, (7, 11, 42))


def test_virtual_time_jumps_to_the_next_timer() -> None:
    async def nap() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert run_virtually(nap) == pytest.approx(3600)


def test_waiting_for_nothing_is_a_deadlock_not_a_hang() -> None:
    async def wait() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock):
        run_virtually(wait)
