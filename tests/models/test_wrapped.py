"""The language model inside of a model for images and text is served as a text model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    DynamicCache,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

from mesh.models.families import family_of
from mesh.models.load import load_span
from mesh.models.manifest import read_manifest
from mesh.shard.compiled.proof import require_compilable
from mesh.shard.runtime import StepInput
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import LayerRange
from tests.checkpoints import GROWING
from tests.models.chain import CPU, prompt_chunks, run_parts

HIDDEN = 64
SMALL = {
    "num_hidden_layers": 4, "hidden_size": HIDDEN, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 384, "head_dim": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512,
}  # fmt: skip
EYE = {
    "depth": 1, "num_hidden_layers": 1, "hidden_size": 64, "embed_dim": 64, "num_heads": 4,
    "num_attention_heads": 4, "intermediate_size": 64, "out_hidden_size": HIDDEN,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip


LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip


def _turning(*sections: int, **more: Any) -> dict[str, Any]:
    """Positions in three dimensions, which are one for text."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    return {"rope_parameters": rope | more}


WRAPPED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (_turning(2, 3, 3), {}),
    "qwen2_5_vl": (_turning(2, 3, 3), {"tie_word_embeddings": True}),
    "qwen3_vl": (_turning(4, 2, 2), {}),
    "qwen3_vl_moe": (EXPERTS | _turning(4, 2, 2), {}),
    "glm4v": (_turning(2, 1, 1, partial_rotary_factor=0.5), {}),
    "glm4v_moe": (EXPERTS | _turning(2, 1, 1, partial_rotary_factor=0.5), {}),
    "mistral3": ({"model_type": "ministral3", "tie_word_embeddings": True}, {}),
    "mistral3/4": (
        EXPERTS | LATENT | {"model_type": "mistral4", "rope_parameters": {**GROWING}},
        {},
    ),
    "gemma4": (
        EXPERTS | {"enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0},
        {"vision_config": None, "audio_config": None},
    ),
}
"""What their text and what they as a whole have of their own."""


@pytest.mark.parametrize("model_type", WRAPPED)
def test_text_is_computed_as_by_the_whole(model_type: str, tmp_path: Path) -> None:
    model = _model(model_type)
    model.save_pretrained(tmp_path)
    chunks = prompt_chunks((13, 7, 1))
    cache = DynamicCache(config=model.config.get_text_config())
    with torch.inference_mode():
        expected = [model(input_ids=ids, past_key_values=cache).logits for ids in chunks]
    manifest = read_manifest(tmp_path)
    assert family_of(manifest).proven
    for cuts in ([0, 2, 4], [0, 1, 2, 3, 4]):
        logits, _ = run_parts(manifest, cuts, chunks, 0)
        for part, whole in zip(logits, expected, strict=True):
            torch.testing.assert_close(part, whole, atol=1e-4, rtol=1e-4)


OMNI = {
    "qwen2_5_omni": (Qwen2_5OmniThinkerForConditionalGeneration, _turning(2, 3, 3)),
    "qwen3_omni_moe": (
        Qwen3OmniMoeThinkerForConditionalGeneration,
        EXPERTS | _turning(4, 2, 2, mrope_interleaved=True) | {"moe_intermediate_size": 32},
    ),
}
EAR = {
    "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "d_model": 32,
    "output_dim": HIDDEN,
}  # fmt: skip


@pytest.mark.parametrize("model_type", OMNI)
def test_of_a_model_that_hears_and_speaks_what_thinks_is_served(
    model_type: str, tmp_path: Path
) -> None:
    kind, text = OMNI[model_type]
    own = type(AutoConfig.for_model(model_type).thinker_config)
    said = {"text_config": SMALL | text, "vision_config": EYE, "audio_config": EAR}
    thinker = _randomised(kind._from_config(own(**said), dtype=torch.float32).eval())
    thinker.save_pretrained(tmp_path)
    _as_part(tmp_path, model_type)
    chunks = prompt_chunks((13, 7, 1))
    cache = DynamicCache(config=thinker.config.text_config)
    with torch.inference_mode():
        expected = [thinker(input_ids=ids, past_key_values=cache).logits for ids in chunks]
    manifest = read_manifest(tmp_path)
    assert family_of(manifest).proven
    require_compilable(family_of(manifest), None)
    logits, _ = run_parts(manifest, [0, 1, 4], chunks, 0)
    for part, whole in zip(logits, expected, strict=True):
        torch.testing.assert_close(part, whole, atol=1e-4, rtol=1e-4)


def _as_part(directory: Path, model_type: str) -> None:
    """Make the checkpoint one of which it is a part, beside layers that speak."""
    file, settings = directory / "model.safetensors", directory / "config.json"
    weights = {f"thinker.{name}": tensor for name, tensor in load_file(file).items()}
    for layer in range(3):
        weights[f"talker.model.layers.{layer}.self_attn.q_proj.weight"] = torch.zeros(8, 8)
    weights["talker.model.embed_tokens.weight"] = torch.zeros(8, 8)
    save_file(weights, file, metadata={"format": "pt"})
    own = json.loads(settings.read_text())
    settings.write_text(json.dumps({"model_type": model_type, "thinker_config": own}))


def test_the_text_of_one_is_batched_and_compiled_like_any_other(tmp_path: Path) -> None:
    _model("qwen3_vl").save_pretrained(tmp_path)
    manifest = read_manifest(tmp_path)
    require_compilable(family_of(manifest), None)
    loaded = load_span(manifest, LayerRange(1, 4), dtype=torch.float32, device=CPU)
    runtime = TorchRuntime(loaded, device=CPU, dtype=torch.float32)
    assert runtime.batch_rows
    rows = torch.randn(1, 9, HIDDEN, generator=torch.Generator().manual_seed(0))
    (expected,) = runtime.forward([StepInput(runtime.new_cache(16), 0, rows)])
    caches, found = [runtime.new_cache(16) for _ in range(2)], []
    runtime.forward([StepInput(caches[1], 0, rows[:, :4])])
    runtime.forward([StepInput(caches[0], 0, rows[:, :7])])
    steps = [StepInput(caches[0], 7, rows[:, 7:8]), StepInput(caches[1], 3, rows[:, 3:4])]
    found = runtime.forward(steps)
    torch.testing.assert_close(torch.cat(found, 1), expected[:, [7, 3]], atol=1e-4, rtol=1e-4)


def _model(model_type: str) -> Any:
    text, whole = WRAPPED[model_type]
    plain = AutoConfig.for_model(model_type.partition("/")[0])
    kind, named = type(plain), text.get("model_type") or plain.text_config.model_type
    said = SMALL | {"model_type": named} | text
    config = kind(**({"text_config": said, "vision_config": EYE} | whole))
    torch.manual_seed(0)
    return _randomised(AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval())


def _randomised(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=0.1)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.tie_weights()
    return model
