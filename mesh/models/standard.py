"""Which models have standard layers, as far as their config alone tells: those that are computed
without transformers' modules in 16 bit as well.

For whoever plans without loading anything. Of the families that the tests look at it is known, and
of some layers that they are not; all others are looked at when they are loaded
(`mesh.shard.lean_proof`, `mesh.shard.compiled.proof`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

UNEQUAL = frozenset({"gemma4_text", "gemma4_unified_text"})
"""Models whose layers differ in width."""
STANDARD = UNEQUAL | {
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt2",
    "smollm3", "granite", "qwen3_5_text", "lfm2", "granitemoehybrid", "glm4", "ernie4_5",
    "nemotron_h", "arcee", "cwm", "exaone4", "gemma", "glm", "granite_swa", "jais2",
    "ministral3", "olmo3", "seed_oss", "stablelm", "starcoder2", "vaultgemma", "qwen2_vl",
    "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text", "qwen3_vl_text",
    "glm4v_text", "cohere", "cohere2", "gpt_neox", "persimmon", "phi", "apertus",
    "hunyuan_v1_dense", "hyperclovax", "nanochat", "nemotron", "olmo", "helium",
}  # fmt: skip
STANDARD_MIXTURES = frozenset(
    {
        "qwen2_moe", "qwen3_moe", "gpt_oss", "mixtral", "olmoe", "flex_olmo", "glm4_moe", "dots1",
        "granitemoe", "granitemoehybrid", "exaone_moe", "ernie4_5_moe", "qwen3_5_moe_text",
        "qwen3_next", "lfm2_moe", "nemotron_h", "aria_text", "granitemoe_swa", "granitemoeshared",
        "mellum", "qwen3_vl_moe_text", "solar_open", "glm4v_moe_text", "cohere2_moe",
        "hunyuan_v1_moe", "afmoe", "laguna", "qwen3_omni_moe_text",
    }
)  # fmt: skip
"""The same of models that are mixtures of experts, or may be."""
MIXTURES_BY_TORCH = UNEQUAL | {"phimoe", "minimax_m2", "hy_v3", "nemotron_h"}
"""Mixtures of experts of which that holds, and that are computed in 4 bit by torch, and not in
8."""
RECURRENT = frozenset(
    {
        "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "lfm2", "lfm2_moe", "granitemoehybrid",
        "kimi_linear", "nemotron_h",
    }
)  # fmt: skip
"""Models with running states that are computed in few bits."""
LATENT = frozenset(
    {
        "minicpm3", "glm4_moe_lite", "deepseek_v2", "deepseek_v3", "youtu", "kimi_linear",
        "mistral4",
    }
)  # fmt: skip
"""Models whose keys are made of latents that are computed in few bits."""
MIXTURES_BY_MODULES = frozenset(
    {
        "axk1", "axk2", "bailing_hybrid", "deepseek_v32", "glm_moe_dsa", "hy_v4", "llama4_text",
        "mimo_v2_flash",
    }
)  # fmt: skip
"""Other mixtures of experts whose modules torch computes in 4 bit, as it does those of all models
that are none."""
MIXTURES = (STANDARD_MIXTURES | RECURRENT | LATENT) - MIXTURES_BY_TORCH
"""Mixtures of experts that are computed in few bits."""
UNREAD = frozenset(
    {
        "biogpt", "bitnet", "bloom", "codegen", "diffllama", "gpt_neo", "gpt_neox_japanese", "gptj",
        "mpt", "opt", "xglm",
    }
)  # fmt: skip
"""Models without experts for whose layers no graph is built."""
ACTIVATIONS = frozenset(
    {
        "silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2",
        "xielu",
    }
)  # fmt: skip
ACTIVATION_FIELDS = (
    "hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "activation",
)  # fmt: skip
"""Where configs say which."""
_ROPES = frozenset(
    {"default", "linear", "llama3", "longrope", "mrope", "proportional", "su", "yarn"}
)
"""Rotary embeddings that are not other ones for each length of a session."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MET = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_KINDS, _MIXED = ("layers_block_type", "hybrid_override_pattern"), ("moe", "E")
"""What a layer of Nemotron-H is, by names or by letters, and how those with experts are called:
the others may say how many experts they would have."""
_NORMED_APART = {"cohere": "use_qk_norm", "stablelm": "qk_layernorm"}
"""Where configs say that each head is normalised by weights of its own (Command R+, StableLM 2 of
12 billion)."""
_STREAMS = ("altup_num_inputs", "hc_mult", "hc_count")
_STATES = (
    "linear_num_value_heads", "linear_num_heads", "linear_attn_config", "mamba_d_state",
    "ssm_state_size", "state_size", "conv_L_cache",
)  # fmt: skip
"""What only configs have of whose layers some keep a running state."""


def has_standard_layers(config: Mapping[str, Any], model_type: str) -> bool:
    """Whether the language model of this config, of that type, is known to have."""
    text = _text(config)
    named = (text.get(name) for name in ACTIVATION_FIELDS)
    activation = next((name for name in named if name), "silu")
    mixtures = STANDARD_MIXTURES | MIXTURES_BY_TORCH
    return (
        model_type in (STANDARD if experts_met(text) == 1 else mixtures)
        and str(activation) in ACTIVATIONS
        and _ROPES.issuperset(_ropes(text))
        and not _are_queries_singular(text)
    )


def streams_of(config: Mapping[str, Any]) -> int:
    """How many hidden states there are for one position between its layers."""
    text = _text(config)
    return int(next((text[name] for name in _STREAMS if text.get(name)), 1))


def has_other_layers(config: Mapping[str, Any]) -> bool:
    """Whether its layers are not computed in few bits by the compiled runtime, as is certain."""
    text = _text(config)
    known = text.get("model_type")
    are_unequal = text.get("global_head_dim") or text.get("per_layer_config")
    keeps_states = any(text.get(name) for name in _STATES)
    return (
        bool(text.get("qk_nope_head_dim") and known not in LATENT)
        or bool(are_unequal and known not in UNEQUAL)
        or (experts_met(config) < 1 and known not in MIXTURES)
        or (keeps_states and known not in RECURRENT)
        or streams_of(text) > 1
        or known in UNREAD
        or bool(text.get("new_decoder_architecture"))  # of Falcon 11B, 40B and 180B
        or _are_queries_singular(text)
    )


def goes_by_torch(config: Mapping[str, Any], model_type: str) -> bool:
    """Whether torch computes its layers in 4 bit instead."""
    if experts_met(config) < 1:
        return model_type in MIXTURES_BY_TORCH | MIXTURES_BY_MODULES
    return has_other_layers(config)


def other_formats(quants: Iterable[str]) -> str:
    """What to serve a model in that can be had in these formats, and not in the one asked for."""
    said = "".join(f"in {quant} (--quant {quant}), or " for quant in quants if quant != "none")
    return f"Serve it {said}unquantised (--quant none)."


def experts_met(config: Mapping[str, Any]) -> float:
    """Which share of its experts a row goes through; 1 where it has none."""
    text = _text(config)
    kinds = next((said for name in _KINDS if (said := text.get(name))), None)
    if isinstance(kinds, str | list) and not any(kind in kinds for kind in _MIXED):
        return 1.0
    count = next((n for name in _EXPERTS if (n := _most(text.get(name))) > 1), 1)
    met = next((n for name in _MET if (n := _most(text.get(name))) > 0), 1)
    return min(1.0, met / count)


def _are_queries_singular(text: Mapping[str, Any]) -> bool:
    """Whether queries and keys are limited, or normalised, as those of no other layers."""
    normed = _NORMED_APART.get(str(text.get("model_type")), "")
    return bool(text.get("clip_qkv") or text.get(normed))


def _most(said: Any) -> int:
    """A count, which may be said of each layer."""
    each = said if isinstance(said, list) else [said]
    return max((n for n in each if isinstance(n, int)), default=0)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _ropes(text: Mapping[str, Any]) -> Iterator[str]:
    """The kinds of rotary embedding that it names."""
    for name in ("rope_parameters", "rope_scaling"):
        said = text.get(name)
        each = [said, *said.values()] if isinstance(said, Mapping) else []
        for one in each:
            if isinstance(one, Mapping) and (kind := one.get("rope_type", one.get("type"))):
                yield str(kind)
