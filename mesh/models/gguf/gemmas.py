"""Gemma 2 and 3, of which the converter stores the weights of norms with one added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh.models.gguf.architecture import (
    DECODER,
    HEAD_NORMS,
    Architecture,
    decoder,
    head_width,
    kinds,
)
from mesh.models.gguf.rotary import full_rotary, plain_rotary
from mesh.models.gguf.settings import GgufSettings
from mesh.models.header import Difference

_LESS_ONE = Difference("less_one")
_LAYER = DECODER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _gemma_scale(said: GgufSettings, config: Mapping[str, Any], width: int, largest: int) -> int:
    """Queries are scaled by its root. No file says it; of each generation, the model with the most
    layers differs."""
    if config["num_hidden_layers"] == largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return width


def _gemma2(said: GgufSettings) -> dict[str, Any]:
    config = decoder(said, "gemma2", "Gemma2ForCausalLM")
    width = head_width(said, config)
    return config | {
        "head_dim": width,
        "query_pre_attn_scalar": _gemma_scale(said, config, width, 46),
        "sliding_window": said.whole("attention.sliding_window", 4096),
        "layer_types": kinds(config["num_hidden_layers"], 2),
        "attn_logit_softcapping": said.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": said.real("final_logit_softcapping", 30.0),
        "tie_word_embeddings": True,
        "rope_parameters": plain_rotary(said, width),
    }


def _gemma3(said: GgufSettings) -> dict[str, Any]:
    config = decoder(said, "gemma3_text", "Gemma3ForCausalLM")
    width = head_width(said, config)
    window = said.whole("attention.sliding_window", 0, least=0)
    period = said.whole("attention.sliding_window_pattern", 6) if window else 1
    local = said.real("rope.freq_base_swa", 10000.0)
    return config | {
        "head_dim": width,
        "query_pre_attn_scalar": _gemma_scale(said, config, width, 62),
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": kinds(config["num_hidden_layers"], period),
        "final_logit_softcapping": said.real("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
            "full_attention": full_rotary(said, width, theta=1_000_000.0),
        },
    }


def _unlike_gemma(name: str, _: Mapping[str, Any]) -> Difference | None:
    return _LESS_ONE if name.endswith("norm") else None


GEMMA2 = Architecture(_gemma2, _LAYER, unlike=_unlike_gemma)
GEMMA3 = Architecture(_gemma3, _LAYER | HEAD_NORMS, unlike=_unlike_gemma)
