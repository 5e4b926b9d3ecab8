"""Falcon H1, each of whose layers attends and keeps a running state, side by side.

What the model multiplies with is in the weights of its files already:
https://github.com/ggml-org/llama.cpp/blob/master/conversion/falcon_h1.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh.models.gguf.architecture import DECODER, Architecture, decoder, head_width
from mesh.models.gguf.granites import STATES, heads_of_states
from mesh.models.gguf.rotary import full_rotary
from mesh.models.gguf.settings import GgufSettings
from mesh.models.header import Difference

_LAYER = (
    DECODER
    | STATES
    | {
        "ffn_norm.": "pre_ff_layernorm.weight",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    }
)
_ENDS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.final_layernorm",
    "output": "lm_head",
}


def _falcon_h1(said: GgufSettings) -> dict[str, Any]:
    config = decoder(said, "falcon_h1", "FalconH1ForCausalLM")
    width = head_width(said, config)
    heads, each = heads_of_states(said)
    return config | {
        "head_dim": width,
        "rope_parameters": full_rotary(said, width),
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "mlp_bias": said.has("blk.0.ffn_up.bias"),
        "projectors_bias": said.has("blk.0.ssm_out.bias"),
        "mamba_d_ssm": heads * each,
        "mamba_n_heads": heads,
        "mamba_d_head": each,
        "mamba_d_state": said.whole("ssm.state_size"),
        "mamba_n_groups": said.whole("ssm.group_count"),
        "mamba_d_conv": said.whole("ssm.conv_kernel"),
        "mamba_conv_bias": said.has("blk.0.ssm_conv1d.bias"),
        "mamba_proj_bias": said.has("blk.0.ssm_in.bias"),
        "mamba_rms_norm": said.has("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # llama.cpp knows no other way
    }


def _unlike(name: str, config: Mapping[str, Any]) -> Difference | None:
    return Difference("decay", config["mamba_n_heads"]) if name == "ssm_a" else None


FALCON_H1 = Architecture(
    _falcon_h1,
    _LAYER,
    _ENDS,
    dimensions={"ssm_conv1d": 3, "ssm_a": 1, "ssm_d": 1, "ssm_norm": 1},
    unlike=_unlike,
)
