"""Architectures whose converter turns the rows of queries and keys, as Llama's does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh.models.gguf.architecture import DECODER, Architecture, decoder, head_width
from mesh.models.gguf.rotary import full_rotary
from mesh.models.gguf.settings import GgufSettings
from mesh.models.header import Difference


def _llama(said: GgufSettings) -> dict[str, Any]:
    if said.whole("expert_count", 0, least=0):
        said.refuse("it is a mixture of experts under the name llama")
    said.pass_over("expert_used_count", "tensor_data_layout")
    config = decoder(said, "llama", "LlamaForCausalLM")
    # Files of before the key was written leave the width of a head to this one.
    width = said.whole("rope.dimension_count", head_width(said, config))
    return config | {
        "head_dim": width,
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "mlp_bias": said.has("blk.0.ffn_up.bias"),
        "rope_parameters": full_rotary(said, width),
    }


def _unlike_llama(name: str, config: Mapping[str, Any]) -> Difference | None:
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name)
    return None if heads is None else Difference("rotary_rows", config[heads])


def _smollm3(said: GgufSettings) -> dict[str, Any]:
    config = decoder(said, "smollm3", "SmolLM3ForCausalLM")
    return config | {
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "mlp_bias": said.has("blk.0.ffn_up.bias"),
        # No file says it; llama.cpp turns no head of each fourth layer.
        "no_rope_layer_interval": 4,
        "rope_parameters": full_rotary(said, head_width(said, config)),
    }


def _granite(said: GgufSettings) -> dict[str, Any]:
    config = decoder(said, "granite", "GraniteForCausalLM")
    width = head_width(said, config)
    return config | {
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "mlp_bias": said.has("blk.0.ffn_up.bias"),
        "attention_multiplier": said.real("attention.scale", width**-0.5),
        "embedding_multiplier": said.real("embedding_scale", 1.0),
        "residual_multiplier": said.real("residual_scale", 1.0),
        "logits_scaling": said.real("logit_scale"),
        "rope_parameters": full_rotary(said, width),
    }


LLAMA = Architecture(_llama, DECODER, unlike=_unlike_llama)
SMOLLM3 = Architecture(_smollm3, DECODER, unlike=_unlike_llama)
GRANITE = Architecture(_granite, DECODER, unlike=_unlike_llama)
