"""Layers that attend to what an earlier layer has chosen: where such a model is cut, and that its
spans compute what the whole does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GlmMoeDsaConfig

from mesh.config import Config
from mesh.errors import BadValue, UnsupportedFamily
from mesh.models.cuts import ANYWHERE, cuts_of
from mesh.models.load import load_span
from mesh.models.local import find_local_models
from mesh.shard.footprint import cached_numbers, position_bytes
from mesh.shard.kv import SessionCache
from mesh.shard.runtime import StepInput
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import LayerRange
from tests.shard.spans import (
    CPU,
    checkpoint,
    in_stretches,
    relative_error,
    rows,
    step,
    whole_model,
)

FAMILY, LAYERS = "glm_moe_dsa_shared", 8
ALL = LayerRange(0, LAYERS)
PARTS = LayerRange(0, 1), LayerRange(1, 4), LayerRange(4, 8)
"""Layers 3, 5 and 7 have no indexer of their own."""


def runtime(layers: LayerRange = ALL) -> TorchRuntime:
    loaded = load_span(checkpoint(FAMILY, LAYERS), layers, dtype=torch.float32, device=CPU)
    return TorchRuntime(loaded, device=CPU, dtype=torch.float32)


def test_chunks_decode_and_rollback_over_three_spans_give_what_hugging_face_gives() -> None:
    given = rows(104)
    found = in_stretches([runtime(layers) for layers in PARTS], given)
    assert relative_error(found, whole_model(FAMILY, given, LAYERS)) < 1e-4


def test_some_layers_of_a_span_compute_what_they_do_in_a_span_of_their_own() -> None:
    whole, hidden = runtime(), rows(40)
    for layers in PARTS:
        (hidden,) = whole.forward([StepInput(whole.new_cache(64), 0, hidden)], layers)
    assert relative_error(hidden, whole_model(FAMILY, rows(40), LAYERS)) < 1e-4


def test_it_is_cut_before_layers_that_choose_for_themselves_only(tmp_path: Path) -> None:
    manifest = checkpoint(FAMILY, LAYERS)
    assert manifest.cuts.followers == {3, 5, 7}
    with pytest.raises(UnsupportedFamily, match="layer 3 uses what earlier layers") as caught:
        load_span(manifest, LayerRange(3, 6), dtype=torch.float32, device=CPU)
    assert caught.value.fix == "Have layers 2-5 there. It may be cut before layers 1-2, 4, 6."
    config = Config(model=[str(manifest.directory)], layers=["0-4"])
    with pytest.raises(BadValue, match="layer 5 uses what earlier layers") as refused:
        find_local_models(config, tmp_path)
    assert refused.value.fix == "Have layers 0-5 there. It may be cut before layers 1-2, 4, 6."


def test_only_layers_with_an_indexer_count_keys_to_choose_by() -> None:
    manifest, span = checkpoint(FAMILY, LAYERS), runtime()
    cache = span.new_cache(256)
    step(span, cache, 0, rows(7))
    taken = SessionCache.allocated_bytes.__get__(cache) // 256
    assert position_bytes(manifest, ALL, 4) == taken
    assert len({*cached_numbers(manifest, ALL)}) == 2


@pytest.mark.parametrize(
    "said",
    [
        {"index_topk_freq": 4},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_pattern": "FFSSFSFSSF"},
        {"indexer_types": ["full", *["full", "shared", "shared"] * 3]},
        {},
    ],
)
def test_cuts_are_those_of_transformers_where_a_config_says_them_otherwise(
    said: dict[str, object],
) -> None:
    made = GlmMoeDsaConfig(num_hidden_layers=10, **said).indexer_types
    found = cuts_of(said, 10)
    assert found.followers == {i for i, kind in enumerate(made) if kind == "shared"}
    assert bool(said) == (found != ANYWHERE)
