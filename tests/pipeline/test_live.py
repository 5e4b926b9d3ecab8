"""What the daemon counts of generations that run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mesh.health.metrics import Metrics
from mesh.pipeline.live import LiveCounts
from mesh.types import GenerationRequest, ModelId, TokenDelta, shown_id
from tests.events.support import FakeClock
from tests.fakes import done
from tests.health.test_metrics import samples_of


def row_of(counts: LiveCounts) -> dict[str, Any]:
    row = counts.row(shown_id("a"))
    assert row is not None
    return row


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, ModelId("m"), prompt="x")


def test_tokens_rate_and_first_token_are_those_of_the_frames() -> None:
    clock, changes = FakeClock(), []
    counts = LiveCounts(clock, lambda: changes.append(1))
    with counts.counting(request("a")) as seen:
        assert row_of(counts)["first_token_ms"] is None
        clock.seconds += 0.25
        seen(TokenDelta("x", (1,), prompt_tokens=9))
        for _ in range(10):
            clock.seconds += 0.1
            seen(TokenDelta("x", (1,)))
        row = row_of(counts)
        assert row["first_token_ms"] == 250
        assert (row["prompt_tokens"], row["tokens"]) == (9, 11)
        assert row["tokens_per_second"] == pytest.approx(10)
        clock.seconds += 11
        assert row_of(counts)["tokens_per_second"] == pytest.approx(10 / 11, abs=0.01)
        assert counts.row("nobody") is None
    assert counts.row(shown_id("a")) is None
    assert len(changes) == 13


def test_an_end_that_was_not_expected_is_one() -> None:
    counts = LiveCounts(FakeClock(), lambda: None)
    with pytest.raises(ZeroDivisionError), counts.counting(request("a")):
        raise ZeroDivisionError
    assert counts.row(shown_id("a")) is None


def test_what_becomes_of_generations_is_counted() -> None:
    clock, metrics = FakeClock(), Metrics()
    counts = LiveCounts(clock, lambda: None, metrics.generations)
    with counts.entering(ModelId("m")), counts.counting(request("a")) as seen:
        for gap_s in (1.0, 0.25, 0.5):
            clock.seconds += gap_s
            seen(TokenDelta("x", (1,)))
        assert counts.states(queued=0) == (("running", 1), ("waiting", 1))
        assert counts.states(queued=1) == (("running", 0), ("waiting", 2))
        seen(done((1, 2, 3)))
    assert counts.states(queued=1) == (("running", 0), ("waiting", 0))
    for error in (asyncio.CancelledError, GeneratorExit, ZeroDivisionError):
        with pytest.raises(error), counts.counting(request("b")):
            raise error
    found = samples_of(metrics)
    assert found["hearthnet_inter_token_seconds_count{}"] == 2
    assert found["hearthnet_inter_token_seconds_sum{}"] == 0.75
    outcomes = {"stop": 1, "cancelled": 2, "error": 1}
    for outcome, count in outcomes.items():
        assert found[f"hearthnet_generations_ended_total{{outcome={outcome}}}"] == count
