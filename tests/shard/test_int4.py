"""Layers that torch computes in 4 bit on a CPU: mixtures that are not compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mesh.deployments.shape import shape_of
from mesh.errors import UnsupportedFamily
from mesh.models.load import LoadedSpan, load_span
from mesh.models.manifest import read_manifest
from mesh.shard import int4
from mesh.shard.commands import ShardRequest
from mesh.shard.compiled.experts import ExpertMatrices, put_blocks
from mesh.shard.compiled.formats import BLOCK, quantise
from mesh.shard.compiled.store import quantised_span
from mesh.shard.load_plan import HostedOn, LoadPlan, plan_shard
from mesh.shard.loading import load_shard
from mesh.shard.runtime import Runtime
from mesh.shard.taps.borrowing import sharing
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import Endpoint, LayerRange, NodeId
from tests.checkpoints import WINDOW, make_checkpoint
from tests.gguf_files import write_gguf
from tests.shard.compiled.spans import added
from tests.shard.spans import CPU, checkpoint, relative_error, rows, step
from tests.shard.test_lean import BY_TORCH

HOST = HostedOn(NodeId("here"), "here", Endpoint("wss://127.0.0.1:1"), CPU, 1)
FEW = LayerRange(0, 2)
"""Behind many mixtures most rows have gone to another expert somewhere by a hair."""


def plan(family: str, quant: str = "int4", cache_dir: Path | None = None) -> LoadPlan:
    manifest = checkpoint(family)
    request = ShardRequest(manifest.path, manifest.model_id, FEW, quant=quant, cache_dir=cache_dir)
    return plan_shard(request, HOST)


def in_blocks(family: str) -> LoadedSpan:
    """The same codes, each matrix made dense whenever it multiplies."""
    loaded = load_span(checkpoint(family), FEW, dtype=torch.float32, device=CPU, defer=True)
    return quantised_span(loaded, "int4", checkpoint(family).weights_sha256, None).loaded


def outputs(runtime: Runtime) -> torch.Tensor:
    """A prompt that crosses the window, steps, and a rollback."""
    hidden, cache = rows(WINDOW + 26), runtime.new_cache(256)
    parts = [(0, 61), (61, 83), (70, 83), *((at, at + 1) for at in range(83, 90))]
    return torch.cat([step(runtime, cache, a, hidden[:, a:b])[:, -7:] for a, b in parts], 1)


@pytest.mark.parametrize("family", BY_TORCH)
def test_a_mixture_that_is_not_compiled_is_computed_in_4_bit_by_torch(
    family: str, tmp_path: Path
) -> None:
    planned = plan(family, cache_dir=tmp_path)
    mapped = load_span(checkpoint(family), FEW, dtype=torch.float32, device=CPU, defer=True)
    assert mapped.late, "its experts are read one layer after the other"
    shard = load_shard(planned)
    runtime = shard.load()
    assert shard.descriptor.dtype == "int4"
    assert isinstance(runtime, TorchRuntime)
    assert runtime.is_lean
    assert runtime.kernels.startswith(f"{int4.KERNELS}+lean")
    assert runtime.weight_bytes <= planned.need.weights_mb << 20
    hidden = rows(WINDOW + 26)
    before = torch.cat(
        [hidden[:, a:b][:, -7:] for a, b in ((0, 61), (61, 83), (70, 83), (83, 90))], 1
    )
    reference = TorchRuntime(in_blocks(family), device=CPU, dtype=torch.float32)
    assert added(outputs(runtime), outputs(reference), before) < 0.02


def test_a_row_has_the_bits_that_it_has_alone_and_plans_count_what_it_takes(tmp_path: Path) -> None:
    shard = load_shard(plan("gemma4", cache_dir=tmp_path))
    runtime, hidden = shard.load(), rows(48)
    assert any("the same bits" in reason for reason in shard.reasons)
    assert "dtype fp32: what is computed beside products in 4 bit" in shard.reasons
    found = []
    for size in (1, 7, 16):
        cache = runtime.new_cache(64)
        parts = torch.split(hidden, size, 1)
        starts = range(0, 48, size)
        found.append(
            torch.cat([step(runtime, cache, at, p) for at, p in zip(starts, parts, strict=True)], 1)
        )
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    shape = shape_of(checkpoint("gemma4"), 64)
    assert shape.quants == ("none", "int4")
    assert int4.BYTES_PER_WEIGHT <= shape.weight_size("int4") <= 1.05 * int4.BYTES_PER_WEIGHT


def test_what_was_rounded_once_is_found_again(tmp_path: Path) -> None:
    before = outputs(load_shard(plan("gemma4", cache_dir=tmp_path)).load())
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("int4/*.safetensors")}
    assert len(kept) == len(FEW)
    assert torch.equal(outputs(load_shard(plan("gemma4", cache_dir=tmp_path)).load()), before)
    assert {file: file.stat().st_mtime_ns for file in kept} == kept


def test_jobs_share_the_weights_and_may_differentiate(tmp_path: Path) -> None:
    runtime = load_shard(plan("gemma4", cache_dir=tmp_path)).load()
    shared = sharing(runtime.loaded)
    assert shared is not None
    own = {tensor.data_ptr() for tensor in runtime.loaded.module.buffers()}
    assert {tensor.data_ptr() for tensor in shared.module.buffers()} <= own
    x = rows(5).requires_grad_()
    found = shared.module(inputs_embeds=x, use_cache=False).last_hidden_state
    found.sum().backward()
    again = rows(5).requires_grad_()
    blocks = in_blocks("gemma4").module
    blocks(inputs_embeds=again, use_cache=False).last_hidden_state.sum().backward()
    assert x.grad is not None
    assert again.grad is not None
    assert relative_error(x.grad, again.grad) < 1e-4


@pytest.mark.parametrize("rows_out", [16, 48])
def test_a_layer_shows_the_weight_that_its_codes_stand_for(rows_out: int) -> None:
    matrix = quantise(torch.randn(rows_out, 4 * BLOCK), "int4")
    layer = int4.Int4Linear(matrix, torch.randn(rows_out), CPU, lambda: matrix)
    asked = int4.Int4Linear(matrix, torch.randn(rows_out), CPU)
    assert torch.equal(layer.weight, matrix.dense())
    assert relative_error(asked.weight.float(), matrix.dense()) < 0.01


def test_a_matrix_that_no_kernel_takes_is_computed_all_the_same() -> None:
    owner = torch.nn.Module()
    weight = torch.randn(3, 24, 48)
    owner.config = type("Config", (), {})()
    owner.is_transposed = owner.is_concatenated = False
    for name in ("gate_up_proj", "down_proj"):
        setattr(owner, name, torch.nn.Parameter(weight, requires_grad=False))
        put_blocks(ExpertMatrices(owner, name, lambda: None), quantise(weight.view(72, 48), "int4"))
    assert int4.to_device(owner, CPU, torch.float32) == 0
    x = torch.randn(2, 48)
    expected = x @ quantise(weight[1], "int4").dense().t()
    assert relative_error(owner.down_proj.product(1, x), expected) < 1e-5


def test_eight_bits_are_refused_with_what_to_ask_for_instead() -> None:
    with pytest.raises(UnsupportedFamily, match="cannot be served in int8") as caught:
        plan("gemma4", "int8")
    assert "--quant int4" in caught.value.fix
    assert plan("gemma4", "auto").quant.value is None


def test_what_is_faster_is_said_only_of_what_there_is() -> None:
    said = dict.fromkeys(("gemma4", "falcon_h1"), "int4 is faster")
    said |= {"llama": "int8 is faster", "jetmoe": "has them"}
    for family, ending in said.items():
        reason = plan(family, "none").quant.reason
        assert ending in reason
        assert ("faster" in reason) == ("faster" in ending)


@pytest.mark.parametrize(("kind", "quant"), [("Q4_0", "int4"), ("Q8_0", None)])
def test_auto_is_4_bit_for_a_file_that_is_stored_so(
    kind: str, quant: str | None, tmp_path: Path
) -> None:
    made = make_checkpoint(tmp_path / "made", "gemma4", layers=2)
    manifest = read_manifest(write_gguf(made, tmp_path / "model.gguf", kind))
    request = ShardRequest(manifest.path, manifest.model_id, FEW, quant="auto")
    planned = plan_shard(request, HOST)
    assert planned.quant.value == quant
    assert planned.ends.manifest.is_int4 is (quant == "int4")
    assert shape_of(manifest, 64).is_int4 is (quant == "int4")
