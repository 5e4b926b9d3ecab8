"""Architectures that resemble no other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh.models.gguf.architecture import (
    BY_PLACE,
    DECODER,
    HEAD_NORMS,
    Architecture,
    decoder,
    head_width,
    kinds,
)
from mesh.models.gguf.deepseeks import MIXTURE, require_sigmoid, require_weighed
from mesh.models.gguf.llamas import MIXTRAL_EXPERTS, MIXTRAL_GATE
from mesh.models.gguf.qwens import EXPERTS
from mesh.models.gguf.rotary import full_rotary, longrope, partial_rotary, plain_rotary
from mesh.models.gguf.settings import GgufSettings
from mesh.models.header import Difference

_TRANSPOSED = Difference("transposed")

_PHI3 = {name: DECODER[name] for name in ("attn_norm", "attn_output", "ffn_norm", "ffn_down")} | {
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}
_MIXTURE_SCALE = 1.243163121016122
"""What Phi 3.5's mixture multiplies its rotary embedding with. No file says it: each says what the
dense ones of such lengths do."""
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT_OSS = {name: BY_PLACE[name] for name in BY_PLACE if not name.startswith("ffn")} | {
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps.weight": "mlp.experts.gate_proj",
    "ffn_gate_exps.bias": "mlp.experts.gate_proj_bias",
    "ffn_up_exps.weight": "mlp.experts.up_proj",
    "ffn_up_exps.bias": "mlp.experts.up_proj_bias",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_GLM4 = {name: DECODER[name] for name in DECODER if not name.startswith("ffn")} | {
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_mlp_layernorm",
}
_HUNYUAN = DECODER | {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_HUNYUAN_MOE = _HUNYUAN | {
    "ffn_gate_inp": "mlp.gate.wg",
    "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
    "ffn_up_shexp": "mlp.shared_mlp.up_proj",
    "ffn_down_shexp": "mlp.shared_mlp.down_proj",
}
_APERTUS = HEAD_NORMS | {
    name: DECODER[name] for name in DECODER if name not in ("attn_norm", "ffn_norm", "ffn_gate")
} | {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}  # fmt: skip
_OF_XIELU = ("alpha_n", "alpha_p", "beta", "eps")
"""What its layers are activated with, as `XIELU` of transformers names it."""
_AFMOE = DECODER | HEAD_NORMS | MIXTURE | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "attn_gate": "self_attn.gate_proj",
    "ffn_gate_inp": "mlp.router.gate",
    "exp_probs_b.bias": "mlp.expert_bias",
}  # fmt: skip
_OLMOE = DECODER | HEAD_NORMS | {"ffn_gate_inp": "mlp.gate"}
_OLMO2 = (
    {name: DECODER[name] for name in DECODER if not name.endswith("norm")}
    | HEAD_NORMS
    | {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)


def _phi3(said: GgufSettings) -> dict[str, Any]:
    config = decoder(said, "phi3", "Phi3ForCausalLM")
    width = head_width(said, config)
    original = said.whole(
        "rope.scaling.original_context_length", config["max_position_embeddings"], least=2
    )
    # Zero means none. What files of before the key mean, only llama.cpp's tables know.
    window = said.whole("attention.sliding_window", least=0)
    return config | {
        "sliding_window": window or None,
        "original_max_position_embeddings": original,
        "rope_parameters": longrope(said, width, original),
        "pad_token_id": None,
    }


def _phimoe(said: GgufSettings) -> dict[str, Any]:
    """Phi 3.5's mixture."""
    config = _phi3(said)
    if config["rope_parameters"]["rope_type"] == "longrope":
        config["rope_parameters"] |= dict.fromkeys(("short_mscale", "long_mscale"), _MIXTURE_SCALE)
    return config | {
        "model_type": "phimoe",
        "architectures": ["PhimoeForCausalLM"],
        "num_local_experts": said.whole("expert_count"),
        "num_experts_per_tok": said.whole("expert_used_count"),
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "lm_head_bias": said.has("output.bias"),
    }


def _gpt2(said: GgufSettings) -> dict[str, Any]:
    width = said.whole("embedding_length")
    inner = said.whole("feed_forward_length")
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": said.rows("token_embd.weight", width),
        "n_positions": said.whole("context_length"),
        "n_embd": width,
        "n_layer": said.layers(),
        "n_head": said.heads(width),
        "n_inner": None if inner == 4 * width else inner,
        "layer_norm_epsilon": said.real("attention.layer_norm_epsilon"),
        "tie_word_embeddings": not said.has("output.weight"),
    }


def _unlike_gpt2(name: str, _: Mapping[str, Any]) -> Difference | None:
    matrices = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    return _TRANSPOSED if name in matrices else None


def _olmo2(said: GgufSettings) -> dict[str, Any]:
    """OLMo 2, and 3, whose files say that most layers look at a window."""
    config = decoder(said, "olmo2", "Olmo2ForCausalLM")
    width = head_width(said, config)
    window = said.whole("attention.sliding_window", 0, least=0)
    if not window:
        return config | {"rope_parameters": full_rotary(said, width)}
    near = plain_rotary(said, width)
    return config | {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": said.windows(),
        "rope_parameters": {
            "sliding_attention": near
            | {"rope_theta": said.real("rope.freq_base_swa", near["rope_theta"])},
            "full_attention": full_rotary(said, width),
        },
    }


def _exaone4(said: GgufSettings) -> dict[str, Any]:
    """Where some of its layers look at a window, those alone turn their heads."""
    config = decoder(said, "exaone4", "Exaone4ForCausalLM")
    width = head_width(said, config)
    window = said.whole("attention.sliding_window", 0, least=0)
    kinds_said = said.windows() if window else ["full_attention"] * config["num_hidden_layers"]
    return config | {
        "head_dim": width,
        "sliding_window": window or None,
        "sliding_window_pattern": None,
        "layer_types": kinds_said,
        "rope_parameters": full_rotary(said, width, theta=1_000_000.0),
    }


def _headed(said: GgufSettings, model_type: str, class_name: str) -> dict[str, Any]:
    """Of a decoder that says how wide a head is, and turns it as a whole."""
    config = decoder(said, model_type, class_name)
    width = head_width(said, config)
    return config | {
        "head_dim": width,
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "rope_parameters": full_rotary(said, width),
    }


def _hunyuan(said: GgufSettings) -> dict[str, Any]:
    return _headed(said, "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM")


def _hunyuan_moe(said: GgufSettings) -> dict[str, Any]:
    config = _headed(said, "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM")
    widths = [said.whole(f"expert_{each}feed_forward_length") for each in ("", "shared_")]
    said.pass_over("expert_shared_count")
    if {*widths} != {config["intermediate_size"]}:
        said.refuse("its experts are of another width than it says")
    return config | {
        "num_experts": said.whole("expert_count"),
        "moe_topk": said.whole("expert_used_count"),
    }


def _apertus(said: GgufSettings) -> dict[str, Any]:
    return _headed(said, "apertus", "ApertusForCausalLM") | {"hidden_act": "xielu"}


def _afmoe(said: GgufSettings) -> dict[str, Any]:
    """AFM's mixtures, Trinity Nano and Mini."""
    config = _headed(said, "afmoe", "AfmoeForCausalLM")
    require_sigmoid(said)
    require_weighed(said, default=False)
    layers = config["num_hidden_layers"]
    pattern = "attention.sliding_window_pattern"
    return config | {
        "mup_enabled": True,  # no file says it; llama.cpp computes so
        "num_dense_layers": said.whole("leading_dense_block_count", 0, least=0),
        "num_experts": said.whole("expert_count"),
        "num_experts_per_tok": said.whole("expert_used_count"),
        "num_shared_experts": said.whole("expert_shared_count"),
        "moe_intermediate_size": said.whole("expert_feed_forward_length"),
        "route_scale": said.real("expert_weights_scale", 1.0),
        "sliding_window": said.whole("attention.sliding_window"),
        "layer_types": said.windows() if said.says(pattern) else kinds(layers, 4),
    }


def _olmoe(said: GgufSettings) -> dict[str, Any]:
    config = _headed(said, "olmoe", "OlmoeForCausalLM")
    said.pass_over("expert_feed_forward_length")
    return config | {
        "num_experts": said.whole("expert_count"),
        "num_experts_per_tok": said.whole("expert_used_count"),
        "norm_topk_prob": False,  # no file says it; llama.cpp computes so
    }


def _seed_oss(said: GgufSettings) -> dict[str, Any]:
    return _headed(said, "seed_oss", "SeedOssForCausalLM") | {
        "attention_out_bias": said.has("blk.0.attn_output.bias"),
        "mlp_bias": said.has("blk.0.ffn_up.bias"),
    }


def _glm4(said: GgufSettings) -> dict[str, Any]:
    config = decoder(said, "glm4", "Glm4ForCausalLM")
    width = head_width(said, config)
    return config | {
        "head_dim": width,
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "rope_parameters": partial_rotary(said, width),
    }


def _gpt_oss(said: GgufSettings) -> dict[str, Any]:
    config = decoder(said, "gpt_oss", "GptOssForCausalLM")
    width = head_width(said, config)
    if said.whole("expert_feed_forward_length") != config["intermediate_size"]:
        said.refuse("its experts are of another width than it says")
    turned = full_rotary(said, width, theta=150_000.0)
    if turned["rope_type"] == "yarn":
        turned["truncate"] = False  # no file says it; the models are made so
    return config | {
        "head_dim": width,
        "num_local_experts": said.whole("expert_count"),
        "num_experts_per_tok": said.whole("expert_used_count"),
        "sliding_window": said.whole("attention.sliding_window"),
        "layer_types": kinds(config["num_hidden_layers"], 2),
        "rope_parameters": turned,
    }


def _unlike_gpt_oss(name: str, _: Mapping[str, Any]) -> Difference | None:
    return _TRANSPOSED if name.endswith("_exps") else None


PHI3 = Architecture(_phi3, _PHI3)
PHIMOE = Architecture(_phimoe, DECODER | MIXTRAL_GATE, experts=MIXTRAL_EXPERTS)
OLMO2 = Architecture(_olmo2, _OLMO2)
GLM4 = Architecture(_glm4, _GLM4)
HUNYUAN = Architecture(_hunyuan, _HUNYUAN)
HUNYUAN_MOE = Architecture(_hunyuan_moe, _HUNYUAN_MOE, experts=EXPERTS)
APERTUS = Architecture(
    _apertus,
    _APERTUS,
    by_layer={f"xielu.{name}": f"mlp.act_fn.{name}" for name in _OF_XIELU},
    dimensions={"xielu.beta": 0, "xielu.eps": 0},
)
AFMOE = Architecture(_afmoe, _AFMOE, experts=EXPERTS)
OLMOE = Architecture(_olmoe, _OLMOE, experts=EXPERTS)
SEED_OSS = Architecture(_seed_oss, BY_PLACE)
EXAONE4 = Architecture(_exaone4, _OLMO2)
GPT_OSS = Architecture(_gpt_oss, _GPT_OSS, unlike=_unlike_gpt_oss)
GPT2 = Architecture(
    _gpt2,
    _GPT2,
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    "transformer.h.",
    unlike=_unlike_gpt2,
)
