"""Reputations: growing exclusion, forgiveness, and what weighs more than what."""

from __future__ import annotations

from mesh.pipeline.watch.reputation import (
    DOUBTED,
    EXCLUDED,
    FIRST_EXCLUSION_S,
    FORGIVING_STEPS,
    LIED,
    LONGEST_EXCLUSION_S,
    MAX_SHARDS,
    Reputations,
)
from tests.health.clock import ManualClock

KEY = ("attic", "toy:0-3")


def test_exclusions_double_up_to_ten_minutes() -> None:
    clock = ManualClock()
    reputations = Reputations(clock)
    seen = []
    for _ in range(8):
        seen.append(reputations.failed(KEY, "lost"))
        clock.time += 2
    assert seen == [min(LONGEST_EXCLUSION_S, FIRST_EXCLUSION_S * 2**n) for n in range(8)]


def test_an_exclusion_ends_and_is_a_penalty_until_then() -> None:
    clock = ManualClock()
    reputations = Reputations(clock)
    assert reputations.penalty(KEY) == 0
    reputations.failed(KEY, "lost")
    assert reputations.penalty(KEY) == EXCLUDED
    clock.time += FIRST_EXCLUSION_S
    assert reputations.penalty(KEY) == 0


def test_requests_lost_together_are_one_failure() -> None:
    clock = ManualClock()
    reputations = Reputations(clock)
    assert {reputations.failed(KEY, "lost") for _ in range(5)} == {FIRST_EXCLUSION_S}
    clock.time += 2
    assert reputations.failed(KEY, "lost") == 2 * FIRST_EXCLUSION_S


def test_good_service_and_time_forgive() -> None:
    clock = ManualClock()
    reputations = Reputations(clock)
    for _ in range(3):
        reputations.failed(KEY, "lost")
        clock.time += 2
    for _ in range(2 * FORGIVING_STEPS):
        reputations.served(KEY)
    assert reputations.failed(KEY, "lost") == 2 * FIRST_EXCLUSION_S
    clock.time += 3600
    assert reputations.failed(KEY, "lost") == FIRST_EXCLUSION_S


def test_a_lie_outweighs_whatever_comes_later() -> None:
    clock = ManualClock()
    reputations = Reputations(clock)
    reputations.doubted(KEY, "?")
    assert reputations.penalty(KEY) == DOUBTED
    reputations.lied(KEY, "caught")
    reputations.failed(KEY, "lost")
    clock.time += 2 * LONGEST_EXCLUSION_S
    assert reputations.penalty(KEY) == LIED


def test_what_a_shard_said_is_held_against_its_host_whatever_that_calls_it_next() -> None:
    reputations = Reputations(ManualClock())
    host, other = KEY[0], ("cellar", KEY[1])
    reputations.doubted(KEY, "?")
    assert reputations.penalty((host, "toy:0-3#1")) == DOUBTED
    reputations.lied(KEY, "caught")
    assert reputations.is_liar((host, "toy:4-7"))
    reputations.failed((host, "toy:4-7"), "lost")
    assert reputations.is_liar((host, "toy:4-7")), "a failure of its own does not cover that up"
    assert reputations.penalty(other) == 0
    assert [row["reason"] for row in reputations.rows()] == ["caught", "caught"]


def test_records_are_bounded_and_the_worst_are_kept() -> None:
    clock = ManualClock()
    reputations = Reputations(clock)
    reputations.lied(KEY, "caught")
    for number in range(2 * MAX_SHARDS):
        reputations.checked(("host", str(number)), "agreed")
    assert len(reputations.rows()) == MAX_SHARDS
    assert reputations.penalty(KEY) == LIED
    row = next(row for row in reputations.rows() if row["host"] == "attic")
    assert row["reason"] == "caught"
    assert row["avoided_for_s"] > 0
