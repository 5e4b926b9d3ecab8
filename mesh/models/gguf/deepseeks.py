"""DeepSeek V2 and V3, and what is built like them: GLM 4.7 Flash, Kimi K2, Moonlight, Youtu,
Mistral Small 4; and GLM 4.5 to 4.7, dots.llm1 and K-EXAONE, which have the same mixtures.

What makes keys and values of a latent is stored as llama.cpp computes with it, in two stacks of a
matrix for each head, the one for keys turned around; in files of before April 2025, as the models
have it: https://github.com/ggml-org/llama.cpp/pull/12801
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh.models.gguf.architecture import (
    BY_PLACE,
    DECODER,
    HEAD_NORMS,
    Architecture,
    attentive,
    decoder,
    head_width,
)
from mesh.models.gguf.qwens import EXPERTS
from mesh.models.gguf.rotary import full_rotary, longrope, partial_rotary
from mesh.models.gguf.settings import GgufSettings
from mesh.models.pairs import KEYS, LAYER, VALUES

MIXTURE = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_OTHERS = ("attn_norm", "attn_q", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
LATENT = {name: DECODER[name] for name in _OTHERS} | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": f"self_attn.{LAYER}",
    "attn_k_b": f"self_attn.{KEYS}",
    "attn_v_b": f"self_attn.{VALUES}",
}
_SOFTMAX, _SIGMOID = 1, 2
"""How llama.cpp numbers them among the functions that experts are chosen by."""
_GROWTH = 0.1
"""Of Mistral Small 4's queries."""
_OF_A_LOGARITHM = 0.1
"""The converter writes a setting of yarn multiplied by that."""


def require_sigmoid(said: GgufSettings) -> None:
    """Refuse a file whose experts are chosen in another way; one that does not say means that."""
    if said.whole("expert_gating_func", _SIGMOID) != _SIGMOID:
        said.refuse("its experts are not chosen by a sigmoid")


def require_weighed(said: GgufSettings, *, default: bool) -> None:
    """Refuse a file whose chosen experts do not share one whole; `default` is for who says
    nothing."""
    if not said.flag("expert_weights_norm", default=default):
        said.refuse("what its experts give is not weighed against each other")


def _deepseek2(said: GgufSettings) -> dict[str, Any]:
    found = _of_latents(said, "deepseek_v3", "DeepseekV3ForCausalLM")
    dense = found["first_k_dense_replace"]
    is_corrected = said.has(f"blk.{dense}.exp_probs_b.bias")
    chosen = said.whole("expert_gating_func", _SIGMOID if is_corrected else _SOFTMAX)
    is_mixture = dense < said.layers()
    if not is_mixture or (chosen == _SIGMOID and is_corrected):
        return found
    return found | _second(said, found, chosen, is_corrected=is_corrected)


def _mistral4(said: GgufSettings) -> dict[str, Any]:
    """Mistral Small 4. How queries grow behind the first positions no file says, and llama.cpp has
    them as they are; here they grow as the model's own do."""
    found = _of_latents(said, "mistral4", "Mistral4ForCausalLM")
    rope, turned = found["rope_parameters"], found["qk_rope_head_dim"]
    if said.whole("expert_gating_func", _SOFTMAX) != _SOFTMAX:
        said.refuse("its experts are not chosen by softmax")
    require_weighed(said, default=False)
    if rope["rope_type"] != "yarn":
        said.refuse("its positions are not scaled, as Mistral Small 4's are")
    width = found["qk_nope_head_dim"] + turned
    grown = {
        "llama_4_scaling_beta": said.real("attention.temperature_scale", _GROWTH),
        "partial_rotary_factor": turned / width,
    }
    return found | {"head_dim": width, "rope_parameters": rope | grown}


def _of_latents(said: GgufSettings, model_type: str, class_name: str) -> dict[str, Any]:
    config = attentive(said, model_type, class_name)
    mixture = _mixture(said)
    dense = mixture["first_k_dense_replace"]
    said.pass_over("feed_forward_length", "vocab_size")
    inner = said.whole("feed_forward_length") if dense else config["hidden_size"]
    return config | _latents(said) | mixture | {
        "num_key_value_heads": config["num_attention_heads"],
        "intermediate_size": inner,
        "attention_bias": said.has("blk.0.attn_kv_a_mqa.bias"),
        "n_routed_experts": said.whole("expert_count", 0, least=0) or None,
        "num_experts_per_tok": said.whole("expert_used_count", 1),
        "n_shared_experts": said.whole("expert_shared_count", 0, least=0),
    }  # fmt: skip


def _second(
    said: GgufSettings, config: Mapping[str, Any], chosen: int, *, is_corrected: bool
) -> dict[str, Any]:
    """What makes it one of DeepSeek V2's, whose experts are chosen by softmax."""
    if chosen != _SOFTMAX or is_corrected or config["norm_topk_prob"]:
        said.refuse("its experts are chosen in an unknown way")
    in_groups = config["n_group"] > 1
    return {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "topk_method": "group_limited_greedy" if in_groups else "greedy",
    }


def _latents(said: GgufSettings) -> dict[str, Any]:
    """How wide what is in a head, and in a latent, and how a part of each head turns."""
    rank, turned = said.whole("attention.kv_lora_rank"), said.whole("rope.dimension_count")
    keys, values = (said.whole(f"attention.{name}_length") for name in ("key", "value"))
    if said.says("attention.key_length_mla"):
        if (keys, values) != (rank + turned, rank):
            said.refuse(f"its latents are {rank} wide, and its keys {keys} and values {values}")
        keys, values = (said.whole(f"attention.{name}_length_mla") for name in ("key", "value"))
    if turned >= keys:
        said.refuse(f"it turns {turned} numbers of keys of {keys}")
    rope = full_rotary(said, turned)
    share = said.real("rope.scaling.yarn_log_multiplier", 0.0) / _OF_A_LOGARITHM
    if share and rope["rope_type"] == "yarn":
        # What is said of the two together is the same of each in all models that say it.
        rope |= {"mscale": round(share, 6), "mscale_all_dim": round(share, 6)}
    ranks = said.whole("attention.q_lora_rank", 0, least=0)
    return {
        "q_lora_rank": ranks or None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": keys - turned,
        "v_head_dim": values,
        "head_dim": turned,
        "rope_interleave": True,
        "rope_parameters": rope,
    }


def _mixture(said: GgufSettings) -> dict[str, Any]:
    """Which layers are mixtures, and how experts are chosen, but for how many there are."""
    return {
        "n_group": said.whole("expert_group_count", 1),
        "topk_group": said.whole("expert_group_used_count", 1),
        "moe_intermediate_size": said.whole("expert_feed_forward_length"),
        "first_k_dense_replace": said.whole("leading_dense_block_count", 0, least=0),
        "routed_scaling_factor": said.real("expert_weights_scale", 1.0),
        "norm_topk_prob": said.flag("expert_weights_norm", default=False),
        "num_nextn_predict_layers": 0,
    }


def _minicpm3(said: GgufSettings) -> dict[str, Any]:
    """MiniCPM 3. What it multiplies with no file says; there is one of it, and llama.cpp has that
    one's."""
    config = decoder(said, "minicpm3", "MiniCPM3ForCausalLM")
    keys, turned = said.whole("attention.key_length"), said.whole("rope.dimension_count")
    if turned >= keys:
        said.refuse(f"it turns {turned} numbers of keys of {keys}")
    width = config["hidden_size"] // said.heads(config["hidden_size"])
    return config | {
        "q_lora_rank": said.whole("attention.q_lora_rank"),
        "kv_lora_rank": said.whole("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": keys - turned,
        "v_head_dim": said.whole("attention.value_length", width),
        "attention_bias": False,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "rope_parameters": longrope(said, turned, config["max_position_embeddings"]),
    }


def _glm4_moe(said: GgufSettings) -> dict[str, Any]:
    """GLM 4.5 to 4.7."""
    config = _by_sigmoid(said, "glm4_moe", "Glm4MoeForCausalLM")
    return config | {
        "use_qk_norm": said.has("blk.0.attn_q_norm.weight"),
        "rope_parameters": partial_rotary(said, config["head_dim"]),
    }


def _dots1(said: GgufSettings) -> dict[str, Any]:
    config = _by_sigmoid(said, "dots1", "Dots1ForCausalLM")
    return config | {
        "sliding_window": None,
        "rope_parameters": full_rotary(said, config["head_dim"]),
    }


def _exaone_moe(said: GgufSettings) -> dict[str, Any]:
    """K-EXAONE, of which the layers that look at a window alone turn their heads."""
    config = _by_sigmoid(said, "exaone_moe", "ExaoneMoeForCausalLM")
    shared = config["moe_intermediate_size"] * config["n_shared_experts"]
    if said.whole("expert_shared_feed_forward_length", shared) != shared:
        said.refuse("what its experts share is of another width than it says")
    return config | {
        "num_experts": config["n_routed_experts"],
        "num_shared_experts": config["n_shared_experts"],
        "sliding_window": said.whole("attention.sliding_window"),
        "layer_types": said.windows(),
        "rope_parameters": full_rotary(said, config["head_dim"]),
    }


def _by_sigmoid(said: GgufSettings, model_type: str, class_name: str) -> dict[str, Any]:
    """Of those with plain keys and values, whose experts are chosen by a sigmoid."""
    config = decoder(said, model_type, class_name)
    require_sigmoid(said)
    return config | _mixture(said) | {
        "head_dim": head_width(said, config),
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "num_experts_per_tok": said.whole("expert_used_count"),
        "n_routed_experts": said.whole("expert_count"),
        "n_shared_experts": said.whole("expert_shared_count"),
    }  # fmt: skip


DEEPSEEK2 = Architecture(_deepseek2, LATENT | MIXTURE, experts=EXPERTS)
MINICPM3 = Architecture(_minicpm3, LATENT)
MISTRAL4 = Architecture(
    _mistral4,
    LATENT
    | MIXTURE
    | {
        "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
        "ffn_down_exps.weight": "mlp.experts.down_proj",
    },
)
GLM4_MOE = Architecture(_glm4_moe, BY_PLACE | HEAD_NORMS | MIXTURE, experts=EXPERTS)
DOTS1 = Architecture(_dots1, DECODER | HEAD_NORMS | MIXTURE, experts=EXPERTS)
EXAONE_MOE = Architecture(
    _exaone_moe,
    DECODER | HEAD_NORMS | MIXTURE | {"exp_probs_b.bias": "mlp.e_score_correction_bias"},
    experts=EXPERTS,
)
