"""Daemons that are killed, stopped and cut off in the middle of an answer: the answer is the same.

Whole processes, started through the command that people use, asked over HTTP.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from tests.chaos.conftest import Row
from tests.chaos.household import SERVING, Household, why_no_cut

COUNT = 300
"""Enough for a fault to hit while the answer runs: the asker is a little ahead of its reader."""

MOMENTS = ("prefill", 1, 7, 31, "last")
POSITIONS = ("first", "middle", "last")
FAULTS = ("kill node", "kill shard", "freeze", "cut")
SHORT = (
    ("kill node", "middle", 7),
    ("kill shard", "first", 1),
    ("freeze", "last", 31),
    ("cut", "middle", 31),
    ("kill shard", "last", "prefill"),
)
GRID = [(f, p, m) for f in FAULTS for p in POSITIONS for m in MOMENTS if (f, p, m) not in SHORT]

Reference = Callable[[list[int], int], list[int]]
Record = Callable[[Row], None]


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(5, 384) for _ in range(length)]


def strike(
    household: Household, fault: str, victims: list[str], rng: random.Random
) -> Callable[[], None]:
    """Does a fault to nodes; with the prefill, a moment that differs from run to run."""
    acts = {
        "kill node": household.kill_node,
        "kill shard": household.kill_shard,
        "freeze": household.freeze,
        "freeze shard": household.freeze_shard,
        "cut": household.cut_links,
    }

    def now() -> None:
        for victim in victims:
            acts[fault](victim)

    return now


def skip_what_cannot_be_done(fault: str) -> None:
    if fault == "cut" and (reason := why_no_cut()):
        pytest.skip(reason)


def check(
    household: Household,
    one_machine: Reference,
    case: tuple[str, str, str | int],
    seed: int,
    record: Record,
) -> None:
    """One fault in one answer, and everything as it should be afterwards."""
    fault, position, moment = case
    skip_what_cannot_be_done(fault)
    rng = random.Random(f"{seed} {case}")
    length = 600 if moment == "prefill" else rng.randint(2, 40)
    prompt = prompt_of(rng, length)
    index = POSITIONS.index(position)
    route = household.route()
    assert len(route) == 3
    at = {"prefill": 0, "last": COUNT - 1}.get(str(moment), moment)

    def act() -> None:
        nonlocal route
        if at != 0:
            route = household.live_route() or route
        strike(household, fault, [route[index]], rng)()

    timer = threading.Timer(rng.uniform(0.02, 0.3), act)
    try:
        answer = household.stream(prompt, COUNT, act=timer.start if at == 0 else act, at=int(at))
        if at == 0:
            timer.join()
        same = answer.token_ids == one_machine(prompt, COUNT)
        record(Row("daemons", fault, position, str(moment), answer.failovers,
                   "equal" if same else "DIFFERENT"))  # fmt: skip
        assert same, f"seed {seed}: {answer.token_ids}"
        assert answer.text_chunks <= COUNT + 1
        # What is lost before its first step or after its last one is not a failover.
        if moment not in ("prefill", "last") or answer.failovers:
            assert answer.failovers == 1
            assert answer.events == ["shard_status", "shard_failover"]
            if at != 0:
                check_caches(answer.steps(), route, index)
    finally:
        timer.cancel()
        household.mend(route[index])


def check_caches(steps: dict[str, int], route: list[str], lost: int) -> None:
    """The hops that nothing happened to ran each chunk and token once: they kept their caches."""
    for index, node in enumerate(route):
        if index != lost:
            assert steps[node] == COUNT, steps


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", SHORT, ids=lambda case: "-".join(map(str, case)).replace(" ", "_"))
def test_the_answer_survives(
    household: Household, one_machine: Reference, record: Record, case: tuple[str, str, str | int]
) -> None:
    check(household, one_machine, case, 1, record)


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", GRID, ids=lambda case: "-".join(map(str, case)).replace(" ", "_"))
def test_the_answer_survives_everything(
    household: Household, one_machine: Reference, record: Record, case: tuple[str, str, str | int]
) -> None:
    check(household, one_machine, case, 1, record)


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(20))
def test_two_hops_are_lost_in_one_answer(
    household: Household, one_machine: Reference, record: Record, seed: int
) -> None:
    rng = random.Random(seed)
    prompt = prompt_of(rng, rng.randint(2, 200))
    picked = rng.sample(range(len(POSITIONS)), 2)
    victims: list[str] = []
    fault = rng.choice([*FAULTS, "freeze shard"])
    skip_what_cannot_be_done(fault)
    at = rng.randint(1, COUNT // 2)

    def act() -> None:
        route = household.live_route()
        victims.extend(route[index] for index in picked)
        strike(household, fault, victims, rng)()

    try:
        answer = household.stream(prompt, COUNT, act=act, at=at)
        same = answer.token_ids == one_machine(prompt, COUNT)
        verdict = "equal" if same else "DIFFERENT"
        record(Row("daemons", f"2x {fault}", "any", str(at), answer.failovers, verdict))
        assert same, f"seed {seed}: {answer.token_ids}"
        assert answer.failovers == 2
    finally:
        household.mend(*victims)
    assert set(household.route()) <= set(SERVING)
