"""Qwen 3.5 and 3 Next, of whose layers most keep a running state and the others attend.

Where several heads for values share one for keys, the converter of Qwen 3.5 stores the first of
each key, then the second of each: https://github.com/ggml-org/llama.cpp/pull/19468
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh.models.gguf.architecture import (
    BY_PLACE,
    HEAD_NORMS,
    Architecture,
    attentive,
    decoder,
    head_width,
)
from mesh.models.gguf.qwens import EACH_LAYER, EXPERTS, SHARED_EXPERT, shared_experts
from mesh.models.gguf.rotary import partial_rotary
from mesh.models.gguf.settings import GgufSettings
from mesh.models.header import Difference, Kind

_LAYER = (
    BY_PLACE
    | HEAD_NORMS
    | {
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_a.": "linear_attn.A_log",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    }
)
_NEXT = _LAYER | {
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
}
_MIXTURE = SHARED_EXPERT | {"ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj"}
_DIMENSIONS = {"ssm_conv1d": 3, "ffn_gate_inp_shexp": 2}
_LESS_ONE = Difference("less_one")


def _states(said: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    """What those layers are, which they are, and how the others turn their heads."""
    width = head_width(said, config)
    keys, values = said.whole("ssm.group_count"), said.whole("ssm.time_step_rank")
    inner = said.whole("ssm.inner_size")
    if values % keys or inner % values:
        said.refuse(f"its {values} heads for values, {inner} wide, share {keys} for keys")
    # It says how positions in a picture are turned; those of text are the same in each section.
    said.pass_over("rope.dimension_sections")
    return {
        "head_dim": width,
        "rope_parameters": partial_rotary(said, width),
        "layer_types": _kinds(said),
        "linear_conv_kernel_dim": said.whole("ssm.conv_kernel"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": said.whole("ssm.state_size"),
        "linear_value_head_dim": inner // values,
    }


def _kinds(said: GgufSettings) -> list[str]:
    period = said.whole("full_attention_interval", 4)
    if said.says("attention.recurrent_layers"):
        return said.kinds("attention.recurrent_layers", "linear_attention", "full_attention")
    return [
        "linear_attention" if (layer + 1) % period else "full_attention"
        for layer in range(said.layers())
    ]


def _qwen35(said: GgufSettings) -> dict[str, Any]:
    config = decoder(said, "qwen3_5_text", "Qwen3_5ForCausalLM")
    return config | _states(said, config)


def _qwen35_moe(said: GgufSettings) -> dict[str, Any]:
    said.pass_over("feed_forward_length")
    config = attentive(said, "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM")
    return config | _states(said, config) | shared_experts(said)


def _qwen3_next(said: GgufSettings) -> dict[str, Any]:
    config = decoder(said, "qwen3_next", "Qwen3NextForCausalLM")
    alike = EACH_LAYER | {"norm_topk_prob": True}  # no file says it; llama.cpp computes so
    return config | _states(said, config) | shared_experts(said) | alike


_OF_VALUES: Mapping[str, Kind] = {
    "attn_gate": "value_rows",
    "ssm_alpha": "value_rows",
    "ssm_beta": "value_rows",
    "ssm_dt": "value_rows",
    "ssm_out": "value_columns",
}
_BEHIND_KEYS = ("attn_qkv", "ssm_conv1d")


def _unlike_next(name: str, config: Mapping[str, Any]) -> Difference | None:
    if name == "ssm_a":
        return Difference("decay", config["linear_num_key_heads"])
    return _LESS_ONE if name.endswith("norm") and name != "ssm_norm" else None


def _unlike_qwen35(name: str, config: Mapping[str, Any]) -> Difference | None:
    keys = config["linear_num_key_heads"]
    shared = config["linear_num_value_heads"] // keys
    if name == "ssm_a":
        return Difference("decay", keys, shared)
    if shared > 1 and name in _BEHIND_KEYS:
        return Difference("value_rows", keys, shared, 2 * keys * config["linear_key_head_dim"])
    if shared > 1 and name in _OF_VALUES:
        return Difference(_OF_VALUES[name], keys, shared)
    return _unlike_next(name, config)


QWEN35 = Architecture(_qwen35, _LAYER, dimensions=_DIMENSIONS, unlike=_unlike_qwen35)
QWEN35_MOE = Architecture(
    _qwen35_moe,
    _LAYER | _MIXTURE,
    experts=EXPERTS,
    dimensions=_DIMENSIONS,
    unlike=_unlike_qwen35,
)
QWEN3_NEXT = Architecture(
    _qwen3_next,
    _NEXT | _MIXTURE,
    experts=EXPERTS,
    dimensions=_DIMENSIONS,
    unlike=_unlike_next,
)
