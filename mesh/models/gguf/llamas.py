"""Architectures whose converter turns the rows of queries and keys, as Llama's does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh.models.gguf.architecture import DECODER, Architecture, decoder, head_width
from mesh.models.gguf.rotary import full_rotary
from mesh.models.gguf.settings import GgufSettings
from mesh.models.header import Difference

MIXTRAL_GATE = {"ffn_gate_inp": "block_sparse_moe.gate"}
MIXTRAL_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}


_FEEDS = ("gate", "up", "down")
_LLAMA4 = (
    {name: DECODER[name] for name in DECODER if name[:4] != "ffn_" or name == "ffn_norm"}
    | {"ffn_gate_inp": "feed_forward.router"}
    | {f"ffn_{part}": f"feed_forward.{part}_proj" for part in _FEEDS}
    | {f"ffn_{part}_shexp": f"feed_forward.shared_expert.{part}_proj" for part in _FEEDS}
    | {f"ffn_{part}_exps.weight": f"feed_forward.experts.{part}_proj" for part in _FEEDS}
)
_CHUNK, _OF_MAVERICK = 8192, 128
"""How many positions of Llama 4's layers attend to each other, and how many experts that one of
them has that does not normalise queries and keys."""


def _llama(said: GgufSettings) -> dict[str, Any]:
    said.pass_over("expert_used_count", "tensor_data_layout")
    experts = said.whole("expert_count", 0, least=0)
    config = _dense(said)
    return config | _mixtral(said, experts) if experts else config


def _mixtral(said: GgufSettings, experts: int) -> dict[str, Any]:
    if not said.has("blk.0.ffn_gate_exps.weight"):
        said.refuse("its experts are apart, as in files of before April 2024")
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": experts,
        "num_experts_per_tok": said.whole("expert_used_count"),
        "sliding_window": None,
    }


def _dense(said: GgufSettings) -> dict[str, Any]:
    config = decoder(said, "llama", "LlamaForCausalLM")
    # Files of before the key was written leave the width of a head to this one.
    width = said.whole("rope.dimension_count", head_width(said, config))
    return config | {
        "head_dim": width,
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "mlp_bias": said.has("blk.0.ffn_up.bias"),
        "rope_parameters": full_rotary(said, width),
    }


def unlike_llama(name: str, config: Mapping[str, Any]) -> Difference | None:
    """See `Architecture`."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name)
    return None if heads is None else Difference("rotary_rows", config[heads])


def _arcee(said: GgufSettings) -> dict[str, Any]:
    """AFM of 4.5 billion: a feed forward without a gate."""
    found = {"model_type": "arcee", "architectures": ["ArceeForCausalLM"], "hidden_act": "relu2"}
    return _dense(said) | found


def _smollm3(said: GgufSettings) -> dict[str, Any]:
    config = decoder(said, "smollm3", "SmolLM3ForCausalLM")
    return config | {
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "mlp_bias": said.has("blk.0.ffn_up.bias"),
        # No file says it; llama.cpp turns no head of each fourth layer.
        "no_rope_layer_interval": 4,
        "rope_parameters": full_rotary(said, head_width(said, config)),
    }


def _mistral3(said: GgufSettings) -> dict[str, Any]:
    """Ministral 3, and Mistral 3 where its files are called so."""
    config = decoder(said, "ministral3", "Ministral3ForCausalLM")
    width = head_width(said, config)
    beta = said.real("attention.temperature_scale", 0.0)
    turned = full_rotary(said, width, theta=1_000_000.0)
    if turned["rope_type"] != "yarn" or not beta:
        said.refuse("its queries are not scaled by their position, as Ministral 3's are")
    if said.real("rope.scaling.yarn_log_multiplier", 1.0) != 1.0:
        said.refuse("its rotary embedding is scaled by another logarithm than Ministral 3's")
    length = said.whole("attention.temperature_length", turned["original_max_position_embeddings"])
    if length != turned["original_max_position_embeddings"]:
        said.refuse(f"it scales queries each {length} positions")
    turned |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": beta}
    return config | {"head_dim": width, "sliding_window": None, "rope_parameters": turned}


def _exaone(said: GgufSettings) -> dict[str, Any]:
    """EXAONE 3, 3.5 and Deep, Llama's layers by other names: transformers has no class for it."""
    config = decoder(said, "llama", "LlamaForCausalLM")
    width = head_width(said, config)
    said.pass_over("attention.layer_norm_epsilon")
    return config | {
        "head_dim": width,
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "mlp_bias": said.has("blk.0.ffn_up.bias"),
        "rope_parameters": full_rotary(said, width),
    }


def _llama4(said: GgufSettings) -> dict[str, Any]:
    """Llama 4. How it attends to long texts no file says; llama.cpp has that of Meta's two."""
    config = decoder(said, "llama4_text", "Llama4ForCausalLM")
    width = head_width(said, config)
    if said.whole("attention.sliding_window", _CHUNK, least=0) != _CHUNK:
        said.refuse(f"it attends otherwise than in chunks of {_CHUNK}")
    experts = said.whole("expert_count")
    return config | {
        "head_dim": width,
        "intermediate_size_mlp": config["intermediate_size"],
        "intermediate_size": said.whole("expert_feed_forward_length"),
        "num_local_experts": experts,
        "num_experts_per_tok": said.whole("expert_used_count"),
        "interleave_moe_layer_step": said.whole("interleave_moe_layer_step"),
        "use_qk_norm": experts != _OF_MAVERICK,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": _CHUNK,
        "attn_temperature_tuning": True,
        "floor_scale": _CHUNK,
        "attn_scale": 0.1,
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "rope_parameters": full_rotary(said, width),
    }


def _unlike_llama4(name: str, _: Mapping[str, Any]) -> Difference | None:
    return Difference("transposed") if name.endswith("_exps") else None


LLAMA = Architecture(_llama, DECODER | MIXTRAL_GATE, experts=MIXTRAL_EXPERTS, unlike=unlike_llama)
EXAONE = Architecture(_exaone, DECODER)
INTERNLM2 = Architecture(_dense, DECODER, unlike=unlike_llama)
LLAMA4 = Architecture(_llama4, _LLAMA4, unlike=_unlike_llama4)
ARCEE = Architecture(
    _arcee,
    {name: DECODER[name] for name in DECODER if name != "ffn_gate"},
    unlike=unlike_llama,
)
SMOLLM3 = Architecture(_smollm3, DECODER, unlike=unlike_llama)
MISTRAL3 = Architecture(_mistral3, DECODER, unlike=unlike_llama)
