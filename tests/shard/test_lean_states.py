"""Layers that keep a running state, without their modules: which bits a row has, and whose states
those are."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from mesh.shard.kv import SessionCache
from mesh.shard.runtime import StepInput
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import Site
from tests.shard.spans import relative_error, rows, step
from tests.shard.spans import runtime as by_modules
from tests.shard.test_lean import WITH_STATES, halved, needs_packed_bf16, needs_packing, runtime

pytestmark = needs_packing
each_family = pytest.mark.parametrize("family", WITH_STATES)
in_16_bit = pytest.mark.parametrize(
    "is_halved", [pytest.param(False, marks=needs_packed_bf16), True]
)


def made(family: str, *, is_halved: bool) -> TorchRuntime:
    span = halved(family)[0] if is_halved else runtime(family, dtype=torch.bfloat16)
    assert span.is_lean
    return span


def fed(span: TorchRuntime, count: int, seed: int = 0) -> SessionCache:
    """A session that holds so many rows."""
    cache = span.new_cache(256)
    step(span, cache, 0, rows(count, seed).to(span.dtype))
    return cache


def one_by_one(span: TorchRuntime, cache: SessionCache, hidden: torch.Tensor) -> torch.Tensor:
    """What becomes of these rows behind the end."""
    return torch.cat([step(span, cache, cache.length, row) for row in torch.split(hidden, 1, 1)], 1)


@each_family
@in_16_bit
def test_sessions_that_are_computed_together_have_the_bits_that_they_have_alone(
    family: str, *, is_halved: bool
) -> None:
    span = made(family, is_halved=is_halved)
    assert span.batch_rows == 1
    lengths = (3, 40, 17, 80, *range(1, 14))
    inputs = [rows(2, seed=10 + i).to(span.dtype) for i in range(len(lengths))]
    alone = [
        one_by_one(span, fed(span, length, seed=i), hidden)
        for i, (length, hidden) in enumerate(zip(lengths, inputs, strict=True))
    ]
    caches = [fed(span, length, seed=i) for i, length in enumerate(lengths)]
    # One of them has a draft to take back, and another began as a copy.
    step(span, caches[2], 17, rows(5, seed=9).to(span.dtype))
    copy = span.new_cache(256)
    copy.copy(caches[3], 80)
    caches[3] = copy
    for at in range(2):
        steps = [
            StepInput(cache, length + at, hidden[:, at : at + 1])
            for cache, length, hidden in zip(caches, lengths, inputs, strict=True)
        ]
        for found, expected in zip(span.forward(steps), alone, strict=True):
            assert torch.equal(found, expected[:, at : at + 1])


@each_family
@in_16_bit
def test_drafts_that_are_taken_back_change_no_bit_of_what_follows(
    family: str, *, is_halved: bool
) -> None:
    span = made(family, is_halved=is_halved)
    hidden = rows(60, seed=1).to(span.dtype)
    expected = one_by_one(span, fed(span, 20), hidden)
    cache, kept = fed(span, 20), 0
    for drafted, right in ((16, 3), (4, 4), (16, 15), (16, 12), (2, 1), (1, 1), (16, 7), (3, 1)):
        wrong = rows(drafted - right, seed=drafted).to(span.dtype)
        some = torch.cat([hidden[:, kept : kept + right], wrong], 1)
        found = step(span, cache, 20 + kept, some)[:, :right]
        assert torch.equal(found, expected[:, kept : kept + right])
        kept += right
    assert torch.equal(
        step(span, cache, 20 + kept, hidden[:, kept:][:, :8]), expected[:, kept:][:, :8]
    )


class Passing:
    """A hook, which only modules have a place for. It sees, and fails where it is told to."""

    site = Site(1)

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("it failed half-way")
        return hidden


@each_family
def test_steps_by_modules_and_without_them_go_on_with_the_same_states(family: str) -> None:
    span, plain = runtime(family), by_modules(family)
    hidden = rows(120)
    cache, expected = span.new_cache(256), plain.new_cache(256)
    ends = (0, 40, 41, 42, 45, 46, 50, 90, 91, 92, 120)
    for number, (start, stop) in enumerate(pairwise(ends)):
        hooks = (Passing(),) if number % 2 else ()
        found = span.forward([StepInput(cache, start, hidden[:, start:stop], hooks)])[0]
        assert relative_error(found, step(plain, expected, start, hidden[:, start:stop])) < 1e-4
    # And back, into what modules computed and into what they did not.
    for back, hooks in ((118, ()), (91, (Passing(),)), (91, ())):
        found = span.forward([StepInput(cache, back, rows(3), hooks)])[0]
        assert relative_error(found, step(plain, expected, back, rows(3))) < 1e-4


@each_family
def test_where_one_of_a_batch_fails_the_states_of_none_have_changed(family: str) -> None:
    span = runtime(family)
    caches, twins = ([fed(span, 30, seed=i) for i in range(3)] for _ in range(2))
    step(span, caches[0], 30, rows(4, seed=5))  # a draft, which is to be taken back
    steps = [StepInput(cache, 30, rows(1)) for cache in caches]
    steps[1] = StepInput(caches[1], 30, rows(1), (Passing(fails=True),))
    with pytest.raises(RuntimeError, match="half-way"):
        span.forward(steps)
    assert [cache.length for cache in caches] == [30, 30, 30]
    for cache, twin in zip(caches, twins, strict=True):
        assert torch.equal(step(span, cache, 30, rows(1, 6)), step(span, twin, 30, rows(1, 6)))
