"""GGUF files of small checkpoints, written as llama.cpp's converter writes them.

Names come from the `gguf` package's own table, and nothing from what reads the files: a mistake
there is not repeated here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file

from tests.gguf_later import AS_STORED, SAYS_MORE, divisors

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA, "mistral": gguf.MODEL_ARCH.LLAMA,
    "llama4_text": gguf.MODEL_ARCH.LLAMA4,
    "minicpm3": gguf.MODEL_ARCH.MINICPM3, "phimoe": gguf.MODEL_ARCH.PHIMOE,
    "phi": gguf.MODEL_ARCH.PHI2, "stablelm": gguf.MODEL_ARCH.STABLELM,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2, "nemotron": gguf.MODEL_ARCH.NEMOTRON,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX, "olmo": gguf.MODEL_ARCH.OLMO,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE, "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3, "phi3": gguf.MODEL_ARCH.PHI3,
    "gpt2": gguf.MODEL_ARCH.GPT2, "olmo2": gguf.MODEL_ARCH.OLMO2, "olmo3": gguf.MODEL_ARCH.OLMO2,
    "olmoe": gguf.MODEL_ARCH.OLMOE, "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "granite": gguf.MODEL_ARCH.GRANITE, "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3, "mistral4": gguf.MODEL_ARCH.MISTRAL4,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE, "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE, "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "gemma3n_text": gguf.MODEL_ARCH.GEMMA3N,
    "gemma4_unified_text": gguf.MODEL_ARCH.GEMMA4, "glm4_moe_lite": gguf.MODEL_ARCH.DEEPSEEK2,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE, "glm4": gguf.MODEL_ARCH.GLM4,
    "mixtral": gguf.MODEL_ARCH.LLAMA, "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5, "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "lfm2": gguf.MODEL_ARCH.LFM2, "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2, "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "granitemoeshared": gguf.MODEL_ARCH.GRANITE_MOE,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "hunyuan_v1_dense": gguf.MODEL_ARCH.HUNYUAN_DENSE, "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "falcon_h1": gguf.MODEL_ARCH.FALCON_H1, "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "arcee": gguf.MODEL_ARCH.ARCEE, "hunyuan_v1_moe": gguf.MODEL_ARCH.HUNYUAN_MOE,
    "apertus": gguf.MODEL_ARCH.APERTUS, "dots1": gguf.MODEL_ARCH.DOTS1,
    "exaone_moe": gguf.MODEL_ARCH.EXAONE_MOE, "afmoe": gguf.MODEL_ARCH.AFMOE,
    "cohere": gguf.MODEL_ARCH.COMMAND_R, "cohere2": gguf.MODEL_ARCH.COHERE2,
    "kimi_linear": gguf.MODEL_ARCH.KIMI_LINEAR, "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H_MOE,
}  # fmt: skip
_TURNED = (
    "llama", "mistral", "mixtral", "ministral3", "smollm3", "granite", "granitemoe",
    "granitemoehybrid", "arcee", "olmo", "granitemoeshared",
)  # fmt: skip
"""Whose rows of queries and keys are written in pairs."""
_EXPERT = re.compile(
    r"(.*\.(?:mlp|block_sparse_moe|feed_forward|mixer)\.experts)\.(\d+)\.(\w+)\.weight"
)
_K_BLOCK = 256

Edit = Callable[[GGUFWriter], object]


def write_gguf(
    directory: Path,
    file: Path,
    kind: str = "F32",
    *,
    parts: int = 1,
    edit: Edit = lambda writer: None,
    ends: str | None = None,
    tokenizer: bool = True,
    decoded: bool = False,
    arch: gguf.MODEL_ARCH | None = None,
) -> Path:
    """Write the checkpoint in `directory` to `file`, matrices as `kind`, and return the first file.

    `ends` is the type of embedding and head, that of the others unless given. `edit` may say more.
    With `decoded`, what blocks of the kind stand for is stored in F32. `arch` is what the file is
    of, that of the model type unless given.
    """
    config = json.loads((directory / "config.json").read_text())
    arch = arch or _arch_of(config)
    tensors = _apart(_stacked(load_file(directory / "model.safetensors")), config["model_type"])
    if (later := AS_STORED.get(config["model_type"])) is not None:
        tensors = later(tensors, config)
    is_turned = config["model_type"] in _TURNED and arch != gguf.MODEL_ARCH.EXAONE
    side = _side_tensors(config)
    per_file = -(-(len(tensors) + len(side)) // parts) if parts > 1 else 0
    writer = GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=per_file)
    writer.add_type(gguf.GGUFType.MODEL)
    _describe(writer, config)
    if tokenizer:
        _describe_tokenizer(writer, directory)
    names = gguf.get_tensor_name_map(arch, _layers(config))
    for part in ("alpha_n", "alpha_p", "beta", "eps"):
        named = [name for name in tensors if name.endswith(f"act_fn.{part}")]
        numbers = [tensors.pop(name) for name in sorted(named, key=_layer_of)]
        if numbers:
            writer.add_array(f"xielu.{part}", [float(each) for each in numbers])
    for name, tensor in tensors.items():
        stored = str(names.get_name(name, try_suffixes=(".weight", ".bias", ".scale")))
        is_end = not stored.startswith("blk.")
        as_stored = _as_stored(name, tensor, config, is_turned=is_turned)
        _add(writer, stored, as_stored, ends if ends and is_end else kind, decoded=decoded)
    for name, numbers in side.items():
        _add(writer, name, torch.tensor(numbers), "F32")
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file if parts == 1 else file.with_name(f"{file.stem}-00001-of-{parts:05}.gguf")


def _arch_of(config: dict[str, Any]) -> gguf.MODEL_ARCH:
    is_dense = "moe" not in config.get("layers_block_type", ("moe",))
    return gguf.MODEL_ARCH.NEMOTRON_H if is_dense else _ARCHITECTURES[config["model_type"]]


def _layers(config: dict[str, Any]) -> int:
    kinds = config.get("layers_block_type")
    return len(kinds) if kinds else _number(config, "num_hidden_layers", "n_layer")


def _describe_norms(writer: GGUFWriter, config: dict[str, Any]) -> None:
    if centred := config.get("layer_norm_eps") or config.get("norm_epsilon"):
        writer.add_layer_norm_eps(centred)
        return
    names = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
    for epsilon in [config[name] for name in names if config.get(name)][:1]:
        writer.add_layer_norm_rms_eps(epsilon)


def _layer_of(name: str) -> int:
    return int(name.split(".")[2])


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of all experts in one."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = tensor
        else:
            found[name] = tensor
    return found | {
        name: torch.stack([each[number] for number in sorted(each)])
        for name, each in experts.items()
    }


def _apart(tensors: dict[str, torch.Tensor], model_type: str) -> dict[str, torch.Tensor]:
    """What gpt-oss has in one tensor and its files in two, by the names that those are made of."""
    if model_type != "gpt_oss":
        return tensors
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("sinks"):
            found[f"{name}.weight"] = tensor
        elif ".experts." not in name:
            found[name] = tensor
        else:
            stem, kind = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
            numbers = tensor if kind == "bias" else tensor.transpose(-1, -2)
            if stem.endswith("gate_up_proj"):
                axis = 1
                gate, up = (
                    numbers.index_select(axis, torch.arange(first, numbers.shape[axis], 2))
                    for first in (0, 1)
                )
                stem = stem.removesuffix("gate_up_proj")
                found |= {f"{stem}gate_proj.{kind}": gate, f"{stem}up_proj.{kind}": up}
            else:
                found[f"{stem}.{kind}"] = numbers
    return found


def _as_stored(
    name: str, tensor: torch.Tensor, config: dict[str, Any], *, is_turned: bool
) -> torch.Tensor:
    kind = config["model_type"]
    tensor = tensor.float()
    if is_turned:
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        part = name.split(".")[-2]
        if part in heads:
            count = config[heads[part]]
            apart = tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
            return apart.swapaxes(1, 2).reshape(tensor.shape)
    if kind in ("gemma", "gemma2", "gemma3_text", "nemotron") and name.endswith("norm.weight"):
        return tensor + 1
    if kind == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return tensor.t()
    return tensor


def _add(
    writer: GGUFWriter, name: str, tensor: torch.Tensor, kind: str, *, decoded: bool = False
) -> None:
    numbers = tensor.float().contiguous().numpy()
    if numbers.ndim < 2 or ("conv" in name and "proj" not in name) or "ffn_gate_inp" in name:
        kind = "F32"
    if name.endswith(("ssm_a", "ssm_d", "ssm_norm.weight")) or "altup" in name or "laurel" in name:
        kind = "F32"
    stored = GGMLQuantizationType[kind]
    if decoded:
        writer.add_tensor(name, gguf.dequantize(gguf.quantize(numbers, stored), stored))
    elif kind.endswith("_K"):
        writer.add_tensor(name, k_blocks(numbers, stored), raw_dtype=stored)
    else:
        writer.add_tensor(name, gguf.quantize(numbers, stored), raw_dtype=stored)


def k_blocks(numbers: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Blocks of one of the types that the package decodes and cannot encode: made-up codes with
    scales that fit the numbers."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    count = numbers.size // _K_BLOCK
    generator = np.random.default_rng(numbers.size)
    blocks = generator.integers(0, 256, (count, size), dtype=np.uint8)
    spread = np.abs(numbers.reshape(count, _K_BLOCK)).max(axis=1)
    if kind == GGMLQuantizationType.Q6_K:  # 128 low, 64 high, 16 scales, one for all
        blocks[:, 192:208] = generator.integers(1, 64, (count, 16), dtype=np.uint8)
        blocks[:, 208:] = _halves(spread / (32 * 64))
    elif kind == GGMLQuantizationType.Q4_K:  # scale and minimum of all, 12 for their parts
        blocks[:, 0:2] = _halves(spread / (8 * 63))
        blocks[:, 2:4] = _halves(spread / 63)
    else:
        raise ValueError(kind)
    return blocks.reshape(*numbers.shape[:-1], -1)


def _halves(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return numbers.astype(np.float16).view(np.uint8).reshape(-1, 2)


def _describe(writer: GGUFWriter, config: dict[str, Any]) -> None:
    heads = _number(config, "num_attention_heads", "n_head")
    width = _number(config, "hidden_size", "n_embd")
    writer.add_block_count(_layers(config))
    writer.add_context_length(
        _number(config, "max_position_embeddings", "n_positions", "model_max_length")
    )
    writer.add_embedding_length(width)
    writer.add_head_count(heads)
    if config["model_type"] == "gpt2":
        writer.add_feed_forward_length(config.get("n_inner") or 4 * width)
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    writer.add_feed_forward_length(config["intermediate_size"])
    if config.get("num_key_value_heads"):
        writer.add_head_count_kv(config["num_key_value_heads"])
    _describe_norms(writer, config)
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    _describe_rotary(writer, config)
    if config["model_type"] in (*_TURNED, "phi3", "phimoe"):
        writer.add_rope_dimension_count(config.get("head_dim") or width // heads)
        writer.add_vocab_size(config["vocab_size"])
    if config["model_type"].startswith(
        ("gemma2", "gemma3", "gemma4", "phi3", "phimoe", "gpt_oss", "olmo3")
    ):
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if (says_more := _MORE.get(config["model_type"])) is not None:
        says_more(writer, config)


def _of_ministral3(writer: GGUFWriter, config: dict[str, Any]) -> None:
    said = _rotary(config)
    writer.add_rope_scaling_yarn_beta_fast(said["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(said["beta_slow"])
    writer.add_rope_scaling_yarn_log_mul(said["mscale_all_dim"])
    writer.add_attn_temperature_scale(said["llama_4_scaling_beta"])


def _of_olmo3(writer: GGUFWriter, config: dict[str, Any]) -> None:
    windows = [each == "sliding_attention" for each in config["layer_types"]]
    writer.add_sliding_window_pattern(windows)


def _of_gemma2(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])


def _of_experts(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_count(_number(config, "num_experts", "num_local_experts"))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(
        _number(config, "moe_intermediate_size", "intermediate_size")
    )


def _of_hunyuan_moe(writer: GGUFWriter, config: dict[str, Any]) -> None:
    _of_experts(writer, config | {"num_experts_per_tok": config["moe_topk"]})
    writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
    writer.add_expert_shared_count(1)


def _of_mixtral(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])


_MORE: dict[str, Callable[[GGUFWriter, dict[str, Any]], None]] = SAYS_MORE | {
    "ministral3": _of_ministral3,
    "olmo3": _of_olmo3,
    "gemma2": _of_gemma2,
    "qwen3_moe": _of_experts,
    "gpt_oss": _of_experts,
    "mixtral": _of_mixtral,
    "phimoe": _of_mixtral,
    "olmoe": _of_experts,
    "hunyuan_v1_moe": _of_hunyuan_moe,
}
"""What is written of one family alone."""


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = config.get("rope_parameters") or {}
    return dict(said.get("full_attention", said))


def _describe_rotary(writer: GGUFWriter, config: dict[str, Any]) -> None:
    if not (said := _rotary(config)):
        return
    writer.add_rope_freq_base(said["rope_theta"])
    local = config["rope_parameters"].get("sliding_attention", {}).get("rope_theta")
    if local is not None:
        writer.add_rope_freq_base_swa(local)
    match said["rope_type"]:
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(said["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(said["factor"])
            writer.add_rope_scaling_orig_ctx_len(said["original_max_position_embeddings"])
        case "longrope":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    if config["model_type"] in ("phi3", "phimoe"):
        longest = config["max_position_embeddings"]
        original = config.get("original_max_position_embeddings", longest)
        writer.add_rope_scaling_orig_ctx_len(original)
        scale = config["max_position_embeddings"] / original
        if "long_factor" in said:
            factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
            writer.add_rope_scaling_attn_factors(factor)


def _side_tensors(config: dict[str, Any]) -> dict[str, list[float]]:
    said = _rotary(config)
    if said.get("rope_type") == "longrope":
        return {
            "rope_factors_long.weight": said["long_factor"],
            "rope_factors_short.weight": said["short_factor"],
        }
    if said.get("rope_type") == "proportional":
        return {"rope_freqs.weight": divisors(config)}
    if said.get("rope_type") != "llama3":
        return {}
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    freqs = 1.0 / said["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    original, factor = said["original_max_position_embeddings"], said["factor"]
    low, high = said["low_freq_factor"], said["high_freq_factor"]
    factors = []
    for length in (2 * math.pi / freqs).tolist():
        if length < original / high:
            factors.append(1.0)
        elif length > original / low:
            factors.append(factor)
        else:
            smooth = (original / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return {"rope_freqs.weight": factors}


def _describe_tokenizer(writer: GGUFWriter, directory: Path) -> None:
    said = json.loads((directory / "tokenizer.json").read_text())
    model, added = said["model"], {each["content"]: each for each in said["added_tokens"]}
    words = dict(model["vocab"]) | {each: added[each]["id"] for each in added}
    tokens = sorted(words, key=words.__getitem__)
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    rank = {merge.replace(" ", ""): -number for number, merge in reversed(list(enumerate(merges)))}
    kinds = []
    for token in tokens:
        if token in added:
            special = added[token]["special"]
            kinds.append(gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED)
        elif re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            kinds.append(gguf.TokenType.BYTE)
        else:
            kinds.append(gguf.TokenType.NORMAL)
    pieces = bool(model.get("byte_fallback"))
    writer.add_tokenizer_model("llama" if pieces else "gpt2")
    splits = "smollm" if '"Digits"' in json.dumps(said["pre_tokenizer"]) else "gpt-2"
    writer.add_tokenizer_pre("default" if pieces else splits)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if pieces:
        writer.add_token_scores([float(rank.get(token, -1e9)) for token in tokens])
    else:
        writer.add_token_merges(merges)
    ends = json.loads((directory / "config.json").read_text())["eos_token_id"]
    if isinstance(ends, list):
        writer.add_eot_token_id(ends[-1])
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    for name, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        if settings.get(name) in words:
            add(words[settings[name]])
    writer.add_add_bos_token("<s>" in json.dumps(said["post_processor"]))
    template = directory / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text())
    elif settings.get("chat_template"):
        writer.add_chat_template(settings["chat_template"])


def _number(config: dict[str, Any], *names: str) -> int:
    return int(next(config[name] for name in names if config.get(name) is not None))
