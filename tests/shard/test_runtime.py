from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoModel

from mesh.errors import BadRequest, ContextTooLong
from mesh.shard.runtime import StepInput
from mesh.shard.scheduler import run
from mesh.types import LayerRange
from tests.checkpoints import FAMILIES, MORE_FAMILIES, STATEFUL, WINDOW
from tests.shard.spans import (
    HIDDEN,
    WHOLE,
    in_stretches,
    of_module,
    relative_error,
    rows,
    runtime,
    step,
    whole_model,
)

UNBATCHED = (
    "minicpm3", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "diffllama", "llama4_text",
    "axk2", "deepseek_v32", "glm_moe_dsa", "mistral4", "bloom",
    *STATEFUL,
)  # fmt: skip
"""Families whose code touches the keys between cache and attention, that attend in chunks or to
what they choose, or whose layers keep states."""


@pytest.mark.parametrize("family", FAMILIES + MORE_FAMILIES)
def test_two_spans_with_chunks_decode_and_rollback_give_what_hugging_face_gives(
    family: str,
) -> None:
    spans = [runtime(family, LayerRange(0, 1)), runtime(family, LayerRange(1, 4))]
    hidden = rows(WINDOW + 40)
    assert relative_error(in_stretches(spans, hidden), whole_model(family, hidden)) < 1e-4


@pytest.mark.parametrize("family", FAMILIES + MORE_FAMILIES)
def test_a_row_in_a_ragged_batch_equals_the_row_alone(family: str) -> None:
    span = runtime(family)
    assert span.batch_rows == int(family not in UNBATCHED)
    lengths = (3, WINDOW + 20, 17, WINDOW - 1)
    alone, inputs = [], []
    for i, length in enumerate(lengths):
        first, last = rows(length, seed=i), rows(1, seed=100 + i)
        cache = span.new_cache(256)
        step(span, cache, 0, first)
        alone.append(step(span, cache, length, last))
        inputs.append(StepInput(cache, length, last))
    together = run(span, inputs, WHOLE)
    for one, batched in zip(alone, together, strict=True):
        assert relative_error(batched, one) < 1e-5


def test_a_batch_mixes_chunks_and_single_rows() -> None:
    span = runtime()
    expected = [step(span, span.new_cache(64), 0, rows(n, seed=n)) for n in (1, 5, 1)]
    mixed = [StepInput(span.new_cache(64), 0, rows(n, seed=n)) for n in (1, 5, 1)]
    found = run(span, mixed, WHOLE)
    for one, batched in zip(expected, found, strict=True):
        assert relative_error(batched, one) < 1e-5


def test_batch_invariant_rows_are_bitwise_equal_alone_and_in_company() -> None:
    span = runtime(batch_invariant=True)
    alone = step(span, span.new_cache(64), 0, rows(1))
    company = [StepInput(span.new_cache(64), 0, rows(1, seed=i)) for i in range(5)]
    assert torch.equal(run(span, company, WHOLE)[0], alone)
    with pytest.raises(ValueError, match="up to 0 rows"):
        span.forward(company)


def test_some_layers_of_a_span_equal_a_span_of_those_layers() -> None:
    for family in ("llama", "gemma3", "gpt2"):
        part = LayerRange(1, 3)
        small, large = runtime(family, part), runtime(family)
        cache = large.new_cache(128)
        first = large.forward([StepInput(cache, 0, rows(80))], part)[0]
        second = large.forward([StepInput(cache, 80, rows(1))], part)[0]
        other = small.new_cache(128)
        assert relative_error(first, step(small, other, 0, rows(80))) < 1e-5
        assert relative_error(second, step(small, other, 80, rows(1))) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_bf16_weights_stay_close_to_fp32(family: str) -> None:
    exact, packed = runtime(family), runtime(family, dtype=torch.bfloat16)
    caches = exact.new_cache(64), packed.new_cache(64)
    for position, count in ((0, 20), (20, 8), (28, 1)):
        hidden = rows(count, seed=position)
        expected = step(exact, caches[0], position, hidden)
        found = step(packed, caches[1], position, hidden)
        assert found.dtype == torch.bfloat16
        assert float((found.float() - expected).norm() / expected.norm()) < 0.05


def test_a_step_beyond_the_cache_or_its_limit_is_refused_and_changes_nothing() -> None:
    span = runtime()
    cache = span.new_cache(8)
    step(span, cache, 0, rows(5))
    with pytest.raises(BadRequest):
        step(span, cache, 6, rows(1))
    with pytest.raises(ContextTooLong):
        step(span, cache, 5, rows(4))
    assert cache.length == 5


def _config(kind: str) -> transformers.PretrainedConfig:
    shape = {
        "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 2, "bos_token_id": 1,
        "pad_token_id": 0,
    }  # fmt: skip
    if kind == "chunked":
        return transformers.Llama4TextConfig(
            **shape, intermediate_size_mlp=96, head_dim=16, attention_chunk_size=8,
            num_local_experts=2, no_rope_layers=[1, 1, 1, 0],
        )  # fmt: skip
    if kind == "alibi":
        return transformers.BloomConfig(hidden_size=HIDDEN, n_layer=2, n_head=4, vocab_size=64)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return transformers.LlamaConfig(**shape, max_position_embeddings=16, rope_parameters=rope)


@pytest.mark.parametrize("kind", ["chunked", "alibi", "dynamic rope"])
@torch.inference_mode()
def test_what_our_attention_cannot_express_runs_stock_and_is_still_right(kind: str) -> None:
    torch.manual_seed(1)
    module = AutoModel.from_config(_config(kind), attn_implementation="eager").eval()
    norm = next(n for n, _ in reversed(list(module.named_children())) if "norm" in n or n == "ln_f")
    setattr(module, norm, torch.nn.Identity())
    hidden = rows(40)
    if kind == "dynamic rope":
        # Its frequencies depend on how far the sequence had come at each step.
        cache = transformers.DynamicCache(config=module.config)
        pieces = [
            module(
                inputs_embeds=hidden[:, a:b], position_ids=torch.arange(a, b)[None],
                past_key_values=cache, use_cache=True,
            ).last_hidden_state
            for a, b in ((0, 12), (12, 30), (30, 31))
        ]  # fmt: skip
        expected = torch.cat(pieces, 1)
    else:
        expected = module(
            inputs_embeds=hidden, position_ids=torch.arange(40)[None], use_cache=False
        ).last_hidden_state[:, :31]
    span = of_module(module)
    assert not span.batch_rows
    cache, other = span.new_cache(64), span.new_cache(64)
    found = []
    for start, stop in ((0, 12), (12, 30), (30, 31)):
        # A longer session of somebody else in between must not show.
        pair = [StepInput(other, 0, rows(60)), StepInput(cache, start, hidden[:, start:stop])]
        found.append(run(span, pair, span.layers)[1])
    assert relative_error(torch.cat(found, 1), expected) < 1e-4
