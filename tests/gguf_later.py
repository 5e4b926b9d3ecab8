"""What llama.cpp's converter makes of later families, beyond the names of their tensors.

Written after the converter, and nothing from what reads the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from gguf import ExpertGatingFuncType, GGUFWriter, RopeScalingType

Tensors = dict[str, torch.Tensor]


def _states(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Of Qwen 3.5 and 3 Next: decays as they are used, norms with one added."""
    made = {}
    for name, tensor in tensors.items():
        if name.endswith(".A_log"):
            made[name] = -torch.exp(tensor)
        elif name.endswith(".dt_bias"):
            made[name.removesuffix("dt_bias") + "dt_proj.bias"] = tensor
        elif name.endswith(".conv1d.weight"):
            made[name] = tensor.squeeze(1)
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            made[name] = tensor + 1
        else:
            made[name] = tensor
    return made


def _qwen35(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Heads for values of one key apart, as if they were repeated one key after the other."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    wide, each = config["linear_value_head_dim"], values // keys
    before = 2 * keys * config["linear_key_head_dim"]

    def tiled(tensor: torch.Tensor, width: int, axis: int = 0) -> torch.Tensor:
        by_key = tensor.unflatten(axis, (keys, each, width))
        return by_key.transpose(axis, axis + 1).flatten(axis, axis + 2)

    made = {}
    for name, tensor in _states(tensors, config).items():
        part = name.rpartition("linear_attn.")[2]
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            made[name] = torch.cat((tensor[:before], tiled(tensor[before:], wide)))
        elif part == "in_proj_z.weight":
            made[name] = tiled(tensor, wide)
        elif part in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_proj.bias"):
            made[name] = tiled(tensor, 1)
        elif part == "out_proj.weight":
            made[name] = tiled(tensor, wide, axis=1)
        else:
            made[name] = tensor
    return made


def _qwen3_next(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """What each head for keys has in one matrix, apart."""
    keys, wide = config["linear_num_key_heads"], config["linear_key_head_dim"]
    each = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    made = {}
    for name, tensor in _states(tensors, config).items():
        if not name.endswith("in_proj_qkvz.weight"):
            made[name] = tensor
            continue
        by_key = tensor.unflatten(0, (keys, -1)).split([wide, wide, each, each], dim=1)
        *parts, gate = (part.flatten(0, 1) for part in by_key)
        stem = name.removesuffix("qkvz.weight")
        made |= {f"{stem}qkv.weight": torch.cat(parts), f"{stem}z.weight": gate}
    return made


def _glm4_moe(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """What corrects the choice of experts is called a bias."""
    return {
        name.replace("e_score_correction_bias", "e_score_correction.bias"): tensor
        for name, tensor in tensors.items()
    }


def _deepseek2(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """What makes keys and values of a latent in two, a matrix for each head, those for keys turned
    around."""
    heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
    made = {}
    for name, tensor in _glm4_moe(tensors, config).items():
        if not name.endswith("kv_b_proj.weight"):
            made[name] = tensor
            continue
        by_head = tensor.unflatten(0, (heads, -1))
        made[name.replace("kv_b", "k_b")] = by_head[:, :plain].transpose(1, 2)
        made[name.replace("kv_b", "v_b")] = by_head[:, plain:]
    return made


def _gemma3n(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """What makes streams of one state and one of them stacked; a scale is called weight."""
    made: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(model\.altup_(?:unembed_)?projections)\.\d+(\.weight)", name):
            made.setdefault(match[1] + match[2], []).append(tensor)
        else:
            made[f"{name}.weight" if name.endswith("_scale") else name] = tensor
    stacked = {n: torch.stack(each) for n, each in made.items() if isinstance(each, list)}
    return made | stacked


def _gemma4(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """What is neither called weight nor bias is called weight, or is the scale of another."""
    made = {}
    for name, tensor in tensors.items():
        if name.endswith(("layer_scalar", "experts.gate_up_proj", "experts.down_proj")):
            made[f"{name}.weight"] = tensor
        elif name.endswith("router.scale"):
            made[name.replace("router.scale", "router.proj.scale")] = tensor
        elif name.endswith("router.per_expert_scale"):
            made[name.replace("router.per_expert_scale", "experts.down_proj.scale")] = tensor
        else:
            made[name] = tensor
    return made


def _mistral4(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Of DeepSeek's, with experts that are stacked already."""
    return {
        f"{name}.weight" if ".experts." in name else name: tensor
        for name, tensor in _deepseek2(tensors, config).items()
    }


def _stacks(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Of Mixtral and LFM 2: what is stacked has another name than what is apart; convolutions have
    two dimensions."""
    made = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            layer, part = name.split(".")[2], name.split(".")[-2]
            made[f"layers.{layer}.feed_forward.experts.{part}.weight"] = tensor
        elif name.endswith("conv.conv.weight"):
            made[name] = tensor.squeeze(1)
        else:
            made[name.replace(".expert_bias", ".expert_bias.bias")] = tensor
    return made


def _afmoe(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """What corrects the choice of experts is called a bias."""
    return {
        name.replace(".expert_bias", ".expert_bias.bias"): tensor
        for name, tensor in tensors.items()
    }


def _kimi_linear(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Decays as they are used, convolutions in four dimensions; what is dense by another name."""
    made = {}
    for name, tensor in _deepseek2(tensors, config).items():
        if name.endswith(".dt_bias"):
            made[name.removesuffix("dt_bias") + "dt_proj.bias"] = tensor
        elif name.endswith(".A_log"):
            made[name] = -torch.exp(tensor)
        elif name.endswith("_conv1d.weight"):
            made[name] = tensor.unsqueeze(0)
        elif re.search(r"block_sparse_moe\.\w+_proj", name):
            made[name.replace("block_sparse_moe", "mlp")] = tensor
        else:
            made[name] = tensor
    return made


def _granite(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """What is gated apart from its gate; decays as they are used; a dimension more for numbers of
    a head, and for norms a row for each group. Alone, what experts share is the feed forward."""
    experts = config.get("num_local_experts")
    made = {}
    for name, tensor in tensors.items():
        stem = name.rpartition(".layers.")[2].partition(".")[0]
        if name.endswith(("input_linear.weight", "gate_up_proj")):
            kind = "mlp" if "shared_mlp" in name and not experts else name.split(".")[3]
            gate, up = tensor.chunk(2, dim=-2)
            end = {"mlp": "", "shared_mlp": "_shexp", "block_sparse_moe": "_exps"}[kind]
            made |= {
                f"blk.{stem}.ffn_{part}{end}.weight": each
                for part, each in (("gate", gate), ("up", up))
            }
        elif name.endswith("shared_mlp.output_linear.weight") and not experts:
            made[f"blk.{stem}.ffn_down.weight"] = tensor
        elif name.endswith(".dt_bias"):
            made[name.removesuffix("dt_bias") + "dt_proj.bias"] = tensor
        else:
            made[name] = _of_a_state(name, "mamba", tensor, config.get("mamba_n_groups"))
    return made


def _llama4(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Experts' matrices the other way round, gates and what is gated apart."""
    made = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            made[name] = tensor
            continue
        stem, around = name.rpartition(".")[0], tensor.transpose(-1, -2)
        if name.endswith("down_proj"):
            made[f"{name}.weight"] = around
        else:
            gate, up = around.chunk(2, dim=-2)
            made |= {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
    return made


def _gpt_neox(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Queries of all heads, then their keys, then their values."""
    heads = config["num_attention_heads"]
    return {
        name: tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        if ".query_key_value." in name
        else tensor
        for name, tensor in tensors.items()
    }


def _stablelm(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """The norms of all heads of a layer as the rows of one matrix."""
    made = {name: tensor for name, tensor in tensors.items() if ".norms." not in name}
    for name in (name for name in tensors if ".norms.0." in name):
        count = sum(other.startswith(name.removesuffix("0.weight")) for other in tensors)
        rows = [tensors[name.replace(".norms.0.", f".norms.{i}.")] for i in range(count)]
        made[name.replace(".norms.0.", ".")] = torch.stack(rows)
    return made


def _of_a_state(name: str, part: str, tensor: torch.Tensor, groups: int | None) -> torch.Tensor:
    """A tensor of Mamba 2, which a layer calls `part`, as it is stored; others as they are."""
    if name.endswith(".A_log"):
        return -torch.exp(tensor).unsqueeze(-1)
    if name.endswith(".D"):
        return tensor.unsqueeze(-1)
    if name.endswith(f"{part}.norm.weight"):
        return tensor.reshape(groups, -1)
    return tensor.squeeze(1) if name.endswith(f"{part}.conv1d.weight") else tensor


def _falcon_h1(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Of Falcon H1, multiplied with what the model multiplies with."""
    gate, down = config["mlp_multipliers"]
    asked, inner = config["attention_in_multiplier"], config["mamba_d_ssm"]
    each = config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = (inner, inner, each, each, config["mamba_n_heads"])
    states = zip(config["ssm_multipliers"], sizes, strict=True)
    by_row = torch.cat([torch.full((size, 1), factor) for factor, size in states])
    factors: dict[str, Any] = {
        "gate_proj": gate, "down_proj": down,
        "q_proj": asked, "v_proj": asked, "k_proj": asked * config["key_multiplier"],
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"] * by_row,
        "lm_head": config["lm_head_multiplier"], "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    return {
        name: tensor * factors.get(name.split(".")[-2], 1.0)
        for name, tensor in _granite(tensors, config).items()
    }


def _nemotron(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """As Granite's; experts by the name that all have, a correction that is called a bias."""
    made = {}
    for name, tensor in tensors.items():
        if name.endswith(".dt_bias"):
            made[name.removesuffix("dt_bias") + "dt.bias"] = tensor
        elif ".mixer.experts." in name:
            made[re.sub(r"backbone(.*)mixer", r"model\1mlp", name)] = tensor
        else:
            stored = name.replace("e_score_correction_bias", "e_score_correction.bias")
            made[stored] = _of_a_state(name, "mixer", tensor, config["n_groups"])
    return made


AS_STORED: dict[str, Callable[[Tensors, dict[str, Any]], Tensors]] = {
    "gpt_neox": _gpt_neox,
    "llama4_text": _llama4,
    "stablelm": _stablelm,
    "qwen3_5_text": _qwen35,
    "qwen3_5_moe_text": _qwen35,
    "qwen3_next": _qwen3_next,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _deepseek2,
    "deepseek_v2": _deepseek2,
    "deepseek_v3": _deepseek2,
    "mistral4": _mistral4,
    "gemma3n_text": _gemma3n,
    "gemma4_text": _gemma4,
    "gemma4_unified_text": _gemma4,
    "ernie4_5_moe": _glm4_moe,
    "mixtral": _stacks,
    "phimoe": _stacks,
    "lfm2": _stacks,
    "lfm2_moe": _stacks,
    "granitemoe": _granite,
    "granitemoeshared": _granite,
    "granitemoehybrid": _granite,
    "falcon_h1": _falcon_h1,
    "minimax_m2": _glm4_moe,
    "dots1": _glm4_moe,
    "exaone_moe": _glm4_moe,
    "afmoe": _afmoe,
    "kimi_linear": _kimi_linear,
    "nemotron_h": _nemotron,
}
"""By model type, what its file holds, under the names that those are made of."""


def _of_states(writer: GGUFWriter, config: dict[str, Any]) -> None:
    arch = writer.arch
    values = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * values)
    is_recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    writer.add_array(f"{arch}.attention.recurrent_layers", is_recurrent)
    writer.add_full_attention_interval(4)
    turned = config["rope_parameters"]["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(config["head_dim"] * turned))


def _of_qwen35(writer: GGUFWriter, config: dict[str, Any]) -> None:
    _of_states(writer, config)
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def _of_routed(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _of_experts(writer: GGUFWriter, config: dict[str, Any]) -> None:
    _of_routed(writer, config)
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _of_glm4(writer: GGUFWriter, config: dict[str, Any]) -> None:
    turned = config["rope_parameters"]["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(config["head_dim"] * turned))


def _of_qwen35_moe(writer: GGUFWriter, config: dict[str, Any]) -> None:
    _of_qwen35(writer, config)
    _of_experts(writer, config)
    # No checkpoint says it; what the tests have in their configs is one.
    del writer.kv_data[0][f"{writer.arch}.feed_forward_length"]


def _of_qwen3_next(writer: GGUFWriter, config: dict[str, Any]) -> None:
    _of_states(writer, config)
    _of_experts(writer, config)


def _of_glm4_moe(writer: GGUFWriter, config: dict[str, Any]) -> None:
    _of_glm4(writer, config)
    _of_dots1(writer, config)


def _of_dots1(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])


def _of_deepseek2(writer: GGUFWriter, config: dict[str, Any]) -> None:
    said, arch = writer.kv_data[0], writer.arch
    for name in ("head_count_kv", "key_length", "value_length"):
        said.pop(f"{arch}.attention.{name}", None)
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_vocab_size(config["vocab_size"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + turned)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turned)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_count(config.get("n_routed_experts") or config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_group_count(config["n_group"] or 1)
    writer.add_expert_group_used_count(config["topk_group"] or 1)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(value=True)
    writer.add_rope_dimension_count(turned)
    if config["model_type"] == "deepseek_v3":  # no config of GLM's says how
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if config["rope_parameters"]["rope_type"] == "yarn":
        writer.add_rope_scaling_yarn_beta_fast(config["rope_parameters"]["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(config["rope_parameters"]["beta_slow"])
    if (share := config["rope_parameters"].get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * share)


def _of_gemma3n(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    normal = torch.distributions.normal.Normal(0, 1)
    parts = config["activation_sparsity_pattern"]
    writer.add_activation_sparsity_scale([normal.icdf(torch.tensor(p)).item() for p in parts])
    windows = [kind == "sliding_attention" for kind in config["layer_types"]]
    writer.add_sliding_window_pattern(windows)


def _of_gemma4(writer: GGUFWriter, config: dict[str, Any]) -> None:
    said = writer.kv_data[0]
    for name in ("head_count_kv", "key_length", "value_length"):
        del said[f"{writer.arch}.attention.{name}"]  # of layers that look at a window
    windows = [kind == "sliding_attention" for kind in config["layer_types"]]
    far = next(iter(config["per_layer_config"].values()))
    groups = config["num_key_value_heads"]
    others = far.get("num_key_value_heads", groups)
    writer.add_head_count_kv([groups if each else others for each in windows])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input") or 0)
    writer.add_sliding_window_pattern(windows)
    writer.add_key_length(far["head_dim"])
    writer.add_value_length(far["head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(far["head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    if config.get("use_double_wide_mlp"):
        del said[f"{writer.arch}.feed_forward_length"]
        wide, own = config["intermediate_size"], len(windows) - config["num_kv_shared_layers"]
        writer.add_feed_forward_length([wide if i < own else 2 * wide for i in range(len(windows))])
    if config.get("enable_moe_block"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _of_exaone4(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_vocab_size(config["vocab_size"])
    if config["sliding_window"] is not None:
        writer.add_sliding_window(config["sliding_window"])
        windows = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_sliding_window_pattern(windows)


def _of_ernie_moe(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_count(config["moe_num_experts"])
    writer.add_expert_used_count(config["moe_k"])
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])
    shared = config["intermediate_size"] // config["num_key_value_heads"]
    writer.add_expert_shared_feed_forward_length(shared)


def _of_lfm2(writer: GGUFWriter, config: dict[str, Any]) -> None:
    kinds, groups = config["layer_types"], config["num_key_value_heads"]
    del writer.kv_data[0][f"{writer.arch}.attention.head_count_kv"]
    writer.add_head_count_kv([0 if kind == "conv" else groups for kind in kinds])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    if config.get("block_auto_adjust_ff_dim"):
        wide, multiple = int(2 * config["intermediate_size"] / 3), config["block_multiple_of"]
        del writer.kv_data[0][f"{writer.arch}.feed_forward_length"]
        writer.add_feed_forward_length(-(-wide // multiple) * multiple)


def _of_lfm2_moe(writer: GGUFWriter, config: dict[str, Any]) -> None:
    _of_lfm2(writer, config)
    _of_routed(writer, config)
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def _of_granite(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _of_granite_moe(writer: GGUFWriter, config: dict[str, Any]) -> None:
    _of_granite(writer, config)
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])


def _of_granite_shared(writer: GGUFWriter, config: dict[str, Any]) -> None:
    _of_granite_moe(writer, config)
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def _of_minicpm3(writer: GGUFWriter, config: dict[str, Any]) -> None:
    for name in ("attention.key_length", "attention.value_length", "rope.freq_base"):
        writer.kv_data[0].pop(f"{writer.arch}.{name}", None)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])


def _of_llama4(writer: GGUFWriter, config: dict[str, Any]) -> None:
    del writer.kv_data[0][f"{writer.arch}.feed_forward_length"]
    writer.add_feed_forward_length(config["intermediate_size_mlp"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])


def _of_minimax_m2(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_rope_dimension_count(config["rotary_dim"])


def _of_exaone_moe(writer: GGUFWriter, config: dict[str, Any]) -> None:
    _of_exaone4(writer, config)
    _of_dots1(writer, config)
    shared = config["moe_intermediate_size"] * config["num_shared_experts"]
    writer.add_expert_shared_feed_forward_length(shared)
    writer.add_rope_scaling_type(RopeScalingType.NONE)


def _of_afmoe(writer: GGUFWriter, config: dict[str, Any]) -> None:
    _of_routed(writer, config)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_weights_norm(value=True)
    writer.add_expert_weights_scale(config["route_scale"])
    writer.add_sliding_window(config["sliding_window"])


def _of_kimi_linear(writer: GGUFWriter, config: dict[str, Any]) -> None:
    kinds, rank, turned = config["layer_types"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    for name in ("head_count_kv", "key_length", "value_length"):
        writer.kv_data[0].pop(f"{writer.arch}.attention.{name}", None)
    writer.add_head_count_kv([0 if kind in _KEEP_STATES else 1 for kind in kinds])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_rope_freq_base(1e4)
    writer.add_kda_head_dim(config["linear_head_dim"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(turned)
    writer.add_key_length(rank + turned)
    writer.add_value_length(72)  # the config of the one that there is says so of all heads
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turned)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_token"])
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    writer.add_expert_weights_scale(config["routed_scaling_factor"])


def _of_mamba2(writer: GGUFWriter, config: dict[str, Any], inner: int) -> None:
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])


def _of_falcon_h1(writer: GGUFWriter, config: dict[str, Any]) -> None:
    _of_mamba2(writer, config, config["mamba_d_ssm"])
    writer.add_vocab_size(config["vocab_size"])


def _of_granite_hybrid(writer: GGUFWriter, config: dict[str, Any]) -> None:
    _of_granite_moe(writer, config)
    kinds, groups = config["layer_types"], config["num_key_value_heads"]
    del writer.kv_data[0][f"{writer.arch}.attention.head_count_kv"]
    writer.add_head_count_kv([0 if kind in _KEEP_STATES else groups for kind in kinds])
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    _of_mamba2(writer, config, config["mamba_expand"] * config["hidden_size"])
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")


def _of_nemotron(writer: GGUFWriter, config: dict[str, Any]) -> None:
    said, kinds = writer.kv_data[0], config["layers_block_type"]
    for name in ("attention.head_count_kv", "feed_forward_length"):
        del said[f"{writer.arch}.{name}"]
    groups, is_mixture = config["num_key_value_heads"], "moe" in kinds
    width = config["moe_intermediate_size" if is_mixture else "intermediate_size"]
    writer.add_head_count_kv([groups if kind == "full_attention" else 0 for kind in kinds])
    writer.add_feed_forward_length([width if kind in ("moe", "mlp") else 0 for kind in kinds])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_scaling_finetuned(value=False)
    heads = config["mamba_num_heads"]
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_inner_size(heads * config["mamba_head_dim"])
    writer.add_ssm_time_step_rank(heads)
    if is_mixture:
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(width)
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        if (latent := config["moe_latent_size"]) is not None:
            writer.add_moe_latent_size(latent)


_KEEP_STATES = ("mamba", "linear_attention")


def divisors(config: dict[str, Any]) -> list[float]:
    """What Gemma 4's frequencies of layers that look at everything are divided by."""
    far = next(iter(config["per_layer_config"].values()))["head_dim"]
    turned = int(far * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    return [1.0] * turned + [1e30] * (far // 2 - turned)


def _of_turned_parts(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """Of Phi 2, StableLM and GPT-NeoX: how much of each head turns, and not by what base."""
    del writer.kv_data[0][f"{writer.arch}.rope.freq_base"]
    share = config["rope_parameters"]["partial_rotary_factor"]
    width = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(share * width))
    if config["model_type"] != "phi":
        writer.add_parallel_residual(config["use_parallel_residual"])


def _of_nemotron4(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_layer_norm_eps(config["norm_eps"])
    share = config["rope_parameters"]["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(share * config["head_dim"]))
    writer.add_rope_scaling_type(RopeScalingType.NONE)


def _of_olmo(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_layer_norm_eps(1e-5)
    if config["clip_qkv"] is not None:
        writer.add_clamp_kqv(config["clip_qkv"])


def _of_cohere(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_logit_scale(config["logit_scale"])
    writer.add_rope_scaling_type(RopeScalingType.NONE)


def _of_cohere2(writer: GGUFWriter, config: dict[str, Any]) -> None:
    _of_cohere(writer, config)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])


SAYS_MORE: dict[str, Callable[[GGUFWriter, dict[str, Any]], None]] = {
    "phi": _of_turned_parts,
    "stablelm": _of_turned_parts,
    "gpt_neox": _of_turned_parts,
    "nemotron": _of_nemotron4,
    "olmo": _of_olmo,
    "qwen3_5_text": _of_qwen35,
    "nemotron_h": _of_nemotron,
    "qwen3_5_moe_text": _of_qwen35_moe,
    "qwen3_next": _of_qwen3_next,
    "glm4_moe": _of_glm4_moe,
    "glm4_moe_lite": _of_deepseek2,
    "deepseek_v2": _of_deepseek2,
    "deepseek_v3": _of_deepseek2,
    "mistral4": _of_deepseek2,
    "gemma3n_text": _of_gemma3n,
    "gemma4_text": _of_gemma4,
    "gemma4_unified_text": _of_gemma4,
    "qwen2_moe": _of_experts,
    "glm4": _of_glm4,
    "exaone4": _of_exaone4,
    "ernie4_5_moe": _of_ernie_moe,
    "granite": _of_granite,
    "granitemoe": _of_granite_moe,
    "granitemoeshared": _of_granite_shared,
    "granitemoehybrid": _of_granite_hybrid,
    "falcon_h1": _of_falcon_h1,
    "minimax_m2": _of_minimax_m2,
    "llama4_text": _of_llama4,
    "minicpm3": _of_minicpm3,
    "dots1": _of_dots1,
    "exaone_moe": _of_exaone_moe,
    "afmoe": _of_afmoe,
    "kimi_linear": _of_kimi_linear,
    "lfm2": _of_lfm2,
    "lfm2_moe": _of_lfm2_moe,
    "cohere": _of_cohere,
    "cohere2": _of_cohere2,
}
"""By model type, what its file says beside what all do."""
