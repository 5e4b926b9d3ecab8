"""Command R, Aya and their successors: attention and feed forward behind one norm, side by side.

Neighbours turn by position in the files as in transformers.
"""

from __future__ import annotations

from typing import Any

from mesh.models.gguf.architecture import (
    DECODER,
    HEAD_NORMS,
    Architecture,
    head_width,
    kinds,
    unnormed,
)
from mesh.models.gguf.rotary import full_rotary
from mesh.models.gguf.settings import GgufSettings

_LAYER = {name: DECODER[name] for name in DECODER if name != "ffn_norm"}


def _cohere(said: GgufSettings, model_type: str, class_name: str) -> dict[str, Any]:
    config = unnormed(said, model_type, class_name)
    width = head_width(said, config)
    return config | {
        "intermediate_size": said.whole("feed_forward_length"),
        "head_dim": width,
        "layer_norm_eps": said.real("attention.layer_norm_epsilon"),
        "logit_scale": said.real("logit_scale", 1.0) or 1.0,
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "rope_parameters": full_rotary(said, width),
    }


def _command_r(said: GgufSettings) -> dict[str, Any]:
    config = _cohere(said, "cohere", "CohereForCausalLM")
    if config.pop("head_dim") * config["num_attention_heads"] != config["hidden_size"]:
        said.refuse("its heads together are not as wide as the model")
    return config | {"use_qk_norm": said.has("blk.0.attn_q_norm.weight")}


def _cohere2(said: GgufSettings) -> dict[str, Any]:
    config = _cohere(said, "cohere2", "Cohere2ForCausalLM")
    pattern = "attention.sliding_window_pattern"
    of_windows = said.real("rope.freq_base_swa", config["rope_parameters"]["rope_theta"])
    if of_windows != config["rope_parameters"]["rope_theta"]:
        said.refuse("it turns heads that see a window by a base of their own")
    return config | {
        "sliding_window": said.whole("attention.sliding_window"),
        "layer_types": (
            said.windows() if said.says(pattern) else kinds(config["num_hidden_layers"], 4)
        ),
    }


COMMAND_R = Architecture(_command_r, _LAYER | HEAD_NORMS)
COHERE2 = Architecture(_cohere2, _LAYER)
