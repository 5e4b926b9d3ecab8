"""Sessions on layers that keep a running state: what they go back to, and what that costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mesh.errors import SessionGone
from mesh.shard.compiled.slots import SlotCache
from mesh.shard.footprint import keeps_states, state_bytes
from mesh.shard.kv import SessionCache
from mesh.shard.marks import MARKS, REACH
from mesh.shard.runtime import KeyValueCache, Runtime, StepInput
from mesh.types import Site
from tests.checkpoints import FAMILIES, MORE_FAMILIES, STATEFUL
from tests.shard.compiled.spans import COMPILED, compiled
from tests.shard.spans import WHOLE, checkpoint, relative_error, rows, runtime, step
from tests.shard.test_lean import WITH_STATES, needs_packing
from tests.shard.test_lean import runtime as lean

RECURRENT = [family for family in STATEFUL if family in COMPILED]
"""Those that are computed by graphs as well."""
ALL = [
    *(("modules", each) for each in STATEFUL),
    *(("lean", each) for each in WITH_STATES),
    *(("graphs", each) for each in RECURRENT),
]


def made(by: str, family: str = "qwen3_5") -> Runtime:
    """A fresh runtime of a family: by transformers' modules, without them, or by graphs."""
    if by == "graphs":
        return compiled(None, family, positions=1024)
    return runtime(family) if by == "modules" else lean(family)


each_way = pytest.mark.parametrize(
    "by", ["modules", pytest.param("lean", marks=needs_packing), "graphs"]
)


def fed(span: Runtime, hidden: torch.Tensor, chunk: int = 128) -> KeyValueCache:
    """A session that was fed these rows, in chunks."""
    cache = span.new_cache(1024)
    for start in range(0, hidden.shape[1], chunk):
        step(span, cache, start, hidden[:, start : start + chunk])
    return cache


GOING_BACK = (
    "qwen3_5", "lfm2", "granitemoehybrid", "granitemoehybrid_dense", "falcon_h1", "kimi_linear",
)  # fmt: skip


@pytest.mark.parametrize(("by", "family"), [each for each in ALL if each[1] in GOING_BACK])
def test_rows_after_going_back_are_those_of_a_session_that_never_went_on(
    by: str, family: str
) -> None:
    span = made(by, family)
    hidden, other = rows(400), rows(40, seed=1)
    # To before the last chunk's end, into the chunk before it, and to where one began.
    for back in (399, 380, 300, 256, 140):
        cache = fed(span, hidden)
        for at in range(400, 404):
            step(span, cache, at, rows(1, seed=at))
        found = step(span, cache, back, other)
        again = step(span, cache, back + 40, rows(1, seed=2))
        plain = fed(span, hidden[:, :back])
        assert relative_error(found, step(span, plain, back, other)) < 1e-4
        assert relative_error(again, step(span, plain, back + 40, rows(1, seed=2))) < 1e-4


@each_way
def test_drafts_are_taken_back_however_often_also_two_at_a_time(by: str) -> None:
    span = made(by)
    hidden = rows(120)
    cache, expected = fed(span, hidden[:, :20]), fed(span, hidden)
    position = 20
    while position < 100:
        kept = hidden[:, position : position + 3]
        first = step(span, cache, position, torch.cat([kept, rows(13, seed=position)], 1))
        step(span, cache, position + 16, rows(16, seed=position + 1))
        plain = span.new_cache(256)
        step(span, plain, 0, hidden[:, :position])
        assert relative_error(first[:, :3], step(span, plain, position, kept)) < 1e-4
        position += 3
    last = step(span, cache, position, hidden[:, position:])
    whole = step(span, expected, 0, hidden)
    assert relative_error(last, whole[:, position:]) < 1e-4


@each_way
def test_where_a_draft_was_taken_back_a_prompt_may_begin_and_go_on(by: str) -> None:
    span = made(by)
    hidden = rows(140)
    cache = fed(span, hidden[:, :20])
    step(span, cache, 20, rows(3, seed=1))
    for start in (20, 60, 100):
        found = step(span, cache, start, hidden[:, start : start + 40])
    plain = fed(span, hidden[:, :100])
    assert relative_error(found, step(span, plain, 100, hidden[:, 100:])) < 1e-4


@each_way
def test_what_cannot_be_gone_back_to_ends_the_session_and_says_so(by: str) -> None:
    span = made(by)
    cache = fed(span, rows(1000))
    assert cache.held(900) == 900
    assert cache.held(500) < 500
    with pytest.raises(SessionGone, match="position 500"):
        span.forward([StepInput(cache, 500, rows(1))])
    # From the beginning it may be replayed.
    plain = made(by).forward([StepInput(span.new_cache(64), 0, rows(9, seed=3))])[0]
    assert relative_error(step(span, cache, 0, rows(9, seed=3)), plain) < 1e-4


@each_way
def test_a_forward_that_fails_half_way_leaves_the_session_as_it_was(by: str) -> None:
    span = made(by)
    hidden = rows(60)
    cache, plain = fed(span, hidden), fed(span, hidden)
    for position, count in ((60, 1), (60, 30), (50, 4)):
        with pytest.raises(RuntimeError, match="half-way"):
            span.forward([StepInput(cache, position, rows(count, seed=9), (Failing(),))])
        assert cache.length == min(position, 60)
    step(span, plain, 50, hidden[:, 50:])
    step(span, cache, 50, hidden[:, 50:])
    assert torch.equal(step(span, cache, 60, rows(1, 4)), step(span, plain, 60, rows(1, 4)))


class Failing:
    """A hook behind the third layer."""

    site = Site(2)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("it failed half-way")


@each_way
def test_a_session_begins_as_another_where_that_has_states(by: str) -> None:
    span = made(by)
    hidden = rows(500)
    source = fed(span, hidden)
    step(span, source, 500, rows(1, seed=5))
    for common in (470, 384):
        copy, plain = span.new_cache(1024), fed(span, hidden[:, :common])
        copy.copy(source, source.held(common))
        assert copy.length == common
        # Each goes its own way.
        step(span, source, 501, rows(1, seed=6))
        source.cut(501)
        new = rows(7, seed=8)
        assert relative_error(step(span, copy, common, new), step(span, plain, common, new)) < 1e-4


@pytest.mark.parametrize("family", FAMILIES + MORE_FAMILIES)
def test_models_with_states_are_known_by_what_they_store(family: str) -> None:
    manifest = checkpoint(family)
    has_some = family in STATEFUL
    assert (state_bytes(manifest, WHOLE) > 0) is keeps_states(manifest) is has_some


@pytest.mark.parametrize(("by", "family"), ALL)
def test_states_take_no_more_than_was_said(by: str, family: str) -> None:
    span = made(by, family)
    cache = fed(span, rows(700))
    position = 700
    for count in (4, 1, 1, 4, 1):
        step(span, cache, position, rows(count))
        position += count
    plain: Any = SessionCache if isinstance(cache, SessionCache) else SlotCache
    by_length = plain.allocated_bytes.__get__(cache)
    inputs = 2 * MARKS * REACH * rows(1).nbytes
    said = state_bytes(checkpoint(family), WHOLE)
    assert 0 < cache.allocated_bytes - by_length <= said + inputs
