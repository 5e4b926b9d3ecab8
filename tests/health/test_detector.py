"""Verdicts on nodes: adaptive, bounded by the ceiling, fair when we are late ourselves."""

from __future__ import annotations

import random

import pytest

from mesh.health.detector import FailureDetector, Verdict
from mesh.health.peerwatch import PeerWatch
from mesh.types import NodeId
from tests.health.clock import ManualClock

ATTIC = NodeId("attic")
KITCHEN = NodeId("kitchen")


def beating(
    clock: ManualClock, intervals: list[float], *, ceiling_s: float = 30.0
) -> FailureDetector:
    detector = FailureDetector(clock, expected_s=5.0, ceiling_s=ceiling_s)
    detector.heard(ATTIC)
    for interval in intervals:
        clock.time += interval
        detector.heard(ATTIC)
    return detector


def silence_until(detector: FailureDetector, clock: ManualClock, verdict: Verdict) -> float:
    """Seconds of silence after which the verdict is given."""
    start = clock.time
    while detector.health(ATTIC).verdict is not verdict:
        clock.time += 0.1
        assert clock.time - start < 100
    return clock.time - start


def test_a_node_that_beats_is_healthy_and_one_never_heard_of_is_lost() -> None:
    clock = ManualClock()
    detector = beating(clock, [5.0] * 20)
    assert detector.health(ATTIC).verdict is Verdict.HEALTHY
    assert detector.health(KITCHEN).verdict is Verdict.LOST


def test_silence_is_suspect_before_it_is_lost_and_lost_within_the_ceiling() -> None:
    clock = ManualClock()
    detector = beating(clock, [5.0] * 20)
    suspect = silence_until(detector, clock, Verdict.SUSPECT)
    lost = suspect + silence_until(detector, clock, Verdict.LOST)
    assert 10 < suspect < lost <= 30


def test_an_irregular_node_gets_more_patience_than_a_regular_one() -> None:
    rng = random.Random(1)
    regular, irregular = ManualClock(), ManualClock()
    quick = silence_until(beating(regular, [5.0] * 40), regular, Verdict.SUSPECT)
    wifi = [rng.choice((5.0, 5.0, 12.0)) for _ in range(40)]
    patient = silence_until(beating(irregular, wifi), irregular, Verdict.SUSPECT)
    assert patient > 1.2 * quick


def test_a_burst_of_news_does_not_make_the_usual_pace_suspicious() -> None:
    clock = ManualClock()
    detector = beating(clock, [0.1] * 60)
    clock.time += 6.0
    assert detector.health(ATTIC).verdict is Verdict.HEALTHY


@pytest.mark.parametrize("ceiling_s", [6.0, 12.0, 30.0])
def test_the_ceiling_holds_whatever_the_habits_are(ceiling_s: float) -> None:
    clock = ManualClock()
    detector = beating(clock, [1.0, 25.0] * 20, ceiling_s=ceiling_s)
    suspect = silence_until(detector, clock, Verdict.SUSPECT)
    lost = suspect + silence_until(detector, clock, Verdict.LOST)
    assert suspect <= ceiling_s * 2 / 3 + 0.2
    assert lost <= ceiling_s + 0.2


def test_our_own_pause_is_nobodys_silence() -> None:
    clock = ManualClock()
    detector = beating(clock, [5.0] * 20)
    clock.time += 60.0  # our process was stopped, or the machine slept
    detector.ticked(late_s=60.0)
    assert detector.health(ATTIC).verdict is Verdict.HEALTHY


def test_a_late_loop_stretches_the_limits_for_a_while() -> None:
    calm_clock, busy_clock = ManualClock(), ManualClock()
    calm, busy = beating(calm_clock, [5.0] * 20), beating(busy_clock, [5.0] * 20)
    busy.ticked(late_s=0.5)
    usual = silence_until(calm, calm_clock, Verdict.SUSPECT)
    stretched = silence_until(busy, busy_clock, Verdict.SUSPECT)
    assert stretched > 1.3 * usual
    for _ in range(20):
        busy.ticked(late_s=0.0)
    assert busy.health(ATTIC).verdict is not Verdict.HEALTHY


def test_the_watch_tells_each_change_once_and_forgets_who_left() -> None:
    clock = ManualClock()
    heard_at = {ATTIC: clock.time, KITCHEN: clock.time}
    changes: list[tuple[NodeId, Verdict]] = []
    watch = PeerWatch(
        FailureDetector(clock, expected_s=5.0, ceiling_s=30.0),
        lambda: [(node, clock.time - at) for node, at in heard_at.items()],
        lambda node, health: changes.append((node, health.verdict)),
    )
    for second in range(80):
        clock.time += 0.5
        heard_at[KITCHEN] = clock.time - clock.time % 5
        if second < 20:
            heard_at[ATTIC] = heard_at[KITCHEN]
        watch.look(0.0)
    assert changes == [(ATTIC, Verdict.SUSPECT), (ATTIC, Verdict.LOST)]
    assert watch.verdict(KITCHEN) is Verdict.HEALTHY
    heard_at[ATTIC] = clock.time
    watch.look(0.0)
    assert changes[-1] == (ATTIC, Verdict.HEALTHY)
    del heard_at[ATTIC]
    watch.look(0.0)
    assert watch.verdict(ATTIC) is Verdict.HEALTHY
    assert len(changes) == 3
