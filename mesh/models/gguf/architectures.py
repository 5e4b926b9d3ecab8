"""What an architecture's GGUF files call its tensors and settings, and transformers calls them.

An architecture has an entry where the test suite compares its files with the checkpoints that they
were made of; every other one is refused. So is a file with a setting or a tensor that its entry
does not know: it would mean something. transformers' own tables are for a model that is loaded, and
leave out what they do not know (scaled rotary embeddings, windows, caps); these are read where
there is no torch. How llama.cpp writes the files:
https://github.com/ggml-org/llama.cpp/tree/master/conversion
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mesh.models.gguf.rotary import full_rotary, longrope, plain_rotary
from mesh.models.gguf.settings import GgufSettings
from mesh.models.header import Difference

_LESS_ONE = Difference("less_one")
_TRANSPOSED = Difference("transposed")

_ENDS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_DECODER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA = _DECODER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {name: _DECODER[name] for name in ("attn_norm", "attn_output", "ffn_norm", "ffn_down")} | {
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One kind of GGUF file.

    `ends` and `layer` map names of GGUF to those of transformers, without ``.weight`` or ``.bias``;
    tensors of layer i are ``blk.{i}.…`` there and ``{layers}{i}.…`` here. `experts` are stacked in
    one tensor there and apart here. `config` gives what config.json would say, but for ids.
    """

    config: Callable[[GgufSettings], dict[str, Any]]
    layer: Mapping[str, str]
    ends: Mapping[str, str] = field(default_factory=lambda: _ENDS)
    layers: str = "model.layers."
    experts: Mapping[str, str] = field(default_factory=dict)
    unlike: Callable[[str, Mapping[str, Any]], Difference | None] = lambda name, config: None
    """How the tensor of this GGUF name, without its layer, differs from what the model computes
    with."""


def _decoder(said: GgufSettings, model_type: str, class_name: str) -> dict[str, Any]:
    """What the config of every decoder with rotary embeddings says, but for these."""
    hidden, heads = said.whole("embedding_length"), said.whole("attention.head_count")
    return {
        "model_type": model_type,
        "architectures": [class_name],
        "vocab_size": said.rows("token_embd.weight", hidden),
        "max_position_embeddings": said.whole("context_length"),
        "num_hidden_layers": said.layers(),
        "hidden_size": hidden,
        "intermediate_size": said.whole("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": said.whole("attention.head_count_kv", heads),
        "rms_norm_eps": said.real("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": not said.has("output.weight"),
    }


def _head_width(said: GgufSettings, config: Mapping[str, Any]) -> int:
    width = said.whole("attention.key_length", 0) or config["hidden_size"] // said.heads(
        config["hidden_size"]
    )
    if said.whole("attention.value_length", width) != width:
        said.refuse("its values are of another width than its keys")
    return width


def _llama(said: GgufSettings) -> dict[str, Any]:
    if said.whole("expert_count", 0, least=0):
        said.refuse("it is a mixture of experts under the name llama")
    said.pass_over("expert_used_count", "tensor_data_layout")
    config = _decoder(said, "llama", "LlamaForCausalLM")
    # Files of before the key was written leave the width of a head to this one.
    width = said.whole("rope.dimension_count", _head_width(said, config))
    return config | {
        "head_dim": width,
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "mlp_bias": said.has("blk.0.ffn_up.bias"),
        "rope_parameters": full_rotary(said, width),
    }


def _qwen2(said: GgufSettings) -> dict[str, Any]:
    config = _decoder(said, "qwen2", "Qwen2ForCausalLM")
    width = _head_width(said, config)
    if width * config["num_attention_heads"] != config["hidden_size"]:
        said.refuse("its heads together are not as wide as the model")
    return config | {"rope_parameters": full_rotary(said, width)}


def _qwen3(said: GgufSettings) -> dict[str, Any]:
    config = _decoder(said, "qwen3", "Qwen3ForCausalLM")
    width = _head_width(said, config)
    return config | {"head_dim": width, "rope_parameters": full_rotary(said, width)}


def _qwen3_moe(said: GgufSettings) -> dict[str, Any]:
    return _qwen3(said) | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": said.whole("expert_count"),
        "num_experts_per_tok": said.whole("expert_used_count"),
        "moe_intermediate_size": said.whole("expert_feed_forward_length"),
        # No file says these; llama.cpp computes so.
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma_scale(said: GgufSettings, config: Mapping[str, Any], width: int, largest: int) -> int:
    """Queries are scaled by its root. No file says it; of each generation, the model with the most
    layers differs."""
    if config["num_hidden_layers"] == largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return width


def _gemma2(said: GgufSettings) -> dict[str, Any]:
    config = _decoder(said, "gemma2", "Gemma2ForCausalLM")
    width = _head_width(said, config)
    return config | {
        "head_dim": width,
        "query_pre_attn_scalar": _gemma_scale(said, config, width, 46),
        "sliding_window": said.whole("attention.sliding_window", 4096),
        "layer_types": _kinds(config["num_hidden_layers"], 2),
        "attn_logit_softcapping": said.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": said.real("final_logit_softcapping", 30.0),
        "tie_word_embeddings": True,
        "rope_parameters": plain_rotary(said, width),
    }


def _gemma3(said: GgufSettings) -> dict[str, Any]:
    config = _decoder(said, "gemma3_text", "Gemma3ForCausalLM")
    width = _head_width(said, config)
    window = said.whole("attention.sliding_window", 0, least=0)
    period = said.whole("attention.sliding_window_pattern", 6) if window else 1
    local = said.real("rope.freq_base_swa", 10000.0)
    return config | {
        "head_dim": width,
        "query_pre_attn_scalar": _gemma_scale(said, config, width, 62),
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": _kinds(config["num_hidden_layers"], period),
        "final_logit_softcapping": said.real("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
            "full_attention": full_rotary(said, width, theta=1_000_000.0),
        },
    }


def _kinds(layers: int, period: int) -> list[str]:
    """Every layer looks at a window but each last of `period`."""
    return [
        "sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)
    ]


def _phi3(said: GgufSettings) -> dict[str, Any]:
    config = _decoder(said, "phi3", "Phi3ForCausalLM")
    width = _head_width(said, config)
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


def _unlike_llama(name: str, config: Mapping[str, Any]) -> Difference | None:
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name)
    return None if heads is None else Difference("rotary_rows", config[heads])


def _unlike_gemma(name: str, _: Mapping[str, Any]) -> Difference | None:
    return _LESS_ONE if name.endswith("norm") else None


def _unlike_gpt2(name: str, _: Mapping[str, Any]) -> Difference | None:
    matrices = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    return _TRANSPOSED if name in matrices else None


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(_llama, _DECODER, unlike=_unlike_llama),
        "qwen2": Architecture(_qwen2, _DECODER),
        "qwen3": Architecture(_qwen3, _DECODER | _HEAD_NORMS),
        "qwen3moe": Architecture(
            _qwen3_moe,
            _DECODER | _HEAD_NORMS | {"ffn_gate_inp": "mlp.gate"},
            experts=_EXPERTS,
        ),
        "gemma2": Architecture(_gemma2, _GEMMA, unlike=_unlike_gemma),
        "gemma3": Architecture(_gemma3, _GEMMA | _HEAD_NORMS, unlike=_unlike_gemma),
        "phi3": Architecture(_phi3, _PHI3),
        "gpt2": Architecture(
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
        ),
    }
)
"""By ``general.architecture``."""
