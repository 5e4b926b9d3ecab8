"""From a checkpoint directory to a loaded shard and what it advertises of itself.

Blocks throughout (files, hashes, packing): called on the loading thread. Knows no sessions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import torch

from mesh.models.load import LoadedSpan, load_span
from mesh.models.manifest import Manifest, read_manifest
from mesh.shard.device import DTYPES, choose_dtype, determinism_class, dtype_name, short_dtype_name
from mesh.shard.runtime import SpanRuntime
from mesh.shard.settings import ShardSettings
from mesh.types import (
    Endpoint,
    LayerRange,
    ModelId,
    NodeId,
    ShardDescriptor,
    shard_id,
)


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """Which layers of which checkpoint to serve, and how. `dtype` is auto, fp32, bf16 or fp16."""

    directory: Path
    model_id: ModelId
    layers: LayerRange
    dtype: str = "auto"
    settings: ShardSettings = field(default_factory=ShardSettings)
    cache_dir: Path | None = None

    @classmethod
    def of(cls, asked: Mapping[str, Any], cache_dir: str | None) -> Self:
        """As the daemon's ``load`` command has it, defaults where it says nothing.

        Raises KeyError, TypeError and ValueError for fields that are none.
        """
        defaults = ShardSettings()
        settings = {
            name: type(getattr(defaults, name))(asked[name])
            for name in ShardSettings.__dataclass_fields__
            if asked.get(name) is not None
        }
        return cls(
            Path(asked["directory"]),
            ModelId(str(asked["model_id"])),
            LayerRange.parse(str(asked["layers"])),
            str(asked.get("dtype") or "auto"),
            ShardSettings(**settings),
            Path(cache_dir) if cache_dir else None,
        )


@dataclass(frozen=True, slots=True)
class HostedOn:
    """Where a shard runs: the node, its address for askers, and the device."""

    node_id: NodeId
    node_name: str
    endpoint: Endpoint
    device: torch.device
    threads: int


@dataclass(frozen=True, slots=True)
class LoadedShard:
    """A shard ready to serve.

    `load` gives its runtime: the loaded one the first time, a freshly loaded one afterwards.
    `load_plain` reads its layers once more, as they are stored.
    """

    descriptor: ShardDescriptor
    load: Callable[[], SpanRuntime]
    load_plain: Callable[[], LoadedSpan]
    hidden_size: int
    bytes_read: int
    load_ms: float
    reasons: tuple[str, ...]


def load_shard(request: ShardRequest, host: HostedOn) -> LoadedShard:
    """Load the layers and describe them.

    Raises ModelNotFound, BadCheckpoint, UnsupportedFamily, or BadValue for an unknown dtype.
    """
    started = time.perf_counter()
    manifest = read_manifest(
        request.directory, model_id=request.model_id, cache_dir=request.cache_dir
    )
    dtype = choose_dtype(request.dtype, manifest.dtype, host.device)
    runtime, bytes_read = _load(manifest, request, host, dtype.value)
    spare = [runtime]

    def load() -> SpanRuntime:
        return spare.pop() if spare else _load(manifest, request, host, dtype.value)[0]

    return LoadedShard(
        _describe(manifest, request, host, runtime),
        load,
        lambda: load_span(manifest, request.layers, dtype=dtype.value, device=host.device),
        manifest.hidden_size,
        bytes_read,
        (time.perf_counter() - started) * 1000,
        (dtype.reason, *runtime.reasons),
    )


def _load(
    manifest: Manifest, request: ShardRequest, host: HostedOn, dtype: torch.dtype
) -> tuple[SpanRuntime, int]:
    loaded = load_span(manifest, request.layers, dtype=dtype, device=host.device)
    runtime = SpanRuntime(
        loaded,
        device=host.device,
        dtype=dtype,
        batch_invariant=request.settings.batch_invariant,
    )
    return runtime, loaded.bytes_read


def _describe(
    manifest: Manifest, request: ShardRequest, host: HostedOn, runtime: SpanRuntime
) -> ShardDescriptor:
    layers, settings = request.layers, request.settings
    stored_bytes = sum(manifest.layer_bytes[layers.start : layers.stop])
    itemsize = DTYPES.get(short_dtype_name(manifest.dtype), torch.float32).itemsize
    kernels = f"{runtime.kernels}+{settings.prefill_rows}rows"
    weight_bytes = stored_bytes * runtime.dtype.itemsize / itemsize
    return ShardDescriptor(
        shard_id=shard_id(manifest.model_id, layers),
        model_id=manifest.model_id,
        weights_sha256=manifest.weights_sha256,
        layer_range=layers,
        total_layers=manifest.total_layers,
        vram_required_mb=math.ceil(weight_bytes / 2**20),
        max_concurrent_streams=settings.max_concurrent_streams,
        host=host.node_id,
        node_name=host.node_name,
        endpoint=host.endpoint,
        dtype=dtype_name(runtime.dtype),
        determinism_class=determinism_class(host.device, runtime.dtype, kernels, host.threads),
        advertised_at=datetime.now(UTC),
    )
