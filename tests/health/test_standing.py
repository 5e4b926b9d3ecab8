"""Standings: growing exclusion, forgiveness, and what weighs more than what."""

from __future__ import annotations

from mesh.health.standing import (
    DOUBTED,
    EXCLUDED,
    FIRST_EXCLUSION_S,
    FORGIVING_STEPS,
    LIED,
    LONGEST_EXCLUSION_S,
    MAX_SHARDS,
    Standings,
)
from tests.health.clock import ManualClock

KEY = ("attic", "toy:0-3")


def test_exclusions_double_up_to_ten_minutes() -> None:
    clock = ManualClock()
    standings = Standings(clock)
    seen = []
    for _ in range(8):
        seen.append(standings.failed(KEY, "lost"))
        clock.time += 2
    assert seen == [min(LONGEST_EXCLUSION_S, FIRST_EXCLUSION_S * 2**n) for n in range(8)]


def test_an_exclusion_ends_and_is_a_penalty_until_then() -> None:
    clock = ManualClock()
    standings = Standings(clock)
    assert standings.penalty(KEY) == 0
    standings.failed(KEY, "lost")
    assert standings.penalty(KEY) == EXCLUDED
    assert not standings.is_trusted(KEY)
    clock.time += FIRST_EXCLUSION_S
    assert standings.penalty(KEY) == 0


def test_requests_lost_together_are_one_failure() -> None:
    clock = ManualClock()
    standings = Standings(clock)
    assert {standings.failed(KEY, "lost") for _ in range(5)} == {FIRST_EXCLUSION_S}
    clock.time += 2
    assert standings.failed(KEY, "lost") == 2 * FIRST_EXCLUSION_S


def test_good_service_and_time_forgive() -> None:
    clock = ManualClock()
    standings = Standings(clock)
    for _ in range(3):
        standings.failed(KEY, "lost")
        clock.time += 2
    for _ in range(2 * FORGIVING_STEPS):
        standings.served(KEY)
    assert standings.failed(KEY, "lost") == 2 * FIRST_EXCLUSION_S
    clock.time += 3600
    assert standings.failed(KEY, "lost") == FIRST_EXCLUSION_S


def test_a_lie_outweighs_whatever_comes_later() -> None:
    clock = ManualClock()
    standings = Standings(clock)
    standings.doubted(KEY, "?")
    assert standings.penalty(KEY) == DOUBTED
    standings.lied(KEY, "caught")
    standings.failed(KEY, "lost")
    clock.time += 2 * LONGEST_EXCLUSION_S
    assert standings.penalty(KEY) == LIED


def test_records_are_bounded_and_the_worst_are_kept() -> None:
    clock = ManualClock()
    standings = Standings(clock)
    standings.lied(KEY, "caught")
    for number in range(2 * MAX_SHARDS):
        standings.checked(("host", str(number)), "agreed")
    assert len(standings.rows()) == MAX_SHARDS
    assert standings.penalty(KEY) == LIED
    row = next(row for row in standings.rows() if row["host"] == "attic")
    assert row["reason"] == "caught"
    assert row["avoided_for_s"] > 0
