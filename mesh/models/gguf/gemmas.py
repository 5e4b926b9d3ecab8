"""Gemma. Of 1 to 3 the converter stores the weights of norms with one added."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from mesh.models.gguf.architecture import (
    DECODER,
    ENDS,
    HEAD_NORMS,
    Architecture,
    attentive,
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
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    }
)
_GIVEN_ENDS = ENDS | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}


_GEMMA3N = (
    _LAYER
    | HEAD_NORMS
    | {
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "altup_correct_coef": "altup.correction_coefs",
        "altup_correct_scale.weight": "altup.correct_output_scale",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    }
)
_STREAMS = {
    "altup_proj": "model.altup_projections.{}",
    "altup_unembd_proj": "model.altup_unembed_projections.{}",
}


def _gemma_scale(said: GgufSettings, config: Mapping[str, Any], width: int, largest: int) -> int:
    """Queries are scaled by its root. No file says it; of each generation, the model with the most
    layers differs."""
    if config["num_hidden_layers"] == largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return width


def _gemma(said: GgufSettings) -> dict[str, Any]:
    config = decoder(said, "gemma", "GemmaForCausalLM")
    width = head_width(said, config)
    return config | {"head_dim": width, "rope_parameters": plain_rotary(said, width)}


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


def _gemma3n(said: GgufSettings) -> dict[str, Any]:
    config = attentive(said, "gemma3n_text", "Gemma3nForCausalLM")
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    heads = head_width(said, config)
    width = said.whole("embedding_length_per_layer_input")
    local = said.real("rope.freq_base_swa", 10000.0)
    return config | {
        "head_dim": heads,
        "intermediate_size": said.counts("feed_forward_length"),
        "activation_sparsity_pattern": _sparsity(said, layers),
        "altup_num_inputs": said.whole("altup.num_inputs"),
        "altup_active_idx": said.whole("altup.active_idx", least=0),
        "laurel_rank": said.rows("blk.0.laurel_l.weight", hidden),
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": said.rows("per_layer_token_embd.weight", width * layers),
        "num_kv_shared_layers": said.whole("attention.shared_kv_layers", least=0),
        "layer_types": said.windows(),
        "sliding_window": said.whole("attention.sliding_window"),
        "final_logit_softcapping": said.real("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
            "full_attention": full_rotary(said, heads, theta=1_000_000.0),
        },
    }


def _sparsity(said: GgufSettings, layers: int) -> list[float]:
    """Which part of a layer's feed-forward is zero, of how many standard deviations that is."""
    deviations = said.each("activation_sparsity_scale")
    if len(deviations) != layers:
        said.refuse("its activation_sparsity_scale is no number for each layer")
    return [round(NormalDist().cdf(each), 6) for each in deviations]


def _gemma4(said: GgufSettings) -> dict[str, Any]:
    seeing = said.whole("attention.shared_kv_layers", 0, least=0)
    near, far, shared = _groups(said, seeing)
    config = attentive(said, "gemma4_text", "Gemma4ForCausalLM", near) | _sizes(said, seeing)
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
            "num_kv_shared_layers": seeing,
            "sliding_window": said.whole("attention.sliding_window"),
            "final_logit_softcapping": said.real("final_logit_softcapping", 0.0) or None,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
                "full_attention": proportional(said, wide),
            },
        }
    )


def _sizes(said: GgufSettings, seeing: int) -> dict[str, Any]:
    """How wide feed-forward is, which may be twice that in layers that see keys of others, and what
    is given to layers beside hidden states."""
    wide = said.counts("feed_forward_length")
    own, others = {*wide[: len(wide) - seeing]}, {*wide[len(wide) - seeing :]}
    if len(own) != 1 or (not others <= {2 * min(own)} and others - own):
        said.refuse("its feed-forward differs layer by layer")
    width = said.whole("embedding_length_per_layer_input", 0, least=0)
    found = {
        "intermediate_size": own.pop(),
        "use_double_wide_mlp": bool(others - {wide[0]}),
        "hidden_size_per_layer_input": width,
    }
    if width:
        words = said.rows("per_layer_token_embd.weight", width * len(wide))
        found["vocab_size_per_layer_input"] = words
    return found


def _groups(said: GgufSettings, seeing: int) -> tuple[int, int, bool]:
    """How many heads for keys layers have that look at a window, and the others, and whether the
    keys of those are their values; the last ones may see keys of others, and have none."""
    counts: dict[str, set[int]] = {"sliding_attention": set(), "full_attention": set()}
    kinds = said.windows()
    for kind, count in zip(kinds, said.counts("attention.head_count_kv"), strict=True):
        counts[kind].add(count)
    far, near = counts["full_attention"], counts["sliding_attention"] or counts["full_attention"]
    if len(near) > 1 or len(far) > 1 or kinds[-1] != "full_attention":
        said.refuse("its layers differ in other ways than by what they look at")
    if not {*kinds[len(kinds) - seeing :]} <= {*kinds[: len(kinds) - seeing]}:
        said.refuse("its last layers see keys of layers of a kind that there is not")
    last = max(i for i, kind in enumerate(kinds[: len(kinds) - seeing]) if kind == kinds[-1])
    shared = not said.has(f"blk.{last}.attn_v.weight")
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


def unlike_gemma(name: str, _: Mapping[str, Any]) -> Difference | None:
    """See `Architecture`."""
    return _LESS_ONE if name.endswith("norm") else None


GEMMA = Architecture(_gemma, DECODER, unlike=unlike_gemma)
GEMMA2 = Architecture(_gemma2, _LAYER, unlike=unlike_gemma)
GEMMA3 = Architecture(_gemma3, _LAYER | HEAD_NORMS, unlike=unlike_gemma)
GEMMA3N = Architecture(_gemma3n, _GEMMA3N, _GIVEN_ENDS, streams=_STREAMS)
GEMMA4 = Architecture(_gemma4, _GEMMA4, _GIVEN_ENDS)
