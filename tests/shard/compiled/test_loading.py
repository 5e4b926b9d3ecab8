"""From a wish for few bits to a shard that serves them, or to the reason why not."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mesh.errors import BadCheckpoint, ContextTooLong, UnsupportedFamily, WeightsMissing
from mesh.models.families import family_of
from mesh.models.header import TensorEntry
from mesh.models.late_experts import stacks_in
from mesh.models.load import LoadedSpan, load_span
from mesh.models.partial_writer import PartialWriter
from mesh.models.rounded import sweep_rounded
from mesh.node.shards_as_seen import served_shard
from mesh.shard.commands import ShardRequest
from mesh.shard.compiled.formats import bytes_per_weight
from mesh.shard.compiled.runtime import CompiledRuntime
from mesh.shard.compiled.store import quantised_span
from mesh.shard.load_plan import HostedOn, LoadPlan, plan_shard
from mesh.shard.loading import load_shard
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import Endpoint, LayerRange, ModelId, NodeId
from tests.models.test_partial import empty_copy, put_all
from tests.shard.compiled.spans import EXPERTS
from tests.shard.spans import CPU, WHOLE, checkpoint

HERE = HostedOn(NodeId("n"), "here", Endpoint("wss://127.0.0.1:1"), CPU, 1)


def plan(quant: str, family: str = "llama", cache_dir: Path | None = None) -> LoadPlan:
    directory = checkpoint(family).directory
    request = ShardRequest(directory, ModelId("m"), WHOLE, quant=quant, cache_dir=cache_dir)
    return plan_shard(request, HERE)


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_a_shard_says_in_which_format_it_computes_and_why(quant: str, tmp_path: Path) -> None:
    planned = plan(quant, cache_dir=tmp_path)
    loaded = load_shard(planned)
    assert loaded.descriptor.dtype == quant
    assert f"+{quant}" in loaded.descriptor.determinism_class
    assert any("same bits in any chunk and batch" in reason for reason in loaded.reasons)
    runtime = loaded.load()
    assert isinstance(runtime, CompiledRuntime)
    assert runtime.dtype == torch.float32
    # Both by the same count, but for norms and biases, which stay as they are.
    unquantised = plan("none")
    assert planned.need.weights_mb <= unquantised.need.weights_mb
    assert runtime.weight_bytes < load_shard(unquantised).load().weight_bytes * (
        1.1 * bytes_per_weight(runtime.quant) / 4
    )


UNCOMPILED = {
    "falcon_h1": "it normalises by Identity",
    "gemma4": "it has experts beside its feed-forward",
}


@pytest.mark.parametrize("name", UNCOMPILED)
def test_auto_serves_unquantised_what_cannot_be_compiled(name: str) -> None:
    loaded = load_shard(plan("auto", name))
    family, why = family_of(checkpoint(name)).model_type, UNCOMPILED[name]
    assert isinstance(loaded.load(), TorchRuntime)
    assert loaded.descriptor.dtype == "fp32"
    assert served_shard(loaded.descriptor).loaded.quant == "auto"  # which is not none's fp32
    assert any(f"{family} is not compiled, {why}" in reason for reason in loaded.reasons)
    with pytest.raises(UnsupportedFamily, match=f"{family} cannot be served in int8: {why}"):
        plan("int8", name)


class Watched(dict[str, Mapping[str, TensorEntry]]):
    """What experts of a span are made of; nobody asks while others are in memory."""

    def __init__(self, loaded: LoadedSpan) -> None:
        super().__init__(loaded.late)
        self._experts = [loaded.module.get_submodule(path) for path in loaded.late]

    def __getitem__(self, path: str) -> Mapping[str, TensorEntry]:
        stacks = [getattr(each, name) for each in self._experts for name in stacks_in(each)]
        assert all(stack.is_meta for stack in stacks if isinstance(stack, torch.Tensor))
        return super().__getitem__(path)


PUT_TOGETHER = [family for family in (*EXPERTS, "mixtral") if family != "granitemoehybrid"]
"""Families that store each of a layer's experts by itself."""


@pytest.mark.parametrize("family", PUT_TOGETHER)
def test_experts_are_read_layer_by_layer_and_not_where_they_are_kept(
    family: str, tmp_path: Path
) -> None:
    manifest = checkpoint(family)

    def loaded() -> LoadedSpan:
        return load_span(manifest, WHOLE, dtype=torch.float32, device=CPU, defer=True)

    def runtime(span: LoadedSpan) -> CompiledRuntime:
        graphs = quantised_span(span, "int4", manifest.weights_sha256, tmp_path)
        return CompiledRuntime(graphs, threads=1, positions=64)

    span = loaded()
    first = runtime(replace(span, late=Watched(span)))
    assert span.late
    again = runtime(replace(loaded(), late={}))
    assert torch.equal(first.probe(1), again.probe(1))


def test_weights_that_are_freed_come_back_the_same(tmp_path: Path) -> None:
    loaded = load_shard(plan("int8", cache_dir=tmp_path))
    first, again = loaded.load(), loaded.load()
    assert isinstance(again, CompiledRuntime)
    assert first is not again
    for layer in range(WHOLE.start, WHOLE.stop):
        assert isinstance(first, CompiledRuntime)
        assert torch.equal(first.probe(layer), again.probe(layer))


@pytest.mark.parametrize("quant", ["int8", "none"])
def test_other_weights_that_came_into_their_place_are_not_served_as_those(
    quant: str, tmp_path: Path
) -> None:
    directory, cache = tmp_path / "toy", tmp_path / "cache"
    shutil.copytree(checkpoint().directory, directory)
    request = ShardRequest(directory, ModelId("m"), WHOLE, quant=quant, cache_dir=cache)
    loaded = load_shard(plan_shard(request, HERE))
    loaded.load()
    file = directory / "model.safetensors"
    before = file.read_bytes()
    file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    for each in cache.glob("quantised/**/*.safetensors"):
        each.unlink()
    for load in (loaded.load, loaded.load_plain, loaded.load_ends):
        with pytest.raises(BadCheckpoint, match="not those that were loaded before"):
            load()
    assert not list(cache.glob("quantised/**/*.safetensors"))
    file.write_bytes(before)
    loaded.load()


def test_what_is_not_there_any_more_is_not_served_as_zeros(tmp_path: Path) -> None:
    """As of a model that was removed and fetched again, other layers of it than before."""
    whole, layers = checkpoint(), LayerRange(0, 2)
    part = empty_copy(whole, tmp_path)
    with PartialWriter(part) as writer:
        put_all(writer, whole, [*whole.tensors])
    request = ShardRequest(part, ModelId("m"), layers, cache_dir=tmp_path / "cache")
    loaded = load_shard(plan_shard(request, HERE))
    loaded.load()
    shutil.rmtree(part)
    assert empty_copy(whole, tmp_path) == part
    for load in (loaded.load, loaded.load_plain, loaded.load_ends):
        with pytest.raises(WeightsMissing):
            load()


def test_what_was_rounded_of_a_checkpoint_goes_when_its_last_copy_has(tmp_path: Path) -> None:
    cache, copies = tmp_path / "cache", [tmp_path / "one", tmp_path / "two"]
    for copy in copies:
        shutil.copytree(checkpoint().directory, copy)
        request = ShardRequest(copy, ModelId("m"), WHOLE, quant="int8", cache_dir=cache)
        load_shard(plan_shard(request, HERE))
    load_shard(plan_shard(request, HERE)).load_ends()
    for copy in copies:
        sweep_rounded(cache)
        assert list(cache.glob("quantised/**/*.safetensors"))
        shutil.rmtree(copy)
    sweep_rounded(cache)
    assert not list(cache.glob("quantised/*"))


def test_a_session_is_as_long_as_the_caches_and_the_model_allow() -> None:
    planned = plan("int8")
    short = replace(planned.request, settings=replace(planned.request.settings, kv_tokens=32))
    cache = load_shard(plan_shard(short, HERE)).load().new_cache(4096)
    cache.reserve(32)
    with pytest.raises(ContextTooLong, match="at most 32"):
        cache.reserve(33)
