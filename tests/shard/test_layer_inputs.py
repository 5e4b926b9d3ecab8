"""Layers that take numbers of their own beside hidden states, and see keys of each other, computed
in every way that steps are."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig

from mesh.errors import BadRequest, UnsupportedFamily
from mesh.models.cuts import Cuts
from mesh.models.families import family_of, family_of_config
from mesh.models.load import load_span
from mesh.models.row_form import RowForm
from mesh.models.standard import has_other_layers
from mesh.shard.compiled.formats import Quant
from mesh.shard.compiled.proof import check_kernels, require_compilable
from mesh.shard.compiled.runtime import CompiledRuntime
from mesh.shard.compiled.store import dense_span, quantised_span
from mesh.shard.footprint import cached_numbers, estimate, position_bytes
from mesh.shard.kv import SessionCache
from mesh.shard.lean_proof import require_lean
from mesh.shard.runtime import Runtime, StepInput
from mesh.shard.steering import SessionEdits
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import LayerRange
from tests.checkpoints import WINDOW
from tests.research.steering.local import edit, load, low_rank_file, steered
from tests.shard.asker import Attic
from tests.shard.spans import (
    CPU,
    HIDDEN,
    checkpoint,
    in_stretches,
    relative_error,
    step,
    whole_model,
)

LAYERS, JOINED = 8, 2
ALL = LayerRange(0, LAYERS)
HALVES = LayerRange(0, JOINED), LayerRange(JOINED, LAYERS)
"""The second sees keys within it only."""
QUANTS: tuple[Quant, ...] = ("int8", "int4")
FORM = RowForm(HIDDEN, LAYERS, 16)


FORMS = {
    "gemma4_e": FORM,
    "gemma3n": RowForm(HIDDEN, LAYERS, 16, streams=3),
}
"""Of the second no layers are lean."""


def rows(count: int, seed: int = 0, form: RowForm = FORM) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, count, form.size, generator=generator)


def runtime(
    layers: LayerRange = ALL, *, lean: bool, dtype: torch.dtype, family: str = "gemma4_e"
) -> TorchRuntime:
    loaded = load_span(checkpoint(family, LAYERS), layers, dtype=dtype, device=CPU)
    made = TorchRuntime(loaded, device=CPU, dtype=dtype, lean=lean)
    assert (made.is_lean, made.batch_rows, made.row_size) == (lean, 1, FORMS[family].size)
    return made


def graphs(quant: Quant | None, layers: LayerRange = ALL) -> CompiledRuntime:
    manifest = checkpoint("gemma4_e", LAYERS)
    loaded = load_span(manifest, layers, dtype=torch.float32, device=CPU)
    made = (
        dense_span(loaded)
        if quant is None
        else quantised_span(loaded, quant, manifest.weights_sha256, None)
    )
    return CompiledRuntime(made, threads=1, positions=256)


@pytest.mark.parametrize(
    ("family", "way"),
    [*(("gemma4_e", way) for way in ("modules", "lean", "graphs")), ("gemma3n", "modules")],
)
def test_chunks_decode_and_rollback_over_two_spans_give_what_hugging_face_gives(
    family: str, way: str
) -> None:
    form = FORMS[family]
    spans: list[Runtime] = [
        graphs(None, layers)
        if way == "graphs"
        else runtime(layers, lean=way == "lean", dtype=torch.float32, family=family)
        for layers in HALVES
    ]
    given, states = rows(WINDOW + 40, form=form), form.states
    expected = whole_model(family, given, LAYERS)
    assert torch.equal(expected[..., states:], given[..., states:])
    found = in_stretches(spans, given)
    assert relative_error(found[..., :states], expected[..., :states]) < 1e-4
    assert torch.equal(found[..., states:], given[..., states:])


@pytest.mark.parametrize(
    ("family", "lean"), [("gemma4_e", False), ("gemma4_e", True), ("gemma3n", False)]
)
def test_a_row_in_a_ragged_batch_equals_the_row_alone(family: str, lean: bool) -> None:
    span, form = runtime(lean=lean, dtype=torch.bfloat16, family=family), FORMS[family]
    alone, inputs = [], []
    for i, length in enumerate((3, WINDOW + 20, 17, WINDOW - 1)):
        first, last = (rows(*each, form).bfloat16() for each in ((length, i), (1, 100 + i)))
        cache = span.new_cache(256)
        step(span, cache, 0, first)
        alone.append(step(span, cache, length, last))
        inputs.append(StepInput(cache, length, last))
    for one, batched in zip(alone, span.forward(inputs), strict=True):
        assert relative_error(batched, one) < 0.02


@pytest.mark.parametrize("quant", QUANTS)
def test_in_few_bits_rows_are_those_of_torch_but_for_rounding_and_the_same_in_any_chunk_and_batch(
    quant: Quant,
) -> None:
    span, given = graphs(quant), rows(WINDOW + 20)
    reference = TorchRuntime(span.loaded, device=CPU, dtype=torch.float32)
    theirs = step(reference, reference.new_cache(256), 0, given)
    whole = step(span, span.new_cache(256), 0, given)
    off = (whole - theirs)[..., :HIDDEN].norm() / (theirs - given)[..., :HIDDEN].norm()
    assert off < 0.06
    assert torch.equal(whole[..., HIDDEN:], given[..., HIDDEN:])
    others = [span.new_cache(256) for _ in range(3)]
    for number, other in enumerate(others):
        step(span, other, 0, rows(3 + number, seed=number))
    for size in (1, 2, 7, 65):
        cache, found = span.new_cache(256), []
        for part in torch.split(given, size, 1):
            at = cache.length
            steps = [StepInput(cache, at, part)]
            if size == 1:
                steps += [StepInput(each, each.length, part) for each in others]
            found.append(span.forward(steps)[0])
        assert torch.equal(torch.cat(found, 1), whole), size
    assert "same bits in any chunk and batch" in check_kernels(span)
    hidden = span.forward([StepInput(span.new_cache(9), 0, given[:, :9])], HALVES[0])[0]
    behind = graphs(quant, HALVES[1])
    assert torch.equal(step(behind, behind.new_cache(9), 0, hidden), whole[:, :9])


def test_its_graphs_are_proven_and_plans_know_of_them() -> None:
    manifest = checkpoint("gemma4_e", LAYERS)
    require_compilable(family_of(manifest), None)
    assert not has_other_layers(manifest.config)


@pytest.mark.parametrize("family", FORMS)
def test_a_step_in_the_middle_of_a_span_is_given_what_is_meant_for_its_layers(
    family: str,
) -> None:
    span = runtime(lean=False, dtype=torch.float32, family=family)
    given = rows(9, form=FORMS[family])
    behind = span.forward([StepInput(span.new_cache(32), 0, given)], HALVES[0])[0]
    parted = span.forward([StepInput(span.new_cache(32), 0, behind)], HALVES[1])[0]
    assert relative_error(parted, whole_model(family, given, LAYERS)) < 1e-4


def test_it_is_steered_like_by_a_hook() -> None:
    model, given = load(checkpoint("gemma4_e", LAYERS).directory), rows(9)
    edits = [edit(2), edit(3, "self_attn", data=low_rank_file()), edit(6, "mlp"), edit(7)]
    seen: list[torch.Tensor] = []
    norm: Any = model.model.norm
    handle = norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    # Its projection of what is embedded is left out, so that its layers are given what ours are.
    model.model.hidden_size_per_layer_input = 0
    with torch.no_grad(), steered(model, edits):
        model(inputs_embeds=given[..., :HIDDEN], per_layer_inputs=FORM.inputs(given, ALL))
    handle.remove()
    span = runtime(lean=True, dtype=torch.float32)
    hooks = SessionEdits.check(edits, ALL, HIDDEN).hooks(span)
    cache = span.new_cache(32)
    found = [
        span.forward([StepInput(cache, first, given[:, first:last], hooks)])[0]
        for first, last in pairwise([0, 6, 7, 8, 9])
    ]
    assert relative_error(torch.cat(found, 1)[..., :HIDDEN], seen[0]) < 1e-5


def test_layers_that_see_the_same_keys_are_not_parted() -> None:
    manifest = checkpoint("gemma4_e", LAYERS)
    for layers, whose, together in (
        (LayerRange(0, 3), "layer 3 uses", "0-7"),
        (LayerRange(3, LAYERS), "layer 3 uses", "2-7"),
        (LayerRange(4, 6), "layers 4 and 6 use", "2-7"),
    ):
        with pytest.raises(UnsupportedFamily, match=f"{whose} what earlier layers") as caught:
            load_span(manifest, layers, dtype=torch.float32, device=CPU)
        assert caught.value.fix == (
            f"Have layers {together} there. It may be cut before layers 1-2."
        )


@pytest.mark.parametrize("family", FORMS)
def test_only_layers_with_keys_of_their_own_are_counted(family: str) -> None:
    manifest = checkpoint(family, LAYERS)
    span = runtime(HALVES[1], lean=False, dtype=torch.float32, family=family)
    cache = span.new_cache(256)
    step(span, cache, 0, rows(7, form=FORMS[family]))
    taken = SessionCache.allocated_bytes.__get__(cache) // 256
    assert position_bytes(manifest, HALVES[1], 4) == taken
    assert [bool(each) for each in cached_numbers(manifest, ALL)] == [True] * 4 + [False] * 4
    need = estimate(manifest, HALVES[1], 4, kv_tokens=1 << 20, rows=256, streams=0)
    assert span.weight_bytes / 2**20 <= need.weights_mb < span.weight_bytes / 2**20 + 1.1


def test_its_lean_layers_are_proven() -> None:
    require_lean(family_of(checkpoint("gemma4_e", LAYERS)), None)


async def test_a_session_without_the_layers_whose_keys_it_sees_is_refused() -> None:
    async with Attic(cuts=Cuts(frozenset({3}))) as attic:
        asker = attic.asker()
        with pytest.raises(BadRequest, match="layer 3 uses what earlier layers have"):
            await asker.open(1, start=3, stop=4)
        await asker.open(2, start=2, stop=3)  # a lens goes no further
        await asker.open(3, start=0, stop=4)


def test_of_tables_as_large_as_those_that_are_published_twins_have_a_small_one() -> None:
    config = Gemma4TextConfig(num_hidden_layers=10, num_kv_shared_layers=4)
    assert config.vocab_size_per_layer_input > 200_000
    family = family_of_config(config)
    require_lean(family, None)
    require_compilable(family, None)
