"""Gemma 2 to 4. Of 2 and 3 the converter stores the weights of norms with one added."""

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
from mesh.models.gguf.rotary import full_rotary, plain_rotary, proportional
from mesh.models.gguf.settings import GgufSettings
from mesh.models.header import Difference

_LESS_ONE = Difference("less_one")
_LAYER = DECODER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA4 = (
    _LAYER
    | HEAD_NORMS
    | {
        "layer_output_scale.weight": "layer_scalar",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_gate_up_exps.weight": "experts.gate_up_proj",
        "ffn_down_exps.weight": "experts.down_proj",
        "ffn_down_exps.scale": "router.per_expert_scale",
    }
)


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


def _gemma4(said: GgufSettings) -> dict[str, Any]:
    if said.whole("attention.shared_kv_layers", 0, least=0):
        said.refuse("its last layers share the keys and values of earlier ones")
    if said.whole("embedding_length_per_layer_input", 0, least=0):
        said.refuse("each of its layers reads the token ids, and a hop has only hidden states")
    near, far, shared = _groups(said)
    config = decoder(said, "gemma4_text", "Gemma4ForCausalLM", near)
    wide, narrow = head_width(said, config), said.whole("attention.key_length_swa")
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if said.whole(name, narrow) != narrow:
            said.refuse(f"it says {name} of heads that are {narrow} wide")
    local = said.real("rope.freq_base_swa", 10000.0)
    return (
        config
        | _experts(said)
        | {
            "layer_types": said.windows(),
            "attention_k_eq_v": shared,
            "num_global_key_value_heads": far,
            "head_dim": narrow,
            "global_head_dim": wide,
            "hidden_size_per_layer_input": 0,
            "sliding_window": said.whole("attention.sliding_window"),
            "final_logit_softcapping": said.real("final_logit_softcapping", 0.0) or None,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
                "full_attention": proportional(said, wide),
            },
        }
    )


def _groups(said: GgufSettings) -> tuple[int, int, bool]:
    """How many heads for keys layers have that look at a window, and the others, and whether the
    keys of those are their values."""
    counts: dict[str, set[int]] = {"sliding_attention": set(), "full_attention": set()}
    kinds = said.windows()
    for kind, count in zip(kinds, said.counts("attention.head_count_kv"), strict=True):
        counts[kind].add(count)
    far, near = counts["full_attention"], counts["sliding_attention"] or counts["full_attention"]
    if len(near) > 1 or len(far) > 1 or kinds[-1] != "full_attention":
        said.refuse("its layers differ in other ways than by what they look at")
    shared = not said.has(f"blk.{len(kinds) - 1}.attn_v.weight")
    if near != far and not shared:
        said.refuse("its layers have values of their own in other numbers of heads")
    return next(iter(near)), next(iter(far)), shared


def _experts(said: GgufSettings) -> dict[str, Any]:
    count = said.whole("expert_count", 0, least=0)
    if not count:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": said.whole("expert_used_count"),
        "moe_intermediate_size": said.whole("expert_feed_forward_length"),
    }


def _unlike_gemma(name: str, _: Mapping[str, Any]) -> Difference | None:
    return _LESS_ONE if name.endswith("norm") else None


GEMMA2 = Architecture(_gemma2, _LAYER, unlike=_unlike_gemma)
GEMMA3 = Architecture(_gemma3, _LAYER | HEAD_NORMS, unlike=_unlike_gemma)
GEMMA4 = Architecture(_gemma4, _GEMMA4)
