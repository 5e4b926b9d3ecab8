"""LFM 2 and 2.5, and their mixtures, of whose layers most are short convolutions."""

from __future__ import annotations

from typing import Any

from mesh.models.gguf.architecture import Architecture, attentive, some_attend
from mesh.models.gguf.deepseeks import require_sigmoid
from mesh.models.gguf.rotary import full_rotary
from mesh.models.gguf.settings import GgufSettings

_LAYER = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
}
_MIXTURE = {
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}
_EXPERTS = {
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
}
_ENDS = {
    "token_embd": "model.embed_tokens",
    # What stands behind the last layer; the converter has always called it so.
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
}
_DIMENSIONS = {"shortconv.conv": 3}


def _lfm2(said: GgufSettings) -> dict[str, Any]:
    attends, groups = some_attend(said)
    config = attentive(said, "lfm2", "Lfm2ForCausalLM", groups)
    width = config["hidden_size"] // said.heads(config["hidden_size"])
    return config | {
        "norm_eps": config["rms_norm_eps"],
        "layer_types": ["full_attention" if each else "conv" for each in attends],
        "conv_L_cache": said.whole("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in said.tensors),
        "intermediate_size": said.whole("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,  # the file says what came of that
        "rope_parameters": full_rotary(said, width),
    }


def _lfm2_moe(said: GgufSettings) -> dict[str, Any]:
    require_sigmoid(said)
    config = _lfm2(said)
    dense = said.whole("leading_dense_block_count", 0, least=0)
    return config | {
        "model_type": "lfm2_moe",
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_dense_layers": dense,
        "num_experts": said.whole("expert_count"),
        "num_experts_per_tok": said.whole("expert_used_count"),
        "moe_intermediate_size": said.whole("expert_feed_forward_length"),
        "use_expert_bias": said.has(f"blk.{dense}.exp_probs_b.bias"),
        "norm_topk_prob": said.flag("expert_weights_norm", default=True),
        "routed_scaling_factor": said.real("expert_weights_scale", 1.0),
    }


LFM2 = Architecture(_lfm2, _LAYER, _ENDS, dimensions=_DIMENSIONS)
LFM2_MOE = Architecture(
    _lfm2_moe, _LAYER | _MIXTURE, _ENDS, experts=_EXPERTS, dimensions=_DIMENSIONS
)
