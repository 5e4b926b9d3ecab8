"""Granite 3 and 4: dense, mixtures of experts, and those of whose layers most keep a running state.

What makes gates and what is gated is one matrix in the models and two in the files:
https://github.com/ggml-org/llama.cpp/blob/master/conversion/granite.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh.models.gguf.architecture import (
    DECODER,
    Architecture,
    attentive,
    decoder,
    head_width,
    some_attend,
)
from mesh.models.gguf.llamas import unlike_llama
from mesh.models.gguf.rotary import full_rotary, longrope
from mesh.models.gguf.settings import GgufSettings
from mesh.models.header import Difference
from mesh.models.pairs import half

_ATTENDS = {
    name: DECODER[name] for name in DECODER if name not in ("ffn_gate", "ffn_up", "ffn_down")
}
_MIXTURE = {
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_gate_exps.weight": half("block_sparse_moe.experts.gate_up_proj", "first"),
    "ffn_up_exps.weight": half("block_sparse_moe.experts.gate_up_proj", "last"),
    "ffn_down_exps.weight": "block_sparse_moe.experts.down_proj",
}
_SHARED = {
    "gate": half("shared_mlp.input_linear", "first"),
    "up": half("shared_mlp.input_linear", "last"),
    "down": "shared_mlp.output_linear",
}
"""It stands beside the experts, and alone where there are none."""
_BESIDE = {f"ffn_{part}_shexp": name for part, name in _SHARED.items()}
_SHARED_WIDTH = "expert_shared_feed_forward_length"
_OF_STATES = ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
STATES = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a.": "mamba.A_log",
    "ssm_d.": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
"""What keeps a running state, as Mamba 2 does."""
_HYBRID = (
    _ATTENDS | _MIXTURE | STATES | {f"ffn_{part}": name for part, name in _SHARED.items()} | _BESIDE
)


def heads_of_states(said: GgufSettings) -> tuple[int, int]:
    """How many there are, and how wide each is. Refuses where they have no whole width."""
    inner, heads = said.whole("ssm.inner_size"), said.whole("ssm.time_step_rank")
    if inner % heads:
        said.refuse(f"its {heads} heads of states are {inner} wide")
    return heads, inner // heads


def _granite(said: GgufSettings) -> dict[str, Any]:
    """Granite 3, and those of Granite 4 that keep no state: what would be shared is all they feed
    forward by."""
    config = decoder(said, "granite", "GraniteForCausalLM")
    if said.whole("expert_count", 0, least=0):
        said.refuse("it is a mixture by another name")
    _without_states(said)
    return config | _scaled(said, config) | {
        "intermediate_size": said.whole(_SHARED_WIDTH, config["intermediate_size"]),
        "mlp_bias": said.has("blk.0.ffn_up.bias"),
    }  # fmt: skip


def _without_states(said: GgufSettings) -> None:
    """Pass over what Granite 4's files say of the states of other layers."""
    said.pass_over("expert_used_count", *(f"ssm.{name}" for name in _OF_STATES))
    if not said.flag("rope.scaling.finetuned", default=True):
        said.refuse("none of its heads turn")


def _minicpm(said: GgufSettings) -> dict[str, Any]:
    """MiniCPM, but for 3 and 5, which multiplies where Granite does: transformers has no class for
    it. What its first files leave out is that of MiniCPM 2B."""
    config = decoder(said, "granite", "GraniteForCausalLM")
    width, length = head_width(said, config), config["max_position_embeddings"]
    is_long = said.text("rope.scaling.type") == "longrope"
    return config | {
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "mlp_bias": False,
        "attention_multiplier": width**-0.5,
        "embedding_multiplier": said.real("embedding_scale", 12.0),
        "residual_multiplier": said.real(
            "residual_scale", 1.4 / config["num_hidden_layers"] ** 0.5
        ),
        "logits_scaling": said.real("logit_scale", config["hidden_size"] / 256),
        "rope_parameters": longrope(said, width, length) if is_long else full_rotary(said, width),
    }


def _granite_moe(said: GgufSettings) -> dict[str, Any]:
    config = decoder(said, "granitemoe", "GraniteMoeForCausalLM")
    _without_states(said)
    config |= _scaled(said, config) | _experts(said)
    if not said.has("blk.0.ffn_gate_shexp.weight"):
        return config
    return config | {
        "model_type": "granitemoeshared",
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "shared_intermediate_size": said.whole(_SHARED_WIDTH),
    }


def _granite_hybrid(said: GgufSettings) -> dict[str, Any]:
    attends, groups = some_attend(said)
    config = attentive(said, "granitemoehybrid", "GraniteMoeHybridForCausalLM", groups)
    hidden, inner = config["hidden_size"], said.whole("ssm.inner_size")
    heads = said.whole("ssm.time_step_rank")
    if inner % hidden or inner % heads:
        said.refuse(f"its {heads} heads of states are {inner} wide, in layers of {hidden}")
    is_turned = said.flag("rope.scaling.finetuned", default=False)
    attending = attends.index(True)
    keeping = attends.index(False) if False in attends else 0  # a state
    experts = said.whole("expert_count", 0, least=0)
    said.pass_over("expert_used_count")
    return config | _scaled(said, config, attending) | {
        "layer_types": ["attention" if each else "mamba" for each in attends],
        "position_embedding_type": "rope" if is_turned else "nope",
        "intermediate_size": said.whole("feed_forward_length"),
        "shared_intermediate_size": said.whole(_SHARED_WIDTH),
        "mamba_expand": inner // hidden,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": said.whole("ssm.state_size"),
        "mamba_n_groups": said.whole("ssm.group_count"),
        "mamba_d_conv": said.whole("ssm.conv_kernel"),
        "mamba_conv_bias": said.has(f"blk.{keeping}.ssm_conv1d.bias"),
        "mamba_proj_bias": said.has(f"blk.{keeping}.ssm_in.bias"),
        "num_local_experts": 0,
    } | (_experts(said) if experts else {})  # fmt: skip


def _scaled(said: GgufSettings, config: Mapping[str, Any], attends: int = 0) -> dict[str, Any]:
    """What Granite multiplies with, and how its heads turn. The layer `attends`."""
    width = head_width(said, config)
    return {
        "attention_bias": said.has(f"blk.{attends}.attn_q.bias"),
        "attention_multiplier": said.real("attention.scale", width**-0.5),
        "embedding_multiplier": said.real("embedding_scale", 1.0),
        "residual_multiplier": said.real("residual_scale", 1.0),
        "logits_scaling": said.real("logit_scale"),
        "rope_parameters": full_rotary(said, width),
    }


def _experts(said: GgufSettings) -> dict[str, Any]:
    return {
        "num_local_experts": said.whole("expert_count"),
        "num_experts_per_tok": said.whole("expert_used_count"),
    }


def _unlike_hybrid(name: str, config: Mapping[str, Any]) -> Difference | None:
    if name == "ssm_a":
        return Difference("decay", config["mamba_n_heads"])
    return unlike_llama(name, config)


GRANITE = Architecture(_granite, DECODER, unlike=unlike_llama)
MINICPM = Architecture(_minicpm, DECODER, unlike=unlike_llama)
GRANITE_MOE = Architecture(_granite_moe, _ATTENDS | _MIXTURE | _BESIDE, unlike=unlike_llama)
GRANITE_HYBRID = Architecture(
    _granite_hybrid,
    _HYBRID,
    dimensions={"ssm_conv1d": 3, "ssm_a": 1, "ssm_d": 1, "ssm_norm": 1},
    unlike=_unlike_hybrid,
)
