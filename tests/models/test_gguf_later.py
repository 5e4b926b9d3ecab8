"""GGUF files of families that the converter changes in more than their names."""

from __future__ import annotations

import json
import math
import shutil
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, ExpertGatingFuncType, GGUFWriter, RopeScalingType, TokenType
from safetensors.torch import load_file
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import GemmaTokenizer, PreTrainedTokenizerFast, Qwen3_5Tokenizer

from mesh.errors import BadCheckpoint, UnsupportedFamily
from mesh.models.manifest import Manifest, read_manifest
from mesh.models.tokenizer import Tokenizer
from mesh.models.tokenizer_files import load_tokenizer
from mesh.shard.footprint import cached_numbers, keeps_states, state_bytes
from mesh.types import LayerRange
from tests.checkpoints import make_tokenizer
from tests.gguf_files import write_gguf
from tests.models.chain import prompt_chunks, run_parts, run_whole
from tests.models.conftest import Checkpoint

_CHUNKS = (13, 70, 1)
_TURNED = {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5}
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
_MIXED = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_THREE = {"linear_num_value_heads": 6, "linear_value_head_dim": 8}
_VARIED: dict[str, tuple[str, dict[str, Any]]] = {
    "three heads for values to one for keys": ("qwen3_5", _THREE | {"rope_parameters": _TURNED}),
    "three of a mixture": ("qwen3_5_moe", _THREE),
    "three of Qwen3-Next": ("qwen3_next", _THREE | _MIXED),
    "GLM with all that some have": (
        "glm4_moe",
        {
            "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5,
            "n_group": 2, "n_routed_experts": 8, "n_shared_experts": 2, "norm_topk_prob": False,
            "rope_parameters": _TURNED | {"partial_rotary_factor": 0.25},
        },
    ),
    "Gemma 4 with values of their own": (
        "gemma4", {"attention_k_eq_v": False, "final_logit_softcapping": None},
    ),
    "Gemma 4 without experts": ("gemma4_dense", {}),
    "Gemma 4 of 12 billion": ("gemma4_unified_text", {}),
    "Gemma 3n": ("gemma3n", {}),
    "Gemma 4 E2B": ("gemma4_e", {}),
    "Gemma 4 with layers that are given more, and keys of their own": (
        "gemma4_e", {"num_kv_shared_layers": 0, "use_double_wide_mlp": False},
    ),
    "EXAONE 4 that looks at everything": (
        "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 6},
    ),
    "ERNIE 4.5 of which each second layer is a mixture": (
        "ernie4_5_moe", {"moe_layer_interval": 2, "moe_num_shared_experts": 2, "use_bias": True},
    ),
    "Granite 4 without experts": ("granitemoehybrid_dense", {"position_embedding_type": "rope"}),
    "Falcon H1 with a norm, and all that it multiplies with": (
        "falcon_h1",
        {
            "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2,
            "mlp_multipliers": [0.5, 2.0], "attention_in_multiplier": 0.5, "projectors_bias": True,
            "attention_out_multiplier": 2.0, "ssm_in_multiplier": 2.0, "ssm_out_multiplier": 0.5,
            "tie_word_embeddings": False,
        },
    ),
    "Phi 3.5's mixture, for long texts": (
        "phimoe",
        {
            "attention_bias": True, "lm_head_bias": True, "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
                "short_factor": [1.0 + i / 8 for i in range(8)],
                "long_factor": [2.0 + i for i in range(8)],
                "short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122,
            },
        },
    ),
    "StableLM of 12 billion": (
        "stablelm",
        {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
    ),
    "OLMo that is clipped": ("olmo", {"clip_qkv": 0.5}),
    "GPT-NeoX of layers one after the other": (
        "gpt_neox", {"use_parallel_residual": False, "attention_bias": False},
    ),
    "LFM 2 with biases": ("lfm2", {"conv_bias": True, "block_auto_adjust_ff_dim": False}),
    "GLM 4.7 Flash": ("glm4_moe_lite", {"first_k_dense_replace": 1}),
    "DeepSeek 3 in groups, of a scaled rotary embedding": (
        "deepseek_v3",
        {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "DeepSeek 2, of queries that are made at once": ("deepseek_v2", {"q_lora_rank": None}),
    "one head for values to one for keys": (
        "qwen3_5", {"linear_num_value_heads": 2, "tie_word_embeddings": True},
    ),
}  # fmt: skip


def _require_same(manifest: Manifest, expected: tuple[Sequence[torch.Tensor], list[int]]) -> None:
    chunks, layers = prompt_chunks(_CHUNKS), manifest.total_layers
    cuts = sorted({0, manifest.cuts.first(2), layers})
    found, ids = run_parts(manifest, cuts, chunks, decode=6)
    assert ids == expected[1]
    for step, other in zip(found, expected[0], strict=True):
        torch.testing.assert_close(step, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("what", _VARIED)
def test_a_file_gives_the_tokens_of_its_checkpoint(
    what: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    family, settings = _VARIED[what]
    directory = checkpoint(family, layers=6, **settings)
    expected = run_whole(directory, prompt_chunks(_CHUNKS), decode=6)
    _require_same(read_manifest(write_gguf(directory, tmp_path / "model.gguf")), expected)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_5",
        "qwen3_next",
        "gemma3n",
        "gemma4",
        "gemma4_e",
        "glm4_moe_lite",
        "mixtral",
        "lfm2_moe",
        "granitemoehybrid",
        "minimax_m2",
        "exaone_moe",
        "llama4_text",
        "gpt_neox",
    ],
)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_blocks_are_what_they_stand_for(
    family: str, kind: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    more: dict[str, Any] = dict(_MIXED) if family == "qwen3_next" else {}
    more |= {"linear_num_value_heads": 6} if family.startswith("qwen") else {}
    more |= {"hidden_size_per_layer_input": 32} if family in ("gemma4_e", "gemma3n") else {}
    if family == "glm4_moe_lite":  # whole blocks
        more |= {"qk_nope_head_dim": 32, "kv_lora_rank": 32, "v_head_dim": 32}
        more |= {"first_k_dense_replace": 1}
    directory = checkpoint(family, layers=3, **more)
    chunks = prompt_chunks(_CHUNKS)
    plain = write_gguf(directory, tmp_path / "plain.gguf", kind, decoded=True)
    expected = run_parts(read_manifest(plain), (0, 3), chunks, decode=6)
    manifest = read_manifest(write_gguf(directory, tmp_path / "model.gguf", kind))
    assert manifest.dtype == kind.lower()
    _require_same(manifest, expected)


@pytest.mark.parametrize(
    ("family", "arch"),
    [
        ("qwen2", MODEL_ARCH.QWEN2VL),
        ("qwen3", MODEL_ARCH.QWEN3VL),
        ("qwen3_moe", MODEL_ARCH.QWEN3VLMOE),
    ],
)
def test_of_models_that_look_at_pictures_the_text_is_read(
    family: str, arch: MODEL_ARCH, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    mixed: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    mixed |= {"norm_topk_prob": True}
    directory = checkpoint(family, layers=3, **(mixed if family == "qwen3_moe" else {}))

    def edit(writer: GGUFWriter) -> None:
        writer.add_rope_dimension_sections([4, 2, 2, 0])
        if family != "qwen2":
            writer.add_num_deepstack_layers(3)

    expected = run_whole(directory, prompt_chunks(_CHUNKS), decode=6)
    file = write_gguf(directory, tmp_path / "model.gguf", edit=edit, arch=arch)
    _require_same(read_manifest(file), expected)


_AS_OTHERS: dict[str, tuple[str, MODEL_ARCH, dict[str, Any]]] = {
    "EXAONE 3.5": ("llama", MODEL_ARCH.EXAONE, {}),
    "InternLM 2": ("mistral", MODEL_ARCH.INTERNLM2, {"sliding_window": None}),
    "Granite 4 without states": (
        "granitemoehybrid_dense",
        MODEL_ARCH.GRANITE,
        {"layer_types": ["full_attention"] * 3, "position_embedding_type": "rope"},
    ),
    "MiniCPM": ("granite", MODEL_ARCH.MINICPM, {"attention_multiplier": 0.25}),
    "MiniCPM 4": (
        "granite",
        MODEL_ARCH.MINICPM,
        {
            "attention_multiplier": 0.25,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4,
                "short_factor": [1.0 + i / 4 for i in range(8)],
                "long_factor": [1.0 + i / 4 for i in range(8)],
                "original_max_position_embeddings": 1024,
            },
        },
    ),
}  # fmt: skip
"""By what a file is of: which of transformers' families computes it, and with what settings."""


@pytest.mark.parametrize("what", _AS_OTHERS)
def test_files_of_other_names_are_computed_as_their_like(
    what: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    family, arch, settings = _AS_OTHERS[what]
    directory = checkpoint(family, layers=3, **settings)

    def edit(writer: GGUFWriter) -> None:
        writer.kv_data[0].pop("minicpm.attention.scale", None)

    expected = run_whole(directory, prompt_chunks(_CHUNKS), decode=6)
    file = write_gguf(directory, tmp_path / "model.gguf", edit=edit, arch=arch)
    _require_same(read_manifest(file), expected)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("qwen3_5", "attention.recurrent_layers"),
        ("exaone_moe", ""),  # whose files say of the others only what they are
    ],
)
def test_layers_that_guess_further_tokens_are_left_out(
    family: str, kinds: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = checkpoint(family, layers=6)

    def edit(writer: GGUFWriter) -> None:
        said = writer.kv_data[0]
        count = said[f"{writer.arch}.block_count"]
        said[f"{writer.arch}.block_count"] = replace(count, value=7)
        if kinds:
            said[f"{writer.arch}.{kinds}"].value.append(False)
        writer.add_nextn_predict_layers(1)
        for name in ("attn_norm", "nextn.eh_proj", "nextn.enorm", "nextn.shared_head_norm"):
            writer.add_tensor(f"blk.6.{name}.weight", torch.ones(64).numpy())

    plain = read_manifest(write_gguf(directory, tmp_path / "plain.gguf"))
    guessing = read_manifest(write_gguf(directory, tmp_path / "model.gguf", edit=edit))
    assert guessing.config == plain.config
    assert guessing.tensors.keys() == plain.tensors.keys()
    assert guessing.weights_sha256 == plain.weights_sha256


def test_ones_that_llama_quantize_drops_from_the_shapes_of_kimi_linear(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    def edit(writer: GGUFWriter) -> None:
        stored = writer.tensors[0]
        for name, each in [*stored.items()]:
            dropped = each.tensor
            if name.endswith("ssm_a"):
                dropped = dropped[0, 0]
            elif "conv1d" in name:
                dropped = dropped[0]
            else:
                continue
            del stored[name]
            writer.add_tensor(name, dropped)

    directory = checkpoint("kimi_linear", layers=3)
    plain = read_manifest(write_gguf(directory, tmp_path / "plain.gguf"))
    found = read_manifest(write_gguf(directory, tmp_path / "model.gguf", edit=edit))
    shapes = [{n: t.shape for n, t in each.tensors.items()} for each in (plain, found)]
    assert shapes[0] == shapes[1]


def test_matrices_that_are_together_in_files_of_before_or_by_choice(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Queries with gates, as the converter had them once; experts' gates, as it has them if it is
    told to. A matrix of one row is a vector where llama.cpp has quantised the file."""
    directory = checkpoint("qwen3_next", layers=3, **_THREE, **_MIXED)
    weights = load_file(directory / "model.safetensors")

    def edit(writer: GGUFWriter) -> None:
        stored = writer.tensors[0]
        for layer in range(3):
            parts = [stored.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
            together = np.concatenate([part.tensor for part in parts], axis=1)
            writer.add_tensor(f"blk.{layer}.ffn_gate_up_exps.weight", together)
            name = f"blk.{layer}.ffn_gate_inp_shexp.weight"
            writer.add_tensor(name, stored.pop(name).tensor[0])
            if f"blk.{layer}.attn_gate.weight" in stored:
                del stored[f"blk.{layer}.attn_gate.weight"], stored[f"blk.{layer}.attn_qkv.weight"]
                both = weights[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"]
                writer.add_tensor(f"blk.{layer}.ssm_in.weight", both.numpy())

    expected = run_whole(directory, prompt_chunks(_CHUNKS), decode=6)
    _require_same(read_manifest(write_gguf(directory, tmp_path / "m.gguf", edit=edit)), expected)


def test_memory_is_planned_as_for_the_checkpoint(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = checkpoint("qwen3_5", layers=6)
    every = LayerRange(0, 6)
    stored, made = (
        read_manifest(path) for path in (write_gguf(directory, tmp_path / "m.gguf"), directory)
    )
    assert keeps_states(stored)
    assert state_bytes(stored, every) == state_bytes(made, every) > 0
    numbers = cached_numbers(made, every)
    assert cached_numbers(stored, every) == numbers
    assert [each > 0 for each in numbers] == [False, False, True] * 2


def _no_kinds(writer: GGUFWriter) -> None:
    del writer.kv_data[0]["qwen35.attention.recurrent_layers"]


def test_files_of_before_say_of_how_many_layers_one_attends(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = checkpoint("qwen3_5", layers=8, layer_types=None)
    manifest = read_manifest(write_gguf(directory, tmp_path / "model.gguf", edit=_no_kinds))
    assert manifest.config["layer_types"] == read_manifest(directory).config["layer_types"]


def test_files_of_before_have_keys_and_values_of_latents_together(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = checkpoint("deepseek_v2", layers=3)
    weights = load_file(directory / "model.safetensors")

    def edit(writer: GGUFWriter) -> None:
        said = writer.kv_data[0]
        for name, width in (("key", 24), ("value", 16)):
            of_name = f"deepseek2.attention.{name}_length"
            said[of_name] = replace(said[of_name], value=width)
            del said[f"{of_name}_mla"]
        for layer in range(3):
            for part in "kv":
                del writer.tensors[0][f"blk.{layer}.attn_{part}_b.weight"]
            whole = weights[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
            writer.add_tensor(f"blk.{layer}.attn_kv_b.weight", whole.numpy())

    before = read_manifest(write_gguf(directory, tmp_path / "before.gguf", edit=edit))
    now = read_manifest(write_gguf(directory, tmp_path / "now.gguf"))
    assert before.config == now.config
    assert before.weights.keys() == now.weights.keys()
    _require_same(before, run_whole(directory, prompt_chunks(_CHUNKS), decode=6))


_Edit = Callable[[GGUFWriter], object]


def _other(name: str, value: Any) -> _Edit:
    def edit(writer: GGUFWriter) -> None:
        said = writer.kv_data[0]
        said[f"{writer.arch}.{name}"] = replace(said[f"{writer.arch}.{name}"], value=value)

    return edit


def _tensor(name: str, numbers: torch.Tensor) -> _Edit:
    def edit(writer: GGUFWriter) -> None:
        del writer.tensors[0][name]
        writer.add_tensor(name, numbers.numpy())

    return edit


def _yarn(writer: GGUFWriter, factor: float) -> None:
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(factor)
    writer.add_rope_scaling_orig_ctx_len(64)


_REFUSED: dict[str, tuple[str, type[Exception], str, _Edit]] = {
    "heads that share unevenly": (
        "qwen3_5", UnsupportedFamily, "share 3 for keys", _other("ssm.group_count", 3),
    ),
    "heads that are not there": (
        "qwen3_5", BadCheckpoint, "not made of 8 heads",
        lambda w: (_other("ssm.group_count", 8)(w), _other("ssm.time_step_rank", 64)(w)),
    ),
    "kinds of fewer layers": (
        "qwen3_5", BadCheckpoint, "of 3 layers what they are",
        _other("attention.recurrent_layers", [True, True]),
    ),
    "guesses alone": (
        "qwen3_5", BadCheckpoint, "for guesses alone", lambda w: w.add_nextn_predict_layers(3),
    ),
    "decays by another name": (
        "qwen3_5", UnsupportedFamily, "blk.0.ssm_a.weight, which is unknown",
        lambda w: w.add_tensor("blk.0.ssm_a.weight", torch.ones(4).numpy()),
    ),
    "heads of a mixture that are not there": (
        "qwen3_5_moe", BadCheckpoint, "no stack of 5 matrices", _other("expert_count", 5),
    ),
    "experts of GLM that are chosen otherwise": (
        "glm4_moe", UnsupportedFamily, "not chosen by a sigmoid", _other("expert_gating_func", 1),
    ),
    "experts of DeepSeek that are chosen by softmax and corrected": (
        "glm4_moe_lite", UnsupportedFamily, "chosen in an unknown way",
        lambda w: w.add_expert_gating_func(ExpertGatingFuncType.SOFTMAX),
    ),
    "experts of Mistral Small 4 that are chosen by sigmoid": (
        "mistral4", UnsupportedFamily, "not chosen by softmax",
        lambda w: w.add_expert_gating_func(ExpertGatingFuncType.SIGMOID),
    ),
    "experts of Mistral Small 4 that are not weighed": (
        "mistral4", UnsupportedFamily, "not weighed against each other",
        _other("expert_weights_norm", value=False),
    ),
    "positions of Mistral Small 4 that are not scaled": (
        "mistral4", UnsupportedFamily, "positions are not scaled",
        lambda w: w.kv_data[0].pop("mistral4.rope.scaling.type"),
    ),
    "latents of another width than keys": (
        "deepseek_v2", UnsupportedFamily, "latents are 16 wide, and its keys 32",
        _other("attention.key_length", 32),
    ),
    "keys of latents without values": (
        "deepseek_v2", BadCheckpoint, "k_b_proj.weight, .4, 16, 16., and what belongs to it",
        lambda w: w.tensors[0].pop("blk.1.attn_v_b.weight"),
    ),
    "values of fewer heads than keys": (
        "deepseek_v2", BadCheckpoint, "layers.1.self_attn.k_b_proj.weight",
        _tensor("blk.1.attn_v_b.weight", torch.ones(3, 16, 16)),
    ),
    "gates without what is gated": (
        "granitemoehybrid_dense", BadCheckpoint, "first_rows.weight, .32, 64., does not fit",
        lambda w: w.tensors[0].pop("blk.1.ffn_up.weight"),
    ),
    "experts' gates of another width": (
        "granitemoehybrid", BadCheckpoint, "gate_up_proj.first_rows, .* does not fit the other",
        _tensor("blk.1.ffn_up_exps.weight", torch.ones(4, 32, 32)),
    ),
    "states that are not as wide as layers": (
        "granitemoehybrid", UnsupportedFamily, "heads of states are 96 wide",
        _other("ssm.inner_size", 96),
    ),
    "Gemma 4 that sees keys of a kind of layer that has none": (
        "gemma4", UnsupportedFamily, "of a kind that there is not",
        _other("attention.shared_kv_layers", 1),
    ),
    "Gemma 4 that is given more than it has a table of": (
        "gemma4", BadCheckpoint, "no matrix per_layer_token_embd.weight of 768 columns",
        _other("embedding_length_per_layer_input", 256),
    ),
    "Gemma 4 of which each layer is as wide as it likes": (
        "gemma4_e", UnsupportedFamily, "feed-forward differs",
        _other("feed_forward_length", [64, 128, 64]),
    ),
    "Gemma 4 that differs layer by layer": (
        "gemma4", UnsupportedFamily, "differ in other ways",
        _other("attention.head_count_kv", [2, 1, 1]),
    ),
    "Gemma 4 that ends in a window": (
        "gemma4", UnsupportedFamily, "differ in other ways",
        _other("attention.sliding_window_pattern", [True, False, True]),
    ),
    "Gemma 4 of counts for fewer layers": (
        "gemma4", BadCheckpoint, "no count for each layer", _other("attention.head_count_kv", [2]),
    ),
    "Gemma 4 that turns less of a window's heads": (
        "gemma4", UnsupportedFamily, "dimension_count_swa", _other("rope.dimension_count_swa", 8),
    ),
    "Gemma 4 whose frequencies are gone": (
        "gemma4", UnsupportedFamily, "it has no rope_freqs",
        lambda w: w.tensors[0].pop("rope_freqs.weight"),
    ),
    "Gemma 4 whose frequencies are others": (
        "gemma4", UnsupportedFamily, "of which a part is turned",
        _tensor("rope_freqs.weight", torch.full((16,), 0.5)),
    ),
    "Granite 4 without states, of which nothing turns": (
        "granite", UnsupportedFamily, "none of its heads turn",
        lambda w: w.add_rope_scaling_finetuned(value=False),
    ),
    "Llama 4 that is of no chunks": (
        "llama4_text", UnsupportedFamily, "otherwise than in chunks of 8192",
        lambda w: w.add_sliding_window(0),
    ),
    "Granite with experts": (
        "granite", UnsupportedFamily, "a mixture by another name", lambda w: w.add_expert_count(4),
    ),
    "norms of fewer heads than there are": (
        "stablelm", BadCheckpoint, "attn_q_norm.weight is no stack of 4 rows",
        lambda w: w.add_tensor("blk.0.attn_q_norm.weight", torch.ones(3, 16).numpy()),
    ),
    "OLMo that normalises with another number": (
        "olmo", UnsupportedFamily, "another number than 1e-05",
        _other("attention.layer_norm_epsilon", 1e-6),
    ),
    "GPT-NeoX whose heads share keys": (
        "gpt_neox", UnsupportedFamily, "heads share keys", _other("attention.head_count_kv", 2),
    ),
    "Command R whose heads are wider together than it is": (
        "cohere", UnsupportedFamily, "heads together are not as wide",
        lambda w: (w.add_key_length(32), w.add_value_length(32)),
    ),
    "Command R 7B that turns more slowly within a window": (
        "cohere2", UnsupportedFamily, "by a base of their own",
        lambda w: w.add_float32("cohere2.rope.freq_base_swa", 5e4),
    ),
    "a part of each head where all of it turns": (
        "gemma2", UnsupportedFamily, "turns a part of each head",
        lambda w: w.add_uint32("gemma2.rope.dimension_count", 8),
    ),
    "more of each head than there is": (
        "glm4", UnsupportedFamily, "turns 4096 numbers of each head of",
        _other("rope.dimension_count", 4096),
    ),
    "half a pair of each head": (
        "glm4", UnsupportedFamily, "turns 7 numbers of each head of",
        _other("rope.dimension_count", 7),
    ),
    "turns by a base of 1": (
        "qwen3", UnsupportedFamily, "base of its rotary embedding is 1",
        _other("rope.freq_base", 1.0),
    ),
    "yarn that is multiplied by something else": (
        "qwen3", UnsupportedFamily, "it says attn_factor",
        lambda w: (_yarn(w, 4.0), w.add_float32("qwen3.rope.scaling.attn_factor", 2.0)),
    ),
    "yarn that makes texts shorter": (
        "qwen3", UnsupportedFamily, "scaled by 0.5", lambda w: _yarn(w, 0.5),
    ),
    "a tensor that is neither weight nor bias": (
        "qwen3_5", UnsupportedFamily, "blk.0.ffn_up.scale, which is unknown",
        lambda w: w.add_tensor("blk.0.ffn_up.scale", torch.ones(4).numpy()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", _REFUSED)
def test_what_is_not_understood_is_refused(
    what: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    family, error, said, edit = _REFUSED[what]
    file = write_gguf(checkpoint(family, layers=3), tmp_path / "model.gguf", edit=edit)
    with pytest.raises(error, match=said):
        read_manifest(file)


def test_how_much_more_long_texts_are_attended_to(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = checkpoint("phi3", layers=2)
    plain = read_manifest(write_gguf(directory, tmp_path / "plain.gguf")).config
    whole, original = plain["max_position_embeddings"], plain["max_position_embeddings"] // 16
    turned = plain["hidden_size"] // plain["num_attention_heads"]
    turned = round(turned * plain["rope_parameters"]["partial_rotary_factor"])
    usual = math.sqrt(1 + math.log(whole / original) / math.log(original))

    def read(factor: float, count: int = turned // 2) -> dict[str, Any]:
        def edit(writer: GGUFWriter) -> None:
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_float32("phi3.rope.scaling.attn_factor", factor)
            for name, value in (("long", 4.0), ("short", 1.0)):
                numbers = torch.full((count,), value).numpy()
                writer.add_tensor(f"rope_factors_{name}.weight", numbers)

        file = write_gguf(directory, tmp_path / "model.gguf", edit=edit)
        found: dict[str, Any] = read_manifest(file).config["rope_parameters"]
        return found

    assert "attention_factor" not in read(usual)  # which transformers makes of the lengths
    assert read(1.5)["attention_factor"] == 1.5
    with pytest.raises(UnsupportedFamily, match="is not for heads of which"):
        read(usual, turned)


def test_command_r_says_what_else_would_be_as_in_most(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    def edit(writer: GGUFWriter) -> None:
        del writer.kv_data[0]["cohere2.logit_scale"]
        writer.add_sliding_window_pattern([True, False, True])

    directory = checkpoint("cohere2", layers=3)
    config = read_manifest(write_gguf(directory, tmp_path / "model.gguf", edit=edit)).config
    window, whole = "sliding_attention", "full_attention"
    assert config["layer_types"] == [window, whole, window]
    assert config["logit_scale"] == 1.0


def test_a_width_that_a_header_claims_takes_no_memory(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    def edit(writer: GGUFWriter) -> None:
        for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            _other(name, 1 << 26)(writer)

    file = write_gguf(checkpoint("gemma4", layers=3), tmp_path / "model.gguf", edit=edit)
    tracemalloc.start()
    try:
        with pytest.raises(UnsupportedFamily, match="is not for heads of 67108864"):
            read_manifest(file)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


_SPLIT = (
    "I'M unmerged you'll 12345, 3.1 and\n\n x = [1,22]; नमस्ते किताब e\u0301te\u0301 Café ... --\r\n",
    "\tcan't  I'LL  2026年11月 \u0927\u094d\u092f  ~~~\n \n",
)


def _trained() -> dict[str, Any]:
    """A BPE model whose merges go across whatever a split cuts, so that each cut counts."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=360, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([text * 3 for text in _SPLIT], trainer)
    made: dict[str, Any] = json.loads(backend.to_str())["model"]
    return made


def _of_qwen35(model: dict[str, Any]) -> Any:
    merges = [tuple(each) for each in model["merges"]]
    vocab = model["vocab"] | {"<|endoftext|>": len(model["vocab"])}
    return Qwen3_5Tokenizer(vocab=vocab, merges=merges)


_GLM = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def _of_deepseek(model: dict[str, Any]) -> Any:
    """As the tokenizer.json of DeepSeek V3."""
    return _cut(model, *_DEEPSEEK)


def _cut(model: dict[str, Any], *patterns: str) -> Any:
    backend = Backend.from_str(json.dumps({"model": model, "added_tokens": []}))
    cuts = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in patterns]
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, in_bytes])
    backend.decoder = decoders.ByteLevel()
    first = "[gMASK]"
    backend.add_special_tokens([first])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=first)


def _of_glm(model: dict[str, Any]) -> Any:
    """As the tokenizer.json of GLM 4.5; a word of the vocabulary that no merges lead to is one."""
    model |= {"vocab": model["vocab"] | {"Ġunmerged": len(model["vocab"])}, "ignore_merges": True}
    return _cut(model, _GLM)


_SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _of_seed(model: dict[str, Any]) -> Any:
    """As the tokenizer.json of Seed OSS."""
    return _cut(model, _SEED)


def _of_exaone_moe(model: dict[str, Any]) -> Any:
    """As the tokenizer.json of K-EXAONE, whose words go across spaces."""
    contractions = "|".join(f"'(?i:{each})" for each in ("s", "t", "re", "ve", "m", "ll", "d"))
    letter = r"\p{L}\p{M}*"
    words = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{letter}(?: {letter})*)+"
    marks = r" ?[^\s\p{L}\p{N}]+[\r\n/]?"
    return _cut(model, rf"{contractions}|{words}|\p{{N}}|{marks}|\s*[\r\n]|\s+(?!\S)|\s+")


def _of_coder(model: dict[str, Any]) -> Any:
    """As the tokenizer.json of DeepSeek Coder."""
    return _cut(model, r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST, r"\p{N}")


def _of_first_deepseek(model: dict[str, Any]) -> Any:
    """As those of DeepSeek LLM, V2 and V2 Lite, of whose list of letters the texts here have some
    that are small or large."""
    marks = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
    letters = r"\s?[\p{Ll}\p{Lu}]+"
    return _cut(model, r"[\r\n]", letters, marks, r"\s+$", _EAST, r"\p{N}")


def _of_minicpm(model: dict[str, Any]) -> Any:
    """As that of MiniCPM 5."""
    return _cut(model | {"ignore_merges": True}, r"\p{N}{1,3}", _GLM.replace("{1,3}", "+"))


_EAST = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


def _of_afmoe(model: dict[str, Any]) -> Any:
    """As that of Trinity: digits in threes from the last, then as DeepSeek's."""
    return _cut(model, r"\d{1,3}(?=(?:\d{3})*(?:\D|\z))", *_DEEPSEEK[1:])


def _of_kimi(model: dict[str, Any]) -> Any:
    """As tokenization_kimi.py of Kimi K2 has it."""
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    before, after = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    patterns = (
        r"[\p{Han}]+", f"{before}{upper}*{lower}+{after}", f"{before}{upper}+{lower}*{after}",
        r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
    )  # fmt: skip
    return _cut(model, "|".join(patterns))


def _of_neox(model: dict[str, Any]) -> Any:
    """As the tokenizer.json of GPT-NeoX, which OLMo and MPT have as well."""
    expected = _cut(model)
    backend = expected.backend_tokenizer
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return expected


def _of_exaone(model: dict[str, Any]) -> Any:
    """As that of EXAONE 3: each digit by itself."""
    expected = _of_neox(model)
    backend = expected.backend_tokenizer
    backend.normalizer = None
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    return expected


def _of_stablelm(model: dict[str, Any]) -> Any:
    """As tokenization_arcade100k.py of StableLM 2."""
    expected = _cut(model, _GLM.replace("{1,3}", ""))
    expected.backend_tokenizer.normalizer = normalizers.NFC()
    return expected


_TOKENIZERS = {
    "olmo": ("olmo", _of_neox),
    "mpt": ("gpt_neox", _of_neox),
    "exaone": ("llama", _of_exaone),
    "stablelm2": ("stablelm", _of_stablelm),
    "exaone-moe": ("exaone_moe", _of_exaone_moe),
    "afmoe": ("afmoe", _of_afmoe),
    "kimi-k2": ("deepseek_v3", _of_kimi),
    "qwen35": ("qwen3_5", _of_qwen35),
    "glm4": ("glm4_moe", _of_glm),
    "deepseek-coder": ("llama", _of_coder),
    "deepseek-llm": ("deepseek_v2", _of_first_deepseek),
    "deepseek-v3": ("deepseek_v2", _of_deepseek),
    "minicpm5": ("llama", _of_minicpm),
    "hunyuan-dense": ("hunyuan_v1_dense", _of_deepseek),
    "seed-coder": ("seed_oss", _of_seed),
}


@pytest.mark.parametrize("name", _TOKENIZERS)
def test_texts_are_split_as_the_file_says(
    name: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    family, make = _TOKENIZERS[name]
    directory = shutil.copytree(checkpoint(family, layers=3), tmp_path / "made")
    expected = make(_trained())
    expected.save_pretrained(directory)
    tokenizer, wrong = (
        Tokenizer.load(
            read_manifest(write_gguf(directory, tmp_path / f"{split}.gguf", edit=_split(split)))
        )
        for split in (name, "gpt-2" if name == "stablelm2" else "qwen2")
    )
    for text in _SPLIT:
        ids = expected(text)["input_ids"]
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == expected.decode(ids)
        assert wrong.encode(text) != ids


def test_words_that_bytes_do_not_spell_are_taken_whole(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """As those are in which DeepSeek and its distilled models take turns, and runs of spaces."""
    directory = shutil.copytree(checkpoint("qwen2", layers=2), tmp_path / "made")
    model = _trained()
    model["vocab"]["ĠĠĠĠ"] = len(model["vocab"])  # what a run of spaces is in bytes, to no avail
    expected = _of_deepseek(model)
    special = ["<｜User｜>", "<｜end▁of▁sentence｜>"]
    expected.add_special_tokens({"additional_special_tokens": special})
    expected.add_tokens(["    ", "\t\t", "<｜tool▁calls▁begin｜>"])
    expected.save_pretrained(directory)
    file = write_gguf(directory, tmp_path / "model.gguf", edit=_split("deepseek-v3"))
    tokenizer = Tokenizer.load(read_manifest(file))
    for text in (
        "if:\n     x\t\ty",
        *(f"a{word}b" for word in [*special, "<｜tool▁calls▁begin｜>"]),
    ):
        ids = expected(text)["input_ids"]
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == expected.decode(ids, skip_special_tokens=True)
    assert "ĠĠĠĠ" in load_tokenizer(read_manifest(file)).get_vocab()


def test_special_tokens_of_phi3_take_what_is_white_behind_them(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = shutil.copytree(checkpoint("phi3", layers=2), tmp_path / "made")
    made = make_tokenizer(380, sentencepiece=True)
    backend = Backend.from_str(made.backend_tokenizer.to_str())
    backend.add_special_tokens(
        [AddedToken(word, rstrip=True, special=True) for word in ("<|end|>", "</s>", "<|user|>")]
    )
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    expected = PreTrainedTokenizerFast(tokenizer_object=backend, **ends)
    expected.save_pretrained(directory)
    tokenizer = Tokenizer.load(read_manifest(write_gguf(directory, tmp_path / "model.gguf")))
    for text in ("<|user|>\nthe cat<|end|>  \n<|user|>rain</s>  a<s> b",):
        assert tokenizer.encode(text) == expected(text)["input_ids"]


def _split(name: str) -> _Edit:
    def edit(writer: GGUFWriter) -> None:
        del writer.kv_data[0]["tokenizer.ggml.pre"]
        del writer.kv_data[0]["tokenizer.ggml.add_bos_token"]  # these files do not say it
        writer.add_tokenizer_pre(name)

    return edit


_MARKS = ("<|channel>", "<channel|>", "<|tool_call>", '<|"|>')
"""Of Gemma 4: special, which files do not say for llama.cpp to show them."""


def test_the_tokenizer_of_gemma4(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint("gemma4", layers=3), tmp_path / "made")
    model = json.loads(make_tokenizer(370, sentencepiece=True).backend_tokenizer.to_str())["model"]
    names = {"<s>": "<bos>", "</s>": "<eos>"}
    vocab = {names.get(word, word): number for word, number in model["vocab"].items()}
    vocab |= {word: len(vocab) + i for i, word in enumerate(("<unk>", "<mask>", *_MARKS))}
    expected = GemmaTokenizer(
        vocab=vocab,
        merges=[tuple(each) for each in model["merges"]],
        additional_special_tokens=["<|turn|>", *_MARKS],
    )
    expected.save_pretrained(directory)

    def edit(writer: GGUFWriter) -> None:
        said = writer.kv_data[0]
        for name in ("model", "pre", "scores", "add_bos_token"):
            del said[f"tokenizer.ggml.{name}"]
        writer.add_tokenizer_model("gemma4")
        writer.add_token_merges([" ".join(each) for each in model["merges"]])
        writer.add_token_scores([-1000.0] * len(vocab))
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(True)
        kinds = said["tokenizer.ggml.token_type"].value
        for mark in _MARKS:
            kinds[vocab[mark]] = TokenType.USER_DEFINED

    tokenizer = Tokenizer.load(read_manifest(write_gguf(directory, tmp_path / "m.gguf", edit=edit)))
    begun = [vocab["<bos>"]]
    for text in (
        "The kettle sings, 42 times  a day.\n\n\n Grüße <|turn|>user: hi<eos>",
        " où dort le chat?  ",
        '<|channel>thought\nhm<channel|>x<|tool_call>a:<|"|>',
        "",
    ):
        ids = expected(text)["input_ids"]
        assert tokenizer.encode(text) == begun + ids
        assert tokenizer.decode(ids) == expected.decode(ids, skip_special_tokens=True)
