"""In which form a shard holds unquantised weights, from the request to what it says of itself."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mesh.capacity import Device, Speed
from mesh.deployments.shape import shape_of
from mesh.routing.fitting import asking_bytes, benches, shard_bytes
from mesh.routing.machines import Demand, Machine
from mesh.shard.commands import ShardRequest
from mesh.shard.device import choose_dtype
from mesh.shard.linear import HALVED, halving_fails
from mesh.shard.load_plan import HostedOn, LoadPlan, plan_shard
from mesh.shard.loading import load_shard
from mesh.shard.runtime import StepInput
from mesh.shard.speed import float_formats
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import HALVED_FORMAT, Endpoint, ModelId, NodeId
from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf
from tests.shard.spans import CPU, WHOLE

HERE = HostedOn(NodeId("n"), "here", Endpoint("wss://127.0.0.1:1"), CPU, 1)

needs_halving = pytest.mark.skipif(
    halving_fails() is not None, reason="torch has no kernel that keeps fp16"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stored")
    return make_checkpoint(root / "fp16", "llama", layers=4, hidden=256, dtype="float16")


def plan(directory: Path, dtype: str) -> LoadPlan:
    return plan_shard(ShardRequest(directory, ModelId("m"), WHOLE, dtype=dtype), HERE)


@needs_halving
def test_weights_that_the_cpu_has_no_arithmetic_for_stay_in_16_bit(directory: Path) -> None:
    planned, wide = plan(directory, "auto"), plan(directory, "fp32")
    assert planned.is_halved
    assert planned.need.weights_mb < 0.7 * wide.need.weights_mb
    assert planned.plain_need.weights_mb >= wide.need.weights_mb
    loaded = load_shard(planned)
    runtime = loaded.load()
    assert isinstance(runtime, TorchRuntime)
    assert runtime.is_lean
    assert runtime.dtype == torch.float32
    assert math.ceil(runtime.weight_bytes / 2**20) <= planned.need.weights_mb
    assert loaded.descriptor.dtype == "fp32"
    assert f"/{HALVED}+lean+" in loaded.descriptor.determinism_class
    assert "layers lean: checked" in loaded.reasons
    kinds = {parameter.dtype for parameter in loaded.load_plain().module.parameters()}
    assert kinds == {torch.float32}


@needs_halving
@pytest.mark.parametrize("fast", [frozenset(), frozenset({"bf16"})], ids=["fp32", "bf16"])
def test_blocks_that_are_not_computed_in_few_bits_take_16_for_a_number(
    directory: Path, tmp_path: Path, fast: frozenset[str]
) -> None:
    """Whether the CPU has arithmetic for those or not."""
    file = write_gguf(directory, tmp_path / "blocks.gguf", "Q4_0")
    wide = plan(file, "fp32")
    planned = plan(file, "auto")
    planned = replace(planned, dtype=choose_dtype("auto", planned.manifest.dtype, CPU, fast))
    assert planned.dtype.value == (torch.bfloat16 if fast else torch.float32)
    assert planned.need.weights_mb <= 0.6 * wide.need.weights_mb
    runtime, exact = load_shard(planned).load(), load_shard(wide).load()
    assert math.ceil(runtime.weight_bytes / 2**20) <= planned.need.weights_mb
    row = torch.randn(1, 8, runtime.row_size, generator=torch.Generator().manual_seed(0))
    found, expected = (
        each.forward([StepInput(each.new_cache(16), 0, row.to(each.dtype))])[0].float() - row
        for each in (runtime, exact)
    )
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_what_is_asked_for_in_fp32_is_computed_by_the_modules(directory: Path) -> None:
    loaded = load_shard(plan(directory, "fp32"))
    runtime = loaded.load()
    assert isinstance(runtime, TorchRuntime)
    assert not runtime.is_lean
    assert "lean" not in loaded.descriptor.determinism_class
    assert not any("lean" in reason for reason in loaded.reasons)


def test_what_is_loaded_is_no_garbage_to_be_looked_for(directory: Path) -> None:
    gc.unfreeze()
    load_shard(plan(directory, "fp32"))
    assert gc.get_freeze_count() > 0


@needs_halving
def test_layers_that_are_not_standard_are_widened_and_it_is_said_why(tmp_path: Path) -> None:
    latents = make_checkpoint(tmp_path / "latents", "minicpm3", layers=4, dtype="float16")
    planned = plan(latents, "auto")
    assert not planned.is_halved
    loaded = load_shard(planned)
    assert loaded.load().dtype == torch.float32
    assert HALVED not in loaded.descriptor.determinism_class
    assert any("minicpm3 has no lean ones" in reason for reason in loaded.reasons)


@needs_halving
@pytest.mark.parametrize(
    ("family", "said"),
    [("qwen3_5", "keep a running state"), ("qwen3_moe", "is a mixture of experts")],
)
def test_running_states_and_experts_are_lean_but_on_a_card(
    tmp_path: Path, family: str, said: str
) -> None:
    stored = make_checkpoint(tmp_path / family, family, layers=4, dtype="float16")
    planned = plan(stored, "auto")
    assert planned.is_halved
    loaded = load_shard(planned)
    loaded.load()
    assert "+lean+" in loaded.descriptor.determinism_class
    assert any("layers lean: checked" in reason for reason in loaded.reasons)
    card = replace(HERE, device=torch.device("cuda"))
    there = plan_shard(planned.request, card).lean
    assert not there.value
    assert said in there.reason


@pytest.mark.parametrize(("family", "dtype", "format_"), [
    pytest.param("llama", "auto", HALVED_FORMAT, marks=needs_halving), ("llama", "fp32", "fp32"),
    ("llama", "fp16", "fp16"), ("minicpm3", "auto", "fp32"),
    pytest.param("qwen3_moe", "auto", HALVED_FORMAT, marks=needs_halving),
    pytest.param("granitemoehybrid_dense", "auto", HALVED_FORMAT, marks=needs_halving),
])  # fmt: skip
def test_a_plan_counts_what_the_shard_counts(
    tmp_path: Path, family: str, dtype: str, format_: str
) -> None:
    stored = make_checkpoint(tmp_path / family, family, layers=4, hidden=256, dtype="float16")
    planned = plan(stored, dtype)
    positions = planned.request.settings.kv_tokens
    model = shape_of(planned.manifest, positions)
    formats = float_formats(CPU, dtype)
    device = Device("cpu", 1 << 40, 1 << 40, tuple(Speed(each, 10.0, 50.0) for each in formats))
    (bench,) = benches(
        model, Machine(HERE.node_id, "here", (device,)), Demand(context=positions), "none"
    )
    assert bench.format == format_
    said, need = planned.need, bench.need(WHOLE)
    assert said.weights_mb - 1 < need.weights / 2**20 <= said.weights_mb
    assert said.caches_mb - 1 < need.caches / 2**20 <= said.caches_mb
    beside_mb = shard_bytes(model, WHOLE, format_, None, positions) / 2**20 - said.total_mb
    assert 0 <= beside_mb < 4
    assert need.total >> 20 >= said.total_mb
    ends_mb = asking_bytes(model, device, thin=False) / 2**20
    assert 0 <= ends_mb - planned.ends_need.total_mb < 4
    descriptor = load_shard(planned).descriptor
    assert descriptor.format == format_
    assert descriptor.dtype == planned.dtype.reason.split()[1].rstrip(":")
