"""Random Hugging Face checkpoints, with tokenizers, of every family that is tested.

Weights are scaled so that greedy decoding wanders over the vocabulary with clear winners: a test
that compares token ids can then fail only when the computation differs.
"""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Mistral4ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.initialization import no_init_weights

FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma2", "gemma3", "phi3", "olmo2", "gpt2",
    "smollm3", "minicpm3", "granite", "gpt_oss", "glm4_moe", "gemma4", "qwen3_5", "lfm2",
)  # fmt: skip
MORE_FAMILIES = (
    "afmoe", "apertus", "arcee", "deepseek_v2", "deepseek_v3", "diffllama", "dots1", "ernie4_5",
    "ernie4_5_moe", "exaone4", "exaone_moe", "gemma", "gemma4_dense", "gemma4_unified_text",
    "glm4", "glm4_moe_lite", "granitemoe", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3",
    "laguna", "llama4_text", "axk2", "deepseek_v32", "glm_moe_dsa", "mimo_v2_flash",
    "minimax_m2", "ministral", "ministral3", "mistral4", "mixtral", "nanochat", "olmo3", "phi",
    "phimoe", "qwen2_moe", "seed_oss", "qwen3_5_moe", "qwen3_next", "lfm2_moe",
    "granitemoehybrid", "granitemoehybrid_dense", "falcon_h1", "bamba", "kimi_linear",
    "nemotron_h", "bloom", "opt", "mamba", "falcon_mamba", "mamba2", "jamba",
)  # fmt: skip
"""Compared with the whole model as well, but not in every way."""
STATEFUL = (
    "qwen3_5", "lfm2", "qwen3_5_moe", "qwen3_next", "lfm2_moe", "granitemoehybrid",
    "granitemoehybrid_dense", "falcon_h1", "bamba", "kimi_linear", "nemotron_h",
    "mamba", "falcon_mamba", "mamba2", "jamba",
)  # fmt: skip
"""Those of whose layers some keep a running state."""
SENTENCEPIECE_FAMILIES = ("mistral", "gemma2", "gemma3", "phi3", "minicpm3")

WINDOW = 64
GROWING = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.3,
}  # fmt: skip
"""From the 64th position on queries are multiplied by something."""
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|turn|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m['role'] }}: {{ m['content'] }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)
_TEXT = (
    "The kettle sings on the hearth while rain runs down the window. Anna reads to the cat, the cat"
    " listens to the rain, and nobody hears the door. Grüße aus dem Garten, où dort le chat. When"
    " the visitors arrive there is bread on the table, and somebody has hidden the butter again."
)
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0] * 24, "long_factor": [1.0 + 0.5 * i for i in range(24)],
    "original_max_position_embeddings": 160,
}  # fmt: skip
"""For heads of 64: beyond the 160th position texts are turned otherwise, all of them."""


def whole_class(model_type: str) -> Any:
    """What reads a whole checkpoint: a class that transformers' table leaves out, or the table."""
    return Mistral4ForCausalLM if model_type == "mistral4" else AutoModelForCausalLM


def make_checkpoint(
    directory: Path,
    family: str,
    *,
    layers: int = 8,
    seed: int = 0,
    hidden: int = 64,
    vocab: int = 384,
    dtype: str = "float32",
    tied: bool | None = None,
    sharded: bool = False,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of `family` to `directory` and return it.

    `tied` None leaves the family's default. `overrides` go into the config as they are.
    """
    settings = _base_settings(layers, hidden, vocab) | _special(family, layers, hidden) | overrides
    if tied is not None:
        settings["tie_word_embeddings"] = tied
    config = transformers.CONFIG_MAPPING[_MODEL_TYPES.get(family, family)](**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # how fast states fade is drawn where a model is made
        kind = whole_class(config.model_type)
        is_known = kind is AutoModelForCausalLM
        model = kind.from_config(config, dtype=torch.float32) if is_known else kind(config)
    _randomise(model, seed)
    model.to(getattr(torch, dtype)).save_pretrained(
        directory, max_shard_size=_part(model, dtype) if sharded else "50GB"
    )
    make_tokenizer(vocab, sentencepiece=family in SENTENCEPIECE_FAMILIES).save_pretrained(directory)
    return directory


def make_embedding_model(checkpoint: Path) -> None:
    """Have it say how one vector is made of a text, as sentence-transformers does."""
    types = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": number, "path": f"{number}_{kind}" if number else "", "type": f"models.{kind}"}
        for number, kind in enumerate(types)
    ]
    (checkpoint / "1_Pooling").mkdir(exist_ok=True)
    (checkpoint / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    (checkpoint / "modules.json").write_text(json.dumps(modules))


def make_large_checkpoint(directory: Path, shape: str, dtype: str = "bfloat16") -> Path:
    """Write a random checkpoint for benchmarks; `shape` is ``0.16B`` or ``qwen0.5B``."""
    wide = {
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if shape == "0.16B":
        config: Any = transformers.LlamaConfig(
            num_hidden_layers=12, hidden_size=768, num_attention_heads=12, num_key_value_heads=12,
            intermediate_size=3072, vocab_size=32000, tie_word_embeddings=False, **wide,
        )  # fmt: skip
    elif shape == "qwen0.5B":
        config = transformers.Qwen2Config(
            num_hidden_layers=24, hidden_size=896, num_attention_heads=14, num_key_value_heads=2,
            intermediate_size=4864, vocab_size=151936, tie_word_embeddings=True, **wide,
        )  # fmt: skip
    else:
        raise ValueError(f"no such shape: {shape!r}")
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    # One block of noise, repeated: as good for timing as fresh noise, and written much sooner.
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            torch.nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
            continue
        scaled = noise / math.sqrt(parameter.shape[-1])
        for part in parameter.data.view(-1).split(len(noise)):
            part.copy_(scaled[: len(part)])
    model.tie_weights()
    model.save_pretrained(directory)
    make_tokenizer(384, sentencepiece=False).save_pretrained(directory)
    return directory


@cache
def make_tokenizer(vocab: int, *, sentencepiece: bool) -> Any:
    """A tokenizer of `vocab` ids: byte-level BPE, or BPE with byte fallback as in SentencePiece."""
    backend = _sentencepiece(vocab) if sentencepiece else _byte_level(vocab)
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        additional_special_tokens=["<|turn|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        **special,
    )


def _byte_level(vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([_TEXT], _trainer(vocab, alphabet, SPECIAL_TOKENS))
    return tokenizer


def _sentencepiece(vocab: int) -> Tokenizer:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizers.Replace(" ", "▁")
    learned.train_from_iterator([_TEXT], _trainer(vocab - 256 - len(SPECIAL_TOKENS), [], ()))
    pieces = sorted(learned.get_vocab(), key=learned.get_vocab().__getitem__)
    ids = {piece: i for i, piece in enumerate([*SPECIAL_TOKENS, *byte_tokens, *pieces])}
    merges = [tuple(pair) for pair in _model_json(learned)["merges"]]
    tokenizer = Tokenizer(
        models.BPE(ids, merges, byte_fallback=True, unk_token=SPECIAL_TOKENS[0], fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _model_json(tokenizer: Tokenizer) -> dict[str, Any]:
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model


def _trainer(vocab: int, alphabet: list[str], special: tuple[str, ...]) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=vocab,
        initial_alphabet=alphabet,
        special_tokens=list(special),
        show_progress=False,
    )


def _base_settings(layers: int, hidden: int, vocab: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "vocab_size": vocab,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 2 * hidden,
        "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _special(family: str, layers: int, hidden: int) -> dict[str, Any]:
    head = {"head_dim": hidden // 4}
    wide = {"head_dim": hidden}  # of which a quarter turns
    experts = {
        "n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "num_shared_experts": 1, "moe_intermediate_size": hidden, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 2,
    }  # fmt: skip
    latent = {
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16,
    }  # fmt: skip
    indexed = {"index_topk": 24, "index_head_dim": 16, "index_n_heads": 16}
    gemma4 = head | {
        "hidden_size_per_layer_input": 0, "sliding_window": WINDOW, "attention_k_eq_v": True,
        "global_head_dim": hidden // 2, "num_global_key_value_heads": 1,
        "final_logit_softcapping": 30.0,
    }  # fmt: skip
    delta = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }  # fmt: skip
    few = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    mamba = {
        "mamba_n_heads": 8, "mamba_d_head": hidden // 4, "mamba_d_state": 16, "mamba_n_groups": 2,
        "mamba_chunk_size": 16,
    }  # fmt: skip
    nemotron = {
        "mamba_num_heads": 8, "mamba_head_dim": hidden // 4, "ssm_state_size": 16, "n_groups": 2,
        "chunk_size": 16, "head_dim": hidden // 8, "num_key_value_heads": 2,
    }  # fmt: skip
    sparse = {
        "layers_block_type": [
            ("linear_attention", "moe", "full_attention", "mlp")[i % 4] for i in range(layers)
        ],
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    pattern = ["linear_attention", "linear_attention", "full_attention"]
    kinds = {"layer_types": [pattern[i % 3] for i in range(layers)]}
    convs = {"layer_types": [("conv", "full_attention", "conv")[i % 3] for i in range(layers)]}
    untied = {"tie_word_embeddings": False}  # those heads would find the last token again
    attends = [i for i in range(layers) if i % 3 == 2]
    hybrid = kinds | mamba | {
        "shared_intermediate_size": 32, "embedding_multiplier": 3.0, "residual_multiplier": 0.6,
        "attention_multiplier": 0.2, "logits_scaling": 2.0,
    }  # fmt: skip
    by_family: dict[str, dict[str, Any]] = {
        "llama": {"rope_parameters": LLAMA3_ROPE},
        "qwen2": {"rope_parameters": _YARN},
        "qwen3": head,
        "qwen3_moe": head
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
        | {"decoder_sparse_step": 2, "mlp_only_layers": [layers - 1]},
        "mistral": {"sliding_window": WINDOW} | head,
        "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16} | head,
        "gemma3": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16} | head,
        "phi3": {"sliding_window": None},
        "cohere": {"logit_scale": 0.25, "use_qk_norm": True, "attention_bias": True},
        "cohere2": head | {"logit_scale": 0.25, "sliding_window": WINDOW},
        "phi4_mini": {
            "sliding_window": None, "rope_parameters": LONGROPE,
            "original_max_position_embeddings": LONGROPE["original_max_position_embeddings"],
        },
        "minicpm3": {
            "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8, "v_head_dim": 16, "scale_emb": 2, "scale_depth": 3.0,
            "dim_model_base": hidden // 2,
        },
        "granite": {
            "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 2.0,
            "attention_multiplier": 0.2,
        },
        "gpt_oss": head | {
            "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2,
            "rope_parameters": _YARN | {"truncate": False},
        },
        "glm4_moe": experts | {"head_dim": hidden // 2},
        "glm4_moe_lite": experts | latent,
        "gemma4": gemma4
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        | {"moe_intermediate_size": hidden // 2},
        "gemma4_dense": gemma4,
        "gemma4_e": gemma4
        | {"attention_k_eq_v": False, "hidden_size_per_layer_input": 16}
        | {"num_kv_shared_layers": layers // 2, "use_double_wide_mlp": True}
        | {"vocab_size_per_layer_input": 384, "layer_types": [
            "full_attention" if (layers - i) % 2 else "sliding_attention" for i in range(layers)
        ]},
        "gemma3n": head | {
            "sliding_window": WINDOW, "intermediate_size": [2 * hidden] * layers,
            "activation_sparsity_pattern": [0.95] * (layers // 3) + [0.0] * (layers - layers // 3),
            "laurel_rank": 8, "altup_num_inputs": 3, "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": layers // 2, "vocab_size_per_layer_input": 384,
            "layer_types": [
                "full_attention" if (layers - i) % 2 else "sliding_attention" for i in range(layers)
            ],
        },
        "gemma4_unified_text": gemma4,
        "deepseek_v2": experts | latent,
        "mistral4": experts | latent | {
            "qk_nope_head_dim": 8, "first_k_dense_replace": 0,
            "rope_parameters": {**GROWING},  # to which its config adds
        },
        "axk2": experts | latent | indexed | {"n_group": None, "topk_group": None},
        "deepseek_v32": experts | latent | indexed,
        "glm_moe_dsa": experts | latent | indexed,
        "glm_moe_dsa_shared": experts | latent | indexed | {"index_topk": 5} | {
            "indexer_types": ["shared" if i > 2 and i % 2 else "full" for i in range(layers)]
        },
        "deepseek_v3": experts | latent | {"n_group": 2, "topk_group": 1, "n_routed_experts": 8},
        "llama4_text": {
            "intermediate_size_mlp": 2 * hidden, "num_local_experts": 4, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2, "attention_chunk_size": WINDOW, "floor_scale": 16,
        } | head,
        "laguna": head | {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden,
            "shared_expert_intermediate_size": hidden, "sliding_window": WINDOW,
            "moe_routed_scaling_factor": 2.5, "moe_router_logit_softcapping": 3.0,
            "num_attention_heads_per_layer": [(4, 6)[i % 2] for i in range(layers)],
            "layer_types": [
                ("full_attention", "sliding_attention")[i % 2] for i in range(layers)
            ],
        },
        "mixtral": {"num_local_experts": 4},
        "olmo3": {"sliding_window": WINDOW},
        "qwen2_moe": {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden,
            "shared_expert_intermediate_size": hidden, "decoder_sparse_step": 2,
        },
        "granitemoe": {
            "num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6, "logits_scaling": 2.0, "attention_multiplier": 0.2,
        },
        "granitemoeshared": {
            "num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6, "logits_scaling": 2.0, "attention_multiplier": 0.2,
            "shared_intermediate_size": 32,
        },
        "phimoe": {"num_local_experts": 4},
        "seed_oss": head,
        "hunyuan_v1_dense": head,
        "hunyuan_v1_moe": head | {"num_experts": 4, "moe_topk": 2},
        "glm4": wide,
        "exaone4": {"sliding_window": WINDOW, "sliding_window_pattern": 4},
        "exaone_moe": experts | {"sliding_window": WINDOW, "sliding_window_pattern": 4},
        "ministral": {"sliding_window": WINDOW} | head,
        "ministral3": {"sliding_window": None, "rope_parameters": GROWING} | head,
        "dots1": experts | head | {"sliding_window": WINDOW, "max_window_layers": 2},
        "ernie4_5_moe": {
            "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": hidden,
            "moe_num_shared_experts": 1,
        },
        "afmoe": head | {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden,
            "num_dense_layers": 2, "sliding_window": WINDOW, "mup_enabled": True,
        },
        "minimax_m2": head | {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
        "mimo_v2_flash": experts | head | {"v_head_dim": hidden // 8, "sliding_window": WINDOW},
        "hy_v3": experts | head,
        "qwen3_5": wide | delta | kinds,
        "lfm2": convs,
        "qwen3_5_moe": wide | delta | kinds | few | {"shared_expert_intermediate_size": 32},
        "qwen3_next": wide | delta | kinds | few
        | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 2}
        | {"mlp_only_layers": [layers - 1]},
        "lfm2_moe": convs | few | {"num_dense_layers": 2},
        "granitemoehybrid": hybrid | {"num_local_experts": 4},
        "granitemoehybrid_dense": hybrid | {"num_local_experts": 0},
        "falcon_h1": head | mamba | {
            "mamba_d_ssm": 2 * hidden, "embedding_multiplier": 2.5, "lm_head_multiplier": 0.5,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "key_multiplier": 0.8,
        },
        "nemotron_h": nemotron | sparse,
        "nemotron_h_latent": nemotron | sparse | {"moe_latent_size": 32},
        "nemotron_h_dense": nemotron | {
            "layers_block_type": [
                ("linear_attention", "mlp", "full_attention")[i % 3] for i in range(layers)
            ],
        },
        "youtu": {
            "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
            # transformers empties the row of the padding as it loads it, and so this head's.
            "tie_word_embeddings": False,
        },
        "gpt_neox": {"num_key_value_heads": 4},
        "gpt_neo": {
            "window_size": 16,
            "attention_types": [[[("global", "local")[i % 2] for i in range(layers)], 1]],
        },
        "bamba": mamba | {"attn_layer_indices": attends},
        "kimi_linear": {
            "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_token": 2,
            "moe_intermediate_size": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
            "v_head_dim": 16, "qk_nope_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 4,
        } | kinds,
        "mamba2": nemotron | {"num_heads": 8, "head_dim": hidden // 4, "state_size": 16},
        "jamba": few | {"attn_layer_period": 3, "attn_layer_offset": 2},
        "bloom": untied,
        "opt": untied | {"ffn_dim": 2 * hidden, "word_embed_proj_dim": hidden},
        "opt_projected": untied | {  # OPT of 350 million is the only one
            "ffn_dim": 2 * hidden, "word_embed_proj_dim": hidden // 2, "do_layer_norm_before": False
        },
        "olmo_hybrid": kinds | delta | {"linear_num_key_heads": 4},
    }  # fmt: skip
    return by_family.get(family, {})


_MODEL_TYPES = {
    "phi4_mini": "phi3",
    "gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text",
    "gemma4_dense": "gemma4_text",
    "gemma4_e": "gemma4_text", "glm_moe_dsa_shared": "glm_moe_dsa",
    "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
    "granitemoehybrid_dense": "granitemoehybrid", "nemotron_h_dense": "nemotron_h",
    "nemotron_h_latent": "nemotron_h", "opt_projected": "opt",
}  # fmt: skip
"""Of families that are not called as their model type is."""


@torch.no_grad()
def _randomise(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings().weight
    embedding = model.get_input_embeddings()
    # A tied head finds the last token again unless the layers outweigh its (scaled) embedding.
    spread = (
        0.05 / float(getattr(embedding, "embed_scale", 1.0)) if head is embedding.weight else 0.5
    )
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in stored:
            buffer.add_(torch.randn(buffer.shape, generator=generator), alpha=0.1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2:
            parameter.add_(noise, alpha=0.1)
            if name.endswith("q_norm.weight") and "gemma4" in model.config.model_type:
                parameter.mul_(len(parameter) ** -0.5)  # its scores are not scaled otherwise
        elif parameter is embedding.weight or "wpe" in name or "positions" in name:
            parameter.copy_(noise * spread)
        else:
            # Rows without a mean pass on what differs between tokens, not the activations' mean.
            axis = -2 if "c_" in name else -1
            noise -= noise.mean(axis, keepdim=True)
            parameter.copy_(noise * 1.3 / math.sqrt(parameter.shape[axis]))
    # Rows of unequal length part the best two logits further than equal ones would.
    head.mul_(torch.randn((len(head), 1), generator=generator).mul_(0.3).exp_())
    _widen(model, generator)
    # A zero row keeps the end-of-sequence logit at zero, far below the best of the others.
    head[model.config.eos_token_id] = 0.0


def _widen(model: Any, generator: torch.Generator) -> None:
    """Scale the final norm so that logits spread by about 2."""
    ids = torch.randint(4, model.config.vocab_size, (1, 32), generator=generator)
    factor = 2.0 / float(model(ids).logits.std())
    base = next(part for part in model.children() if isinstance(part, PreTrainedModel))
    base = getattr(base, "decoder", base)
    names = (
        "ln_f", "norm", "norm_f", "final_layernorm", "embedding_norm", "final_layer_norm",
        "project_out",
    )  # fmt: skip
    norm = next(each for name in names if (each := getattr(base, name, None)) is not None)
    if getattr(norm, "weight", None) is None:
        model.get_output_embeddings().weight.mul_(factor)
        return
    shifted = "(Gemma[23]?(Text)?|Qwen3_5(Moe)?|Qwen3Next)RMSNorm"
    offset = 1.0 if re.match(shifted, type(norm).__name__) else 0.0
    norm.weight.copy_((norm.weight + offset) * factor - offset)
    if getattr(norm, "bias", None) is not None:
        norm.bias.mul_(factor)


def _part(model: Any, dtype: str) -> int:
    itemsize = getattr(torch, dtype).itemsize
    return sum(p.numel() for p in model.parameters()) * itemsize // 3
