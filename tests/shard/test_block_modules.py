"""Layers that torch computes in 4 bit by their own modules: those that no graph is built for, and
that are no lean ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from mesh.deployments.shape import shape_of
from mesh.errors import UnsupportedFamily
from mesh.models.families import family_of_config
from mesh.models.load import LoadedSpan, load_span
from mesh.models.manifest import Manifest, read_manifest
from mesh.models.standard import goes_by_torch, has_other_layers
from mesh.shard import int4
from mesh.shard.block_modules import rounded_modules
from mesh.shard.commands import ShardRequest
from mesh.shard.compiled.parts import NotCompilable
from mesh.shard.compiled.proof import require_compilable
from mesh.shard.load_plan import LoadPlan, plan_shard
from mesh.shard.loading import LoadedShard, load_shard
from mesh.shard.runtime import Runtime
from mesh.shard.taps.borrowing import sharing
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import LayerRange
from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf
from tests.shard.spans import CPU, checkpoint, relative_error, step
from tests.shard.test_int4 import HOST

FAMILIES = {
    "gemma3n": 6, "deepseek_v32": 2, "mimo_v2_flash": 2, "olmo_hybrid": 6, "falcon_h1": 2,
    "llama4_text": 2,
}  # fmt: skip
"""And how many layers are looked at: behind many mixtures most rows went to another expert."""


def plan(
    manifest: Manifest, layers: int, quant: str = "int4", cache_dir: Path | None = None
) -> LoadPlan:
    request = ShardRequest(
        manifest.path, manifest.model_id, LayerRange(0, layers), quant=quant, cache_dir=cache_dir
    )
    return plan_shard(request, HOST)


def rows(runtime: Runtime, count: int) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(0)
    return torch.randn(1, count, runtime.row_size, generator=seeded)


def outputs(runtime: Runtime) -> torch.Tensor:
    """A prompt in two pieces, a rollback, steps."""
    given, cache = rows(runtime, 60), runtime.new_cache(128)
    parts = ((0, 40), (40, 57), (50, 57), (57, 58), (58, 59), (59, 60))
    return torch.cat([step(runtime, cache, a, given[:, a:b]) for a, b in parts], 1)


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def in_blocks(manifest: Manifest, layers: int) -> LoadedSpan:
    """The same codes, each matrix made dense whenever it multiplies."""
    whole = LayerRange(0, layers)
    loaded = load_span(manifest, whole, dtype=torch.float32, device=CPU, defer=True)
    return rounded_modules(loaded, manifest.weights_sha256, None)


def require_in_4_bit(shard: LoadedShard, manifest: Manifest, layers: int) -> TorchRuntime:
    runtime = shard.load()
    assert shard.descriptor.dtype == "int4"
    assert isinstance(runtime, TorchRuntime)
    assert not runtime.is_lean
    assert runtime.kernels.startswith(int4.KERNELS)
    reference = TorchRuntime(in_blocks(manifest, layers), device=CPU, dtype=torch.float32)
    assert off(outputs(runtime), outputs(reference)) < 0.05
    return runtime


@pytest.mark.parametrize(("family", "layers"), FAMILIES.items())
def test_layers_that_no_graph_is_built_for_are_computed_in_4_bit_by_their_modules(
    family: str, layers: int, tmp_path: Path
) -> None:
    manifest = checkpoint(family, 6)
    planned = plan(manifest, layers, cache_dir=tmp_path)
    shard = load_shard(planned)
    runtime = require_in_4_bit(shard, manifest, layers)
    assert runtime.weight_bytes <= planned.need.weights_mb << 20
    assert "layers by modules: no graph is built for them" in shard.reasons
    assert shape_of(manifest, 64).quants == ("none", "int4")
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("int4/*.safetensors")}
    assert len(kept) == layers
    again = load_shard(plan(manifest, layers, cache_dir=tmp_path)).load()
    assert torch.equal(outputs(again), outputs(runtime))
    assert {file: file.stat().st_mtime_ns for file in kept} == kept


def test_what_a_file_has_in_4_bit_is_computed_as_it_is_stored(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "falcon_h1", layers=2)
    manifest = read_manifest(write_gguf(directory, tmp_path / "model.gguf", "Q4_0"))
    shard = load_shard(plan(manifest, 2, "auto"))
    runtime = require_in_4_bit(shard, manifest, 2)
    decoded = load_span(manifest, LayerRange(0, 2), dtype=torch.float32, device=CPU)
    as_stored = TorchRuntime(decoded, device=CPU, dtype=torch.float32)
    assert off(outputs(runtime), outputs(as_stored)) < 0.05


def test_jobs_share_the_weights_and_may_differentiate() -> None:
    manifest = checkpoint("gemma3n", 6)
    runtime = load_shard(plan(manifest, 6)).load()
    assert isinstance(runtime, TorchRuntime)
    shared = sharing(runtime.loaded)
    assert shared is not None
    given = rows(runtime, 5).requires_grad_()
    shared.module(inputs_embeds=given, use_cache=False).last_hidden_state.sum().backward()
    reference, again = in_blocks(manifest, 6).module, rows(runtime, 5).requires_grad_()
    reference(inputs_embeds=again, use_cache=False).last_hidden_state.sum().backward()
    assert given.grad is not None
    assert again.grad is not None
    assert relative_error(given.grad, again.grad) < 1e-4


def test_experts_in_another_form_than_others_have_them_are_refused() -> None:
    manifest = checkpoint("jetmoe", 6)
    with pytest.raises(UnsupportedFamily, match="in no linear layers, nor in experts") as caught:
        plan(manifest, 2)
    assert "(--quant none)" in caught.value.fix
    assert shape_of(manifest, 64).quants == ("none",)


@pytest.mark.parametrize(
    ("family", "more"),
    [("gptj", {}), ("mpt", {}), ("falcon", {"new_decoder_architecture": True})],
)
def test_plans_know_for_whose_layers_no_graph_is_built(family: str, more: dict[str, bool]) -> None:
    config = AutoConfig.for_model(family, **more)
    assert has_other_layers(config.to_dict())
    assert goes_by_torch(config.to_dict(), family)
    with pytest.raises(NotCompilable):
        require_compilable(family_of_config(config), None, 64)
