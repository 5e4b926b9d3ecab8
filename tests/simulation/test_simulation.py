"""Thousands of ways to lose a node, in seconds: those of `tests.simulation.promises` hold."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections import Counter

import pytest

from tests.pipeline.toy_mesh import PRIME, expected_tokens
from tests.simulation.run import run
from tests.simulation.schedule import FAULTS, draw
from tests.simulation.toy import whole_model
from tests.simulation.virtual_loop import Deadlock, run_virtually

QUICK = 250
MANY = 5000
BLOCK = 500


def check(seeds: range) -> Counter[str]:
    """Run them all; what was broken is shown with the seed that shows it again."""
    tally: Counter[str] = Counter()
    broken = []
    for seed in seeds:
        report = run(seed)
        tally += report.tally()
        if report.broken:
            broken.append(f"python -m tests.simulation {seed}   # {report.broken[0]}")
    assert not broken, "\n".join([f"{len(broken)} of {len(seeds)} schedules:", *broken[:10]])
    return tally


def test_schedules_of_faults_never_change_a_token_or_leave_a_request_behind() -> None:
    tally = check(range(QUICK))
    # What makes the above worth something: requests were asked, hops were lost and replaced.
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
    seeds = range(7, 12)
    hashes = [run(seed).trace_hash for seed in seeds]
    assert hashes == [run(seed).trace_hash for seed in seeds]
    assert len(set(hashes)) == len(hashes)


def test_the_trace_does_not_depend_on_the_process() -> None:
    printed = [
        subprocess.run(
            [sys.executable, "-m", "tests.simulation", "--hash", "7", "11", "42"],
            env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True,
            check=True,
            text=True,
            timeout=60,
        ).stdout
        for salt in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert run(42).trace_hash in printed[0]


def test_every_kind_of_fault_is_drawn() -> None:
    kinds = Counter(fault.kind for seed in range(QUICK) for fault in draw(seed).faults)
    assert set(kinds) == set(FAULTS)
    assert min(kinds.values()) >= 10


@pytest.mark.parametrize("seed", range(3))
def test_the_quick_toy_model_equals_the_plain_one(seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(PRIME) for _ in range(rng.randint(1, 30))]
    assert whole_model(prompt, 9) == expected_tokens(prompt, 9)


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
