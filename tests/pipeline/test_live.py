"""What the daemon counts of generations that run."""

from __future__ import annotations

from typing import Any

import pytest

from mesh.pipeline.live import LiveCounts
from mesh.types import GenerationRequest, ModelId, TokenDelta, shown_id
from tests.events.support import FakeClock


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
