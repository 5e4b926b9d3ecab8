"""What people are told of a fetch, with a hand on the clock: how fast it was of late, not ever."""

from __future__ import annotations

import pytest

from mesh.transfers.meter import Meter

MB = 1_000_000


def fed(rate: int, since: int, until: int, meter: Meter | None = None) -> Meter:
    """One that got so many bytes each second of [since, until), in tenths of it."""
    meter = meter or Meter()
    meter.total = meter.total or 100 * MB
    for tenth in range(10 * since, 10 * until):
        meter.arrived("attic", "Attic", rate // 10, tenth / 10)
        meter.done += rate // 10
    return meter


def test_nothing_is_promised_before_anything_came() -> None:
    meter = Meter()
    meter.total = 100 * MB
    assert (meter.rate(0.0), meter.eta_s(0.0), meter.sources(0.0)) == (0.0, None, [])


def test_an_even_flow_has_its_rate_and_the_rest_takes_what_it_takes() -> None:
    meter = fed(2 * MB, 0, 10)
    assert meter.rate(10.0) == pytest.approx(2 * MB, rel=0.03)
    assert meter.eta_s(10.0) == pytest.approx(80 / 2, rel=0.03)


def test_what_was_faster_before_is_forgotten_after_five_seconds() -> None:
    meter = fed(1 * MB, 10, 16, fed(9 * MB, 0, 10))
    assert meter.rate(16.0) == pytest.approx(1 * MB, rel=0.03)
    assert meter.eta_s(16.0) == pytest.approx((100 - 96) / 1, rel=0.03)


def test_who_comes_to_a_stop_is_said_to_and_has_no_time_left() -> None:
    meter = fed(2 * MB, 0, 10)
    assert 0 < meter.rate(13.0) < 2 * MB
    assert (meter.rate(15.1), meter.eta_s(15.1)) == (0.0, None)


def test_the_first_bytes_are_not_taken_for_a_flood() -> None:
    """A rate over less than half a second would be anything."""
    meter = Meter()
    meter.arrived("attic", "Attic", MB, 7.0)
    assert meter.rate(7.0) == 2 * MB


def test_each_source_has_its_own_rate_and_all_that_it_gave() -> None:
    meter = Meter()
    for second in range(10):
        meter.arrived("kitchen", "Kitchen", MB, float(second))
        fed(3 * MB, second, second + 1, meter)
    kitchen, attic = meter.sources(10.0)
    assert (attic.name, attic.bytes, kitchen.name, kitchen.bytes) == (
        "Attic", 30 * MB, "Kitchen", 10 * MB
    )  # fmt: skip
    assert attic.bytes_per_s == pytest.approx(3 * MB, rel=0.03)
    assert kitchen.bytes_per_s == pytest.approx(MB, rel=0.03)
    assert meter.rate(10.0) == pytest.approx(4 * MB, rel=0.03)
