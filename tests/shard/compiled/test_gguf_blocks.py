"""Weights that a GGUF file has in blocks reach the graphs as they are, where the format allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from mesh.models.gguf.decoding import decode
from mesh.models.header import Difference, TensorEntry
from mesh.models.late_experts import stacks_in
from mesh.models.load import load_span
from mesh.models.manifest import read_manifest
from mesh.models.pages import Pages
from mesh.shard.compiled.formats import Quant, quantise
from mesh.shard.compiled.gguf_blocks import is_exact, matrix_of_blocks
from mesh.shard.compiled.runtime import CompiledRuntime
from mesh.shard.compiled.store import quantised_span
from mesh.shard.runtime import StepInput
from mesh.types import LayerRange
from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf

CPU = torch.device("cpu")
_ROWS, _COLUMNS = 12, 160
_EXACT: list[tuple[str, Quant]] = [
    ("Q8_0", "int8"), ("Q4_0", "int8"), ("Q5_0", "int8"), ("IQ4_NL", "int8"), ("Q4_0", "int4"),
]  # fmt: skip


def _entry(
    file: Path,
    kind: str,
    unlike: Difference | None = None,
    shape: tuple[int, int] = (_ROWS, _COLUMNS),
) -> TensorEntry:
    """Any bytes are blocks; of their scales the sign and the exponent are made harmless."""
    size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    count = shape[0] * shape[1] // 32
    blocks = np.random.default_rng(1).integers(0, 256, (count, size), np.uint8)
    for half in range(2 if kind == "Q4_1" else 1):
        blocks[:, 2 * half + 1] = blocks[:, 2 * half + 1] & 0x87 | 0x28
    file.write_bytes(bytes(64) + blocks.tobytes())
    if unlike is not None and unlike.kind == "transposed":
        shape = shape[::-1]
    return TensorEntry("w", file, kind, shape, 64, blocks.nbytes, unlike=unlike)


@pytest.mark.parametrize(("kind", "quant"), _EXACT)
@pytest.mark.parametrize(
    "unlike",
    [
        None, Difference("rotary_rows", 3), Difference("transposed"),
        Difference("value_rows", 2, 2, 4), Difference("value_columns", 2, 2, 32),
    ],
    ids=str,
)  # fmt: skip
def test_blocks_that_fit_stand_for_exactly_what_is_stored(
    kind: str, quant: Quant, unlike: Difference | None, tmp_path: Path
) -> None:
    entry = _entry(tmp_path / "blocks", kind, unlike)
    assert is_exact(kind, quant)
    dense = decode(Pages.of_file(entry.file), entry, torch.float32)
    if unlike is not None and unlike.kind == "transposed":
        dense = dense.t()
    matrix = matrix_of_blocks(entry, quant)
    assert torch.equal(matrix.dense(), dense)
    # To round what they stand for would not do: that is another matrix.
    if kind != "Q8_0":
        assert not torch.equal(quantise(dense, quant).dense(), dense)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_other_blocks_are_decoded_and_rounded(kind: str, tmp_path: Path) -> None:
    """Those of another type, and those whose columns a model has apart."""
    apart = Difference("value_columns", 5, 2) if kind == "Q8_0" else None
    entry = _entry(tmp_path / "blocks", kind, apart)
    dense = decode(Pages.of_file(entry.file), entry, torch.float32)
    for quant in ("int8", "int4"):
        assert apart or not is_exact(kind, quant)
        found = matrix_of_blocks(entry, quant)
        assert torch.equal(found.dense(), quantise(dense, quant).dense())


def test_what_is_decoded_and_rounded_in_parts_is_what_its_rows_are(tmp_path: Path) -> None:
    """Parts of 256 rows, of 32 and of 64; the last is shorter."""
    entry = _entry(tmp_path / "blocks", "Q4_1", shape=(270, 4096))
    stored = np.frombuffer(entry.file.read_bytes()[64:], np.uint8).reshape(270, -1)
    expected = gguf.quants.dequantize(stored, GGMLQuantizationType.Q4_1)
    dense = decode(Pages.of_file(entry.file), entry, torch.float32)
    assert torch.equal(dense, torch.from_numpy(expected))
    edges = [0, 31, 32, 63, 64, 255, 256, 269]
    for quant in ("int8", "int4"):
        of_rows = torch.cat([quantise(dense[row : row + 1], quant).dense() for row in edges])
        assert torch.equal(matrix_of_blocks(entry, quant).dense()[edges], of_rows)


_OF_32 = {"linear_num_value_heads": 6, "linear_value_head_dim": 32}
"""Heads for values of whole blocks."""
_LATENTS = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_group": 1,
    "first_k_dense_replace": 3,
}  # fmt: skip
_MIXED = {"decoder_sparse_step": 1, "mlp_only_layers": []}


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}), ("gpt2", {}), ("phi3", {}), ("gemma4_dense", {}), ("qwen3_5", _OF_32),
        ("qwen3_next", _OF_32 | _MIXED), ("deepseek_v3", _LATENTS), ("granitemoehybrid_dense", {}),
        ("nemotron_h_dense", {}), ("olmo", {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("kind", "quant"), [("Q8_0", "int8"), ("Q4_0", "int4"), ("Q4_1", "int4")])
def test_a_span_of_a_file_is_compiled(
    family: str, more: dict[str, Any], kind: str, quant: Quant, tmp_path: Path
) -> None:
    directory = make_checkpoint(tmp_path / family, family, layers=3, **more)
    manifest = read_manifest(write_gguf(directory, tmp_path / "model.gguf", kind))
    layers, cache = LayerRange(1, 3), tmp_path / "cache"
    plain = load_span(manifest, layers, dtype=torch.float32, device=CPU)
    for _ in range(2):  # made, and kept
        loaded = load_span(manifest, layers, dtype=torch.float32, device=CPU, defer=True)
        assert loaded.deferred
        assert {p.is_meta for n, p in loaded.module.named_parameters() if n in loaded.deferred} == {
            True
        }
        span = quantised_span(loaded, quant, manifest.weights_sha256, cache)
        assert not span.loaded.deferred
        hidden = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(3))
        runtime = CompiledRuntime(span, threads=1, positions=64)
        (found,) = runtime.forward([StepInput(runtime.new_cache(64), 0, hidden)])
        with torch.no_grad():
            expected = plain.module(inputs_embeds=hidden, use_cache=False).last_hidden_state
        error = float((found - expected).norm() / (expected - hidden).norm())
        # What Qwen3-Next has in one and its files in two is put together, and rounded once more.
        assert error < (0.04 if kind != "Q4_1" and family != "qwen3_next" else 0.3)
    for name, entry in loaded.deferred.items():
        module = span.loaded.module.get_submodule(name.removesuffix(".weight"))
        same = torch.equal(module.weight, plain.module.get_parameter(name))
        assert same == is_exact(entry.dtype, quant)


@pytest.mark.parametrize(
    ("family", "kind", "quant"),
    [
        ("qwen3_moe", "Q8_0", "int8"), ("qwen3_moe", "Q4_0", "int4"), ("qwen3_moe", "Q4_1", "int4"),
        ("glm4_moe", "Q8_0", "int8"), ("gemma4", "Q4_0", "int4"),
        ("granitemoehybrid", "Q4_0", "int4"), ("nemotron_h_latent", "Q4_0", "int4"),
    ],
)  # fmt: skip
def test_experts_in_blocks_that_fit_stay_exactly_what_they_are(
    family: str, kind: str, quant: Quant, tmp_path: Path
) -> None:
    sparse = {"decoder_sparse_step": 1, "mlp_only_layers": [], "first_k_dense_replace": 1}
    made = make_checkpoint(tmp_path / "made", family, layers=3, **sparse)
    manifest = read_manifest(write_gguf(made, tmp_path / "model.gguf", kind))
    every = LayerRange(0, 2)
    plain = load_span(manifest, every, dtype=torch.float32, device=CPU).module.layers[1]
    loaded = load_span(manifest, every, dtype=torch.float32, device=CPU, defer=True)
    found = quantised_span(loaded, quant, "0" * 64, None).loaded.module.layers[1]
    places = {"gemma4": "", "granitemoehybrid": "block_sparse_moe", "nemotron_h_latent": "mixer"}
    within = places.get(family, "mlp")
    plain, found = plain.get_submodule(within), found.get_submodule(within)
    for stack in stacks_in(plain.experts):
        for expert, dense in enumerate(getattr(plain.experts, stack)):
            same = dense if is_exact(kind, quant) else quantise(dense, quant).dense()
            assert torch.equal(getattr(found.experts, stack)[expert], same)
