"""Graphs compute what transformers computes, for every family that they take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mesh.errors import BadRequest, ContextTooLong
from mesh.models.families import family_of
from mesh.models.standard import has_other_layers
from mesh.shard.compiled.formats import Quant
from mesh.shard.compiled.parts import Attention, NotCompilable
from mesh.shard.compiled.proof import require_compilable
from mesh.shard.compiled.runtime import CompiledRuntime
from mesh.shard.compiled.slots import SLOTS
from mesh.shard.compiled.store import GraphSpan
from mesh.shard.hooks import Hook
from mesh.shard.runtime import StepInput
from mesh.shard.scheduler import run
from mesh.types import LayerRange, Site
from tests.checkpoints import WINDOW
from tests.shard.compiled.spans import (
    COMPILED,
    EXPERTS,
    REFUSED,
    added,
    compiled,
    in_torch,
    span,
)
from tests.shard.spans import (
    HIDDEN,
    WHOLE,
    checkpoint,
    in_stretches,
    relative_error,
    rows,
    step,
    whole_model,
)

QUANTS: tuple[Quant, ...] = ("int8", "int4")
ROUNDING = 0.06
"""Of these random models: what rounding each row to 8 bit adds, relative to what the layers do."""


@pytest.mark.parametrize("family", COMPILED)
def test_two_spans_with_chunks_decode_and_rollback_give_what_hugging_face_gives(
    family: str,
) -> None:
    spans = [compiled(None, family, LayerRange(0, 1)), compiled(None, family, LayerRange(1, 4))]
    hidden = rows(WINDOW + 40)
    assert relative_error(in_stretches(spans, hidden), whole_model(family, hidden)) < 1e-4


@pytest.mark.parametrize("family", COMPILED)
@pytest.mark.parametrize("quant", QUANTS)
def test_few_bits_are_as_far_from_the_same_weights_in_torch_as_rounding_rows_explains(
    family: str, quant: Quant
) -> None:
    # Behind many mixtures of experts most rows have gone to another one somewhere by a hair.
    runtime = compiled(quant, family, LayerRange(0, 2) if family in EXPERTS else WHOLE)
    reference = in_torch(runtime)
    hidden = rows(WINDOW + 26)
    ours, theirs = runtime.new_cache(256), reference.new_cache(256)
    for start, stop, size in [(0, 61, 61), (61, 83, 22), (83, 90, 1)]:  # over a window
        found, expected = (
            torch.cat(
                [step(by, held, at, hidden[:, at : at + size]) for at in range(start, stop, size)],
                1,
            )
            for by, held in ((runtime, ours), (reference, theirs))
        )
        assert added(found, expected, hidden[:, start:stop]) < ROUNDING


@pytest.mark.parametrize("family", REFUSED)
def test_what_no_graph_is_built_for_is_refused_with_its_reason(family: str) -> None:
    reasons = "experts beside|normalises by Identity"
    with pytest.raises(NotCompilable, match=reasons):
        require_compilable(family_of(checkpoint(family)), None)


@pytest.mark.parametrize(
    "family",
    ["dots1", "granitemoe", "qwen2_moe", "exaone_moe", "gemma4_unified_text", "deepseek_v2"],
)
def test_what_plans_take_to_be_computed_in_few_bits_is(family: str) -> None:
    manifest = checkpoint(family)
    require_compilable(family_of(manifest), None)
    assert not has_other_layers(manifest.config)


@pytest.mark.parametrize("family", EXPERTS)
def test_plans_know_the_same_of_every_mixture(family: str) -> None:
    assert not has_other_layers(checkpoint(family).config)


def test_what_only_long_sessions_come_to_is_computed_and_looked_at() -> None:
    require_compilable(family_of(checkpoint("ministral3")), None)
    graphs, hidden = span(None, "ministral3"), rows(200)
    attention = graphs.layers[0].parts.mixer
    assert isinstance(attention, Attention)
    assert attention.growth is not None
    assert attention.growth.first < 200  # from there on its queries are scaled by their position
    expected = whole_model("ministral3", hidden)

    def off(graphs: GraphSpan) -> float:
        runtime = CompiledRuntime(graphs, threads=1, positions=256)
        cache = runtime.new_cache(256)
        found = [step(runtime, cache, at, hidden[:, at : at + 100]) for at in (0, 100)]
        return relative_error(torch.cat(found, 1), expected)

    assert off(graphs) < 1e-4
    layers = tuple(
        replace(each, parts=replace(each.parts, mixer=replace(each.parts.mixer, growth=None)))
        for each in graphs.layers
    )
    assert off(replace(graphs, layers=layers)) > 1e-4


@pytest.mark.parametrize("family", COMPILED)
@pytest.mark.parametrize("quant", QUANTS)
def test_a_row_has_the_same_bits_in_whatever_chunks_it_comes(family: str, quant: Quant) -> None:
    runtime, hidden = compiled(quant, family), rows(140)
    expected = step(runtime, runtime.new_cache(256), 0, hidden)
    # One row, one that is alone in the last tile of its chunk, a whole tile.
    for sizes in ([1], [2], [7], [65, 1], [64], [100, 1, 1, 5]):
        cache, found = runtime.new_cache(256), []
        while cache.length < hidden.shape[1]:
            start = cache.length
            part = hidden[:, start : start + sizes[len(found) % len(sizes)]]
            found.append(step(runtime, cache, start, part))
        assert torch.equal(torch.cat(found, dim=1), expected), sizes


@pytest.mark.parametrize("quant", QUANTS)
def test_a_row_has_the_same_bits_in_any_batch(quant: Quant) -> None:
    runtime = compiled(quant)
    caches = [runtime.new_cache(128) for _ in range(SLOTS + 2)]  # over two banks
    alone, steps = [], []
    for i, cache in enumerate(caches):
        length = 3 + 7 * i
        step(runtime, cache, 0, rows(length, seed=i))
        last = rows(1, seed=100 + i)
        alone.append(step(runtime, cache, length, last))
        steps.append(StepInput(cache, length, last))
    some = [9, 1, 3, 6, 8, 0]  # in any order
    for one, other in zip(some, runtime.forward([steps[i] for i in some]), strict=True):
        assert torch.equal(alone[one], other)
    for i, other in enumerate(runtime.forward(steps)):
        assert torch.equal(alone[i], other)
    chunk = rows(150, seed=5)
    expected = step(runtime, runtime.new_cache(256), 0, chunk)
    piece = StepInput(runtime.new_cache(256), 0, chunk)
    for i, other in enumerate(runtime.forward([*steps[:3], piece, *steps[3:]])):
        assert torch.equal(expected if i == 3 else alone[i - (i > 3)], other)


def test_rows_of_others_write_nothing_into_an_idle_session() -> None:
    runtime = compiled("int8")
    one, idle, other = (runtime.new_cache(64) for _ in range(3))
    for cache in (one, other):
        step(runtime, cache, 0, rows(2))
    full = rows(64, seed=3)
    step(runtime, idle, 0, full[:, :63])
    untouched = runtime.new_cache(64)
    step(runtime, untouched, 0, full[:, :63])
    for position in range(2, 6):
        row = rows(1, seed=position)
        runtime.forward([StepInput(one, position, row), StepInput(other, position, row)])
    last = full[:, 63:]
    assert torch.equal(step(runtime, idle, 63, last), step(runtime, untouched, 63, last))
    runtime.forward([StepInput(one, 6, rows(1)), StepInput(other, 6, rows(1))])  # idle is full now
    assert torch.equal(step(runtime, idle, 63, last), step(runtime, untouched, 63, last))


def test_a_slot_is_given_on_empty() -> None:
    runtime = compiled("int8")
    fresh = runtime.new_cache(160)
    expected = step(runtime, fresh, 0, rows(3, seed=5))
    first = runtime.new_cache(160)
    slot = (first.bank, first.slot)
    step(runtime, first, 0, rows(140))
    taken = first.allocated_bytes
    del first
    again = runtime.new_cache(160)
    assert (again.bank, again.slot) == slot
    assert (again.length, again.allocated_bytes) == (0, 0)
    assert torch.equal(step(runtime, again, 0, rows(3, seed=5)), expected)
    assert 0 < again.allocated_bytes < taken


@pytest.mark.parametrize("family", ["glm4_moe_lite", "qwen3/4x1x160"])
def test_a_slot_is_given_on_without_what_was_no_number_in_it(family: str) -> None:
    """Attention takes keys behind a session's end there, and weighs them with nothing."""
    runtime = compiled("int8", family)
    expected = step(runtime, runtime.new_cache(64), 0, rows(10))
    spoiled, cache = rows(43), runtime.new_cache(64)
    spoiled[:, 5:] = torch.nan
    step(runtime, cache, 0, spoiled)
    del cache
    assert torch.equal(step(runtime, runtime.new_cache(64), 0, rows(10)), expected)


def test_limits_are_those_of_the_torch_runtime() -> None:
    runtime = compiled("int8")
    cache = runtime.new_cache(16)
    with pytest.raises(BadRequest, match="position 1"):
        step(runtime, cache, 1, rows(1))
    with pytest.raises(ContextTooLong, match="at most 16"):
        step(runtime, cache, 0, rows(17))
    assert cache.length == 0
    step(runtime, cache, 0, rows(16))
    with pytest.raises(ContextTooLong):
        step(runtime, cache, 16, rows(1))
    cache.max_tokens = 200  # as a shard gives more to a session that asks for it
    step(runtime, cache, 16, rows(184))


def test_without_neighbours_a_row_is_always_computed_alone() -> None:
    runtime = compiled("int4", batch_invariant=True)
    caches = [runtime.new_cache(64) for _ in range(3)]
    steps = [StepInput(cache, 0, rows(1, seed=i)) for i, cache in enumerate(caches)]
    with pytest.raises(ValueError, match="up to 0 rows"):
        runtime.forward(steps)
    together = run(runtime, steps, WHOLE)
    for i, found in enumerate(together):
        assert torch.equal(found, step(runtime, runtime.new_cache(64), 0, rows(1, seed=i)))


class Shift:
    """Adds to what passes, and keeps it."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.seen: list[torch.Tensor] = []

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen.append(hidden.clone())
        return hidden + 1


@pytest.mark.parametrize(
    "site", [Site(1), Site(2, side="input"), Site(3), Site(1, "mlp"), Site(2, "self_attn.o_proj")]
)
def test_hooks_see_and_change_what_they_do_in_torch(site: Site) -> None:
    runtime = compiled("int8")
    hook: Hook = Shift(site)
    cache, other = runtime.new_cache(64, (hook,)), runtime.new_cache(64)
    chunk, row = rows(5), rows(1, seed=1)
    runtime.forward([StepInput(cache, 0, chunk, (hook,))])
    step(runtime, other, 0, rows(9))
    before = step(runtime, runtime_cache := runtime.new_cache(64), 0, rows(9))
    assert before.shape == (1, 9, HIDDEN)
    found, beside = runtime.forward([StepInput(cache, 5, row, (hook,)), StepInput(other, 9, row)])
    assert torch.equal(beside, step(runtime, runtime_cache, 9, row))  # nobody else's
    reference, theirs = in_torch(runtime), Shift(site)
    expected_cache = reference.new_cache(64)
    reference.forward([StepInput(expected_cache, 0, chunk, (theirs,))])
    (expected,) = reference.forward([StepInput(expected_cache, 5, row, (theirs,))])
    assert added(found, expected, row) < ROUNDING
    for mine, its in zip(hook.seen, theirs.seen, strict=True):
        assert mine.shape == its.shape
        assert relative_error(mine, its) < ROUNDING


def test_where_one_of_a_batch_fails_no_cache_has_grown() -> None:
    runtime = compiled("int8")
    hook: Hook = Shift(Site(1, "mlp"))
    hooked, full, plain = runtime.new_cache(8, (hook,)), runtime.new_cache(1), runtime.new_cache(8)
    steps = [StepInput(hooked, 0, rows(1), (hook,)), StepInput(plain, 0, rows(1))]
    runtime.forward([*steps, StepInput(full, 0, rows(1))])
    steps = [replace(each, position=1) for each in steps]
    with pytest.raises(ContextTooLong):
        runtime.forward([*steps, StepInput(full, 1, rows(1))])
    assert [cache.length for cache in (hooked, plain, full)] == [1, 1, 1]
