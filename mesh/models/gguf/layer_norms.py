"""Architectures that take the mean away as they normalise: Phi 1 and 2, StableLM, StarCoder 2,
Nemotron 4 and Minitron, GPT-NeoX and Pythia, and the first OLMo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh.models.gguf.architecture import DECODER, ENDS, Architecture, head_width, unnormed
from mesh.models.gguf.gemmas import unlike_gemma
from mesh.models.gguf.llamas import unlike_llama
from mesh.models.gguf.rotary import full_rotary, partial_rotary
from mesh.models.gguf.settings import GgufSettings
from mesh.models.header import Difference

_FEEDS_PLAINLY = {name: DECODER[name] for name in DECODER if name != "ffn_gate"}
_PHI2 = {name: DECODER[name] for name in ("attn_norm", "attn_q", "attn_k", "attn_v")} | {
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_GPT_NEOX = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_EPSILON = "attention.layer_norm_epsilon"
_OLMO_EPSILON = 1e-5
"""It is not in a config of OLMo's: its class has no other."""


def _centred(said: GgufSettings, model_type: str, class_name: str) -> dict[str, Any]:
    return unnormed(said, model_type, class_name) | {
        "intermediate_size": said.whole("feed_forward_length"),
        "layer_norm_eps": said.real(_EPSILON),
    }


def _as_wide(said: GgufSettings, config: Mapping[str, Any]) -> int:
    """How wide a head is. Refuses where they are together of another width than the model."""
    width = head_width(said, config)
    if width * config["num_attention_heads"] != config["hidden_size"]:
        said.refuse("its heads together are not as wide as the model")
    return width


def _phi2(said: GgufSettings) -> dict[str, Any]:
    config = _centred(said, "phi", "PhiForCausalLM")
    return config | {
        "hidden_act": "gelu_new",
        "qk_layernorm": False,
        "rope_parameters": partial_rotary(said, _as_wide(said, config)),
    }


def _stablelm(said: GgufSettings) -> dict[str, Any]:
    config = _centred(said, "stablelm", "StableLmForCausalLM")
    # The converter says it where a config does not; llama.cpp goes by the norm, too.
    said.pass_over("use_parallel_residual")
    return config | {
        "use_parallel_residual": not said.has("blk.0.ffn_norm.weight"),
        "use_qkv_bias": said.has("blk.0.attn_q.bias"),
        "qk_layernorm": said.has("blk.0.attn_q_norm.weight"),
        "rope_parameters": partial_rotary(said, _as_wide(said, config)),
    }


def _starcoder2(said: GgufSettings) -> dict[str, Any]:
    config = _centred(said, "starcoder2", "Starcoder2ForCausalLM")
    return config | {
        "norm_epsilon": config.pop("layer_norm_eps"),
        "use_bias": said.has("blk.0.attn_q.bias"),
        "sliding_window": None,
        "rope_parameters": full_rotary(said, _as_wide(said, config)),
    }


def _nemotron(said: GgufSettings) -> dict[str, Any]:
    config = _centred(said, "nemotron", "NemotronForCausalLM")
    said.pass_over("attention.layer_norm_rms_epsilon")  # the same number again
    width = head_width(said, config)
    return config | {
        "norm_eps": config.pop("layer_norm_eps"),
        "head_dim": width,
        "hidden_act": "relu2",
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "mlp_bias": said.has("blk.0.ffn_up.bias"),
        "rope_parameters": partial_rotary(said, width),
    }


def _gpt_neox(said: GgufSettings) -> dict[str, Any]:
    config = _centred(said, "gpt_neox", "GPTNeoXForCausalLM")
    if config.pop("num_key_value_heads") != config["num_attention_heads"]:
        said.refuse("its heads share keys")
    return config | {
        "hidden_act": "gelu",  # no file says it; all but the largest of them do so
        "use_parallel_residual": said.flag("use_parallel_residual", default=True),
        "attention_bias": said.has("blk.0.attn_qkv.bias"),
        "rope_parameters": partial_rotary(said, _as_wide(said, config)),
    }


def _unlike_gpt_neox(name: str, config: Mapping[str, Any]) -> Difference | None:
    """Queries of all heads, then keys, then values; a model has the three of each head together."""
    heads = config["num_attention_heads"]
    return Difference("value_rows", heads, 3) if name == "attn_qkv" else None


def _olmo(said: GgufSettings) -> dict[str, Any]:
    config = _centred(said, "olmo", "OlmoForCausalLM")
    if config.pop("layer_norm_eps") != _OLMO_EPSILON:
        said.refuse(f"it normalises with another number than {_OLMO_EPSILON}")
    return config | {
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "clip_qkv": said.real("attention.clamp_kqv", 0.0) or None,
        "rope_parameters": full_rotary(said, _as_wide(said, config)),
    }


PHI2 = Architecture(_phi2, _PHI2, ENDS | {"output_norm": "model.final_layernorm"})
STABLELM = Architecture(
    _stablelm,
    DECODER,
    stacks={
        "attn_q_norm": ("self_attn.q_layernorm.norms.{}", "num_attention_heads"),
        "attn_k_norm": ("self_attn.k_layernorm.norms.{}", "num_key_value_heads"),
    },
)
STARCODER2 = Architecture(
    _starcoder2, _FEEDS_PLAINLY | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
)
NEMOTRON = Architecture(_nemotron, _FEEDS_PLAINLY, unlike=unlike_gemma)
GPT_NEOX = Architecture(
    _gpt_neox,
    _GPT_NEOX,
    {
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "lm_head",
    },
    "gpt_neox.layers.",
    unlike=_unlike_gpt_neox,
)
OLMO = Architecture(_olmo, DECODER, unlike=unlike_llama)
