"""Nemotron-H, each of whose layers is one thing alone: a running state, attention, or feed forward,
which is a mixture in all of them or in none.

https://github.com/ggml-org/llama.cpp/blob/master/conversion/nemotron.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh.models.gguf.architecture import Architecture, head_width, some_attend
from mesh.models.gguf.deepseeks import require_sigmoid
from mesh.models.gguf.granites import STATES, heads_of_states
from mesh.models.gguf.settings import GgufSettings
from mesh.models.header import Difference

_ENDS = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
}
_LAYER = {name: path.replace("mamba.", "mixer.") for name, path in STATES.items()} | {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
}
_MIXTURE = {
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_EXPERTS = {
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
}


def _dense(said: GgufSettings) -> dict[str, Any]:
    return _nemotron(said, "mlp") | {"intermediate_size": max(_widths(said))}


def _mixture(said: GgufSettings) -> dict[str, Any]:
    require_sigmoid(said)
    return _nemotron(said, "moe") | {
        "moe_intermediate_size": said.whole("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": said.whole("expert_shared_feed_forward_length"),
        "moe_latent_size": said.whole("moe_latent_size", 0) or None,
        "n_routed_experts": said.whole("expert_count"),
        "n_shared_experts": said.whole("expert_shared_count"),
        "num_experts_per_tok": said.whole("expert_used_count"),
        "norm_topk_prob": said.flag("expert_weights_norm", default=False),
        "routed_scaling_factor": said.real("expert_weights_scale", 1.0),
        "n_group": said.whole("expert_group_count", 1),
        "topk_group": said.whole("expert_group_used_count", 1),
    }


def _nemotron(said: GgufSettings, feeds: str) -> dict[str, Any]:
    """What both say; `feeds` is what transformers calls layers that are feed forward."""
    attends, groups = some_attend(said)
    heads, each = heads_of_states(said)
    hidden = said.whole("embedding_length")
    # How positions would turn, if something were turned.
    said.pass_over("rope.freq_base", "rope.dimension_count", "rope.scaling.finetuned", "vocab_size")
    epsilon = said.real("attention.layer_norm_epsilon", 1e-5)  # where the other is not said
    kinds = [
        "full_attention" if attends[layer] else feeds if width else "linear_attention"
        for layer, width in enumerate(_widths(said))
    ]
    keeping = kinds.index("linear_attention") if "linear_attention" in kinds else 0
    return {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "vocab_size": said.rows("token_embd.weight", hidden),
        "max_position_embeddings": said.whole("context_length"),
        "hidden_size": hidden,
        "num_hidden_layers": said.layers(),
        "layers_block_type": kinds,
        "num_attention_heads": said.whole("attention.head_count"),
        "num_key_value_heads": groups,
        "head_dim": head_width(said, {"hidden_size": hidden}),
        "attention_bias": said.has(f"blk.{attends.index(True)}.attn_q.bias"),
        "layer_norm_epsilon": said.real("attention.layer_norm_rms_epsilon", epsilon),
        "tie_word_embeddings": not said.has("output.weight"),
        "mlp_hidden_act": "relu2",  # llama.cpp knows no other
        "mamba_num_heads": heads,
        "mamba_head_dim": each,
        "ssm_state_size": said.whole("ssm.state_size"),
        "n_groups": said.whole("ssm.group_count"),
        "conv_kernel": said.whole("ssm.conv_kernel"),
        "use_conv_bias": said.has(f"blk.{keeping}.ssm_conv1d.bias"),
        "use_bias": said.has(f"blk.{keeping}.ssm_in.bias"),
        "mlp_bias": any(said.has(f"blk.{n}.ffn_up.bias") for n in range(said.layers())),
    }


def _widths(said: GgufSettings) -> list[int]:
    """How wide each layer's feed forward is; 0 where it is something else."""
    return said.counts("feed_forward_length", least=0)


def _unlike(name: str, config: Mapping[str, Any]) -> Difference | None:
    return Difference("decay", config["mamba_num_heads"]) if name == "ssm_a" else None


_DIMENSIONS = {"ssm_conv1d": 3, "ssm_a": 1, "ssm_d": 1, "ssm_norm": 1}

NEMOTRON_H = Architecture(
    _dense, _LAYER, _ENDS, "backbone.layers.", dimensions=_DIMENSIONS, unlike=_unlike
)
NEMOTRON_H_MOE = Architecture(
    _mixture,
    _LAYER | _MIXTURE,
    _ENDS,
    "backbone.layers.",
    experts=_EXPERTS,
    dimensions=_DIMENSIONS,
    unlike=_unlike,
)
