"""How configs are cut, and what is refused with which reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from mesh.errors import BadCheckpoint, UnsupportedFamily
from mesh.models.families import cut_config, family_of, family_of_config
from mesh.models.load import load_ends, load_span
from mesh.models.manifest import read_manifest
from mesh.types import LayerRange
from tests.models.chain import CPU, prompt_chunks, run_parts, run_whole
from tests.models.conftest import Checkpoint


def _with_config(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with fields of its config changed."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


def _hollow(directory: Path, config: Any, prefix: str) -> Path:
    """A checkpoint of `config` with the least that a manifest asks for."""
    directory.mkdir()
    config.save_pretrained(directory)
    total = config.get_text_config(decoder=True).num_hidden_layers
    weights = {f"{prefix}{layer}.w": torch.zeros(2) for layer in range(total)}
    weights["model.embed_tokens.weight"] = torch.zeros(4, 2)
    save_file(weights, directory / "model.safetensors")
    return directory


REFUSED = {
    "llama": (
        transformers.LlamaConfig(num_kv_shared_layers=2),
        "last 2 layers share the keys and values",
    ),
    "qwen4_exp": (
        transformers.Qwen4ExpTextConfig(num_hidden_layers=2),
        "several streams of hidden states",
    ),
    "embeddings": (
        transformers.Gemma3TextConfig(num_hidden_layers=2, use_bidirectional_attention=True),
        "attention looks ahead",
    ),
    "rwkv": (transformers.RwkvConfig(num_hidden_layers=2), "running state"),
    "zamba2": (transformers.Zamba2Config(), "share one block"),
    "t5": (transformers.T5Config(num_layers=2), "encoder-decoder"),
    "vit": (transformers.ViTConfig(num_hidden_layers=2), "not a causal language model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    config, reason = REFUSED[name]
    manifest = read_manifest(_hollow(tmp_path / name, config, "model.layers."))
    with pytest.raises(UnsupportedFamily, match=reason) as caught:
        load_span(manifest, LayerRange(0, 1), dtype=torch.float32, device=CPU)
    assert caught.value.code == "bad_request"
    assert "qwen3" in caught.value.fix
    with pytest.raises(UnsupportedFamily, match=reason):
        load_ends(manifest, dtype=torch.float32, device=CPU)


def test_unknown_model_type_and_its_own_code_are_refused(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = _with_config(
        checkpoint("llama", layers=3),
        tmp_path / "unknown",
        model_type="homebrew",
        auto_map={"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil"},
    )
    (directory / "evil.py").write_text("raise SystemExit('code of the checkpoint was run')\n")
    with pytest.raises(UnsupportedFamily, match="homebrew") as caught:
        family_of(read_manifest(directory))
    assert "qwen3" in caught.value.fix  # a newer transformers would not know it either


def test_a_model_type_of_a_newer_transformers_says_so(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    told = {"model_type": "tomorrow", "transformers_version": "999.1.0.dev0"}
    directory = _with_config(checkpoint("llama", layers=3), tmp_path / "newer", **told)
    with pytest.raises(UnsupportedFamily, match="does not know it") as caught:
        family_of(read_manifest(directory))
    assert f"999.1.0.dev0 wrote it, and this node has {transformers.__version__}" in (
        caught.value.fix
    )


def test_known_model_type_does_not_run_code_of_the_checkpoint(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = _with_config(
        checkpoint("llama", layers=3),
        tmp_path / "mapped",
        auto_map={"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil"},
    )
    (directory / "evil.py").write_text("raise SystemExit('code of the checkpoint was run')\n")
    assert family_of(read_manifest(directory)).model_type == "llama"


_INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}
_FLOAT4 = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}


@pytest.mark.parametrize(
    ("method", "said", "reason"),
    [
        ("bitsandbytes", {"load_in_4bit": True}, "which is not read"),
        ("awq", {"bits": 4, "version": "gemv"}, "packed for gemv"),
        ("gptq", {"bits": 3}, "in 3 bits"),
        ("gptq", {"bits": 4, "checkpoint_format": "marlin"}, "the form marlin"),
        ("gptq", {"bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}}, "rules of their own"),
        ("fp8", {"fmt": "e5m2"}, "a kind of fp8"),
        ("fp8", {"weight_block_size": [0, 128]}, "blocks of 0"),
        ("compressed-tensors", {}, "the form None"),
        (
            "compressed-tensors",
            {"format": "nvfp4-pack-quantized", "config_groups": {"g": {"weights": _FLOAT4}}},
            "the form nvfp4",
        ),
        (
            "compressed-tensors",
            {
                "format": "pack-quantized",
                "config_groups": {"g": {"weights": _INT4}},
                "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}},
            },
            "transform_config",
        ),
        (
            "compressed-tensors",
            {
                "format": "pack-quantized",
                "config_groups": {
                    "some": {"weights": _INT4},
                    "others": {"weights": _INT4 | {"num_bits": 8}},
                },
            },
            "several kinds of groups",
        ),
    ],
)
def test_quantised_checkpoint_is_refused(
    method: str, said: dict[str, Any], reason: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = _with_config(
        checkpoint("llama", layers=3),
        tmp_path / "quantised",
        quantization_config={"quant_method": method} | said,
    )
    with pytest.raises(UnsupportedFamily, match=rf"quantised \({method}\).*{reason}.*GGUF"):
        read_manifest(directory)


def test_attention_scaled_by_the_index_of_the_layer_is_exact(checkpoint: Checkpoint) -> None:
    directory = checkpoint("gpt2", layers=3, scale_attn_by_inverse_layer_idx=True)
    chunks = prompt_chunks((20, 5))
    expected, ids = run_whole(directory, chunks, 4)
    logits, got = run_parts(read_manifest(directory), [0, 1, 2, 3], chunks, 4)
    assert got == ids
    torch.testing.assert_close(logits[-1], expected[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [{"num_attention_heads": 5}, {"hidden_size": None}, {"text_config": {"num_hidden_layers": 3}}],
)
def test_config_that_its_own_class_refuses_is_a_bad_checkpoint(
    changes: dict[str, Any], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = _with_config(checkpoint("llama", layers=3), tmp_path / "odd", **changes)
    with pytest.raises(BadCheckpoint, match="describes no model"):
        family_of(read_manifest(directory))


def test_per_layer_lists_are_cut_and_the_whole_config_stays() -> None:
    config = transformers.Gemma3TextConfig(num_hidden_layers=8, sliding_window=64)
    kinds = list(config.layer_types)
    family = family_of_config(config)
    span = family.slice_config(LayerRange(3, 7))
    assert span.num_hidden_layers == 4
    assert span.layer_types == kinds[3:7]
    assert (config.num_hidden_layers, config.layer_types) == (8, kinds)


def test_what_is_as_long_as_there_are_layers_and_says_nothing_of_them_is_not_cut() -> None:
    config = transformers.LlamaConfig(num_hidden_layers=3, eos_token_id=[7, 8, 9])
    span = family_of_config(config).slice_config(LayerRange(1, 2))
    assert span.eos_token_id == [7, 8, 9]
    limits = transformers.FalconH1Config(num_hidden_layers=2, time_step_limit=(0.0, 1.0))
    assert cut_config(limits, LayerRange(0, 1)).time_step_limit == (0.0, 1.0)


def test_fields_that_some_layers_have_otherwise_stay_with_them() -> None:
    config = transformers.Gemma4TextConfig(num_hidden_layers=8, sliding_window=64)
    kinds = list(config.layer_types)
    assert kinds[5] == kinds[7] == "full_attention"
    span = family_of_config(config).slice_config(LayerRange(4, 7))
    widths = [layer.head_dim for layer in span.per_layer_config]
    assert widths == [256, 512, 256]
    assert [layer.head_dim for layer in config.per_layer_config][4:7] == widths


def test_dense_layers_of_a_mixture_keep_their_place(checkpoint: Checkpoint) -> None:
    directory = checkpoint("qwen3_moe", layers=8, decoder_sparse_step=2, mlp_only_layers=[3])
    span = load_span(
        read_manifest(directory), LayerRange(2, 6), dtype=torch.float32, device=CPU
    ).module
    # Sparse are 1, 5 and 7 (3 is excepted), so of 2..5 only the last.
    assert [hasattr(layer.mlp, "experts") for layer in span.layers] == [False, False, False, True]
    assert [layer.self_attn.layer_idx for layer in span.layers] == [0, 1, 2, 3]
