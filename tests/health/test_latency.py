"""Stall limits: what a hop usually takes, never below the floor nor above the ceiling."""

from __future__ import annotations

import random

import pytest

from mesh.clock import SystemClock
from mesh.pipeline.watch.latency import FLOOR_S, SAMPLES, HopLatency
from mesh.pipeline.watch.oversight import MAX_PACES, Oversight


def trained(step_s: float, *, rows: int = 1, steps: int = 50, spread: float = 0.1) -> HopLatency:
    rng = random.Random(3)
    latency = HopLatency(ceiling_s=30.0)
    for _ in range(steps):
        latency.answered(rows, step_s * rng.uniform(1 - spread, 1 + spread))
    return latency


def test_an_unknown_size_gets_the_ceiling() -> None:
    latency = HopLatency(ceiling_s=30.0)
    for _ in range(SAMPLES - 1):
        latency.answered(1, 0.01)
    assert latency.limit_s(1) == 30.0
    latency.answered(1, 0.01)
    assert latency.limit_s(1) == FLOOR_S
    assert latency.limit_s(128) == 30.0, "a prefill chunk is another size"


def test_the_limit_follows_what_the_hop_usually_takes() -> None:
    limits = [trained(step_s).limit_s(1) for step_s in (0.005, 0.5, 2.0, 20.0)]
    assert limits[0] == FLOOR_S
    assert 2.5 < limits[1] < 5
    assert 10 < limits[2] < 20
    assert limits[3] == 30.0


def test_a_hop_that_gets_slower_by_and_by_is_followed() -> None:
    latency = trained(0.2)
    for step in range(200):
        step_s = 0.2 * 1.02**step if step < 100 else 1.4
        latency.answered(1, step_s)
        assert not latency.is_slow(1)
    assert latency.limit_s(1) > 6


def test_one_slow_step_is_forgiven_many_in_a_row_are_not() -> None:
    latency = trained(0.01)
    latency.answered(1, 0.9)
    assert not latency.is_slow(1)
    latency.answered(1, 0.01)
    for _ in range(3):
        latency.answered(1, 0.9)
    assert not latency.is_slow(1)
    latency.answered(1, 0.9)
    assert latency.is_slow(1)
    assert latency.limit_s(1) == FLOOR_S, "the slow steps did not become the usual ones"


@pytest.mark.parametrize(("larger_at", "is_slow"), [(19.9, True), (20.5, False)])
def test_only_a_larger_step_that_was_computed_meanwhile_excuses_slow_ones(
    larger_at: float, is_slow: bool
) -> None:
    """They were waited for from 20 s on, it from 18 s on."""
    latency = trained(0.01)
    answers = [(20.9, 1, 0.9), (21.9, 1, 0.9), (22.9, 1, 0.9), (24.0, 1, 0.9)]
    for at, rows, took_s in sorted([*answers, (larger_at, 128, larger_at - 18.0)]):
        latency.answered_at = at
        latency.answered(rows, took_s)
    assert latency.is_slow(1) == is_slow


def test_a_hop_given_up_for_nothing_gets_twice_the_time() -> None:
    latency = trained(0.01)
    assert latency.given_up(0.0, 1.0)
    assert latency.limit_s(1, since=1.5) == 2 * FLOOR_S
    for now in range(2, 11):
        assert latency.given_up(now, now)
    assert latency.limit_s(1) == 30.0
    for _ in range(512 * 10):
        latency.answered(1, 0.01)
    assert latency.limit_s(1) == FLOOR_S


def test_what_waits_since_before_a_strike_is_judged_without_it_and_is_none() -> None:
    latency = trained(0.01)
    assert latency.given_up(since=10.0, now=11.0)
    assert latency.limit_s(1, since=10.9) == FLOOR_S
    assert not latency.given_up(since=10.9, now=11.9)
    assert latency.limit_s(1, since=11.1) == 2 * FLOOR_S
    assert latency.given_up(since=11.1, now=13.1)
    assert latency.limit_s(1, since=13.0) == 2 * FLOOR_S
    assert latency.limit_s(1, since=14.0) == 4 * FLOOR_S


def test_percentiles_are_of_the_latest_steps() -> None:
    latency = HopLatency(ceiling_s=30.0)
    assert latency.percentile_ms(0.5) == 0.0
    for value in range(1, 101):
        latency.answered(1, value / 1000)
    assert latency.percentile_ms(0.50) == 51.0
    assert latency.percentile_ms(0.95) == 96.0


def test_the_paces_of_shards_that_come_and_go_are_bounded() -> None:
    oversight = Oversight(SystemClock(), ceiling_s=30.0)
    steady = oversight.latency(("steady", "toy:0-7"))
    hosts = [(f"host-{number}", "toy:0-7") for number in range(2 * MAX_PACES)]
    first = []
    for host in hosts:
        first.append(oversight.latency(host))
        assert oversight.latency(("steady", "toy:0-7")) is steady, "one in use is not forgotten"
    # The latest first: whoever is asked for and not known takes the place of the longest unused.
    known = [
        oversight.latency(host) is one for host, one in zip(hosts[::-1], first[::-1], strict=True)
    ]
    assert known == [True] * (MAX_PACES - 1) + [False] * (MAX_PACES + 1)


def test_telling_what_is_known_keeps_no_pace_alive() -> None:
    oversight = Oversight(SystemClock(), ceiling_s=30.0)
    key = ("told", "toy:0-7")
    oversight.reputations.failed(key, "lost")
    told = oversight.latency(key)
    for number in range(MAX_PACES):
        assert [row["host"] for row in oversight.rows()] == ["told"]
        oversight.latency((f"host-{number}", "toy:0-7"))
    assert oversight.latency(key) is not told
