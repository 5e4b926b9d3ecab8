"""From a checkpoint directory to a loaded shard and what it advertises of itself.

Blocks throughout (files, hashes, packing): called on the loading thread. Knows no sessions.

A `HeldShard` is one shard of the shard process, whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from mesh.models.load import LoadedSpan, load_span
from mesh.models.manifest import Manifest, read_manifest
from mesh.models.progress import Progress
from mesh.shard.commands import ShardRequest
from mesh.shard.device import Choice, choose_dtype, determinism_class, dtype_name
from mesh.shard.footprint import estimate
from mesh.shard.runtime import SpanRuntime
from mesh.types import (
    Endpoint,
    NodeId,
    ShardDescriptor,
    ShardId,
    ShardMemory,
)

if TYPE_CHECKING:
    import torch
if TYPE_CHECKING:
    from mesh.shard.server import ShardServer
    from mesh.shard.taps.server import TapServer


@dataclass(frozen=True, slots=True)
class HeldShard:
    """A `mesh.shard.room.Occupant`; `need` is what it was let in for."""

    server: ShardServer
    taps: TapServer
    need: ShardMemory

    @property
    def idle_s(self) -> float | None:
        """For how long nobody has used its weights; None while somebody does, or there are none."""
        return None if self.taps.sessions else self.server.idle_s

    @property
    def promised_mb(self) -> int:
        """What its caches may still take, beyond what they have."""
        load = self.server.load_now()
        return max(0, self.need.caches_mb - math.ceil(load.kv_mb)) if load.loaded else 0

    @property
    def memory(self) -> ShardMemory:
        """What it takes now."""
        load = self.server.load_now()
        return ShardMemory(
            math.ceil(load.weights_mb + self.taps.weights_mb),
            math.ceil(load.kv_mb),
            self.need.headroom_mb if load.loaded else 0,
        )

    async def evict(self) -> None:
        """Free its weights."""
        self.taps.evict()
        await self.server.evict()


@dataclass(frozen=True, slots=True)
class HostedOn:
    """Where a shard runs: the node, its address for askers, and the device."""

    node_id: NodeId
    node_name: str
    endpoint: Endpoint
    device: torch.device
    threads: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a load will do, known before it is done: `need` is what it takes of the device."""

    manifest: Manifest
    request: ShardRequest
    host: HostedOn
    dtype: Choice[torch.dtype]
    need: ShardMemory
    progress: Progress = field(default_factory=Progress, compare=False)

    @property
    def shard_id(self) -> ShardId:
        """Of the shard that it gives."""
        return self.request.shard_id

    @property
    def plain_need(self) -> ShardMemory:
        """What its weights take once more, in the form in which interventions show them."""
        return ShardMemory(weights_mb=self.need.weights_mb)


@dataclass(frozen=True, slots=True)
class LoadedShard:
    """A shard ready to serve.

    `load` gives its runtime: the loaded one the first time, while `is_spare`, a freshly loaded one
    afterwards. `load_plain` reads its layers once more, as they are stored.
    """

    descriptor: ShardDescriptor
    load: Callable[[], SpanRuntime]
    is_spare: Callable[[], bool]
    load_plain: Callable[[], LoadedSpan]
    hidden_size: int
    bytes_read: int
    load_ms: float
    reasons: tuple[str, ...]


def plan_shard(request: ShardRequest, host: HostedOn) -> LoadPlan:
    """Read the checkpoint's headers, and its hashes where nobody did before.

    Raises ModelNotFound, BadCheckpoint, or BadValue for an unknown dtype.
    """
    manifest = read_manifest(
        request.directory, model_id=request.model_id, cache_dir=request.cache_dir
    )
    manifest.layer_tensors(request.layers)  # refuses layers that it does not have
    dtype = choose_dtype(request.dtype, manifest.dtype, host.device)
    settings = request.settings
    need = estimate(
        manifest,
        request.layers,
        dtype.value.itemsize,
        kv_tokens=settings.kv_tokens,
        rows=settings.prefill_rows,
    )
    return LoadPlan(manifest, request, host, dtype, need)


def load_shard(plan: LoadPlan) -> LoadedShard:
    """Load the layers and describe them. Raises BadCheckpoint, UnsupportedFamily."""
    started = time.perf_counter()
    manifest, layers, dtype = plan.manifest, plan.request.layers, plan.dtype.value
    runtime, bytes_read = _load(plan)
    spare = [runtime]

    def load() -> SpanRuntime:
        return spare.pop() if spare else _load(plan)[0]

    return LoadedShard(
        _describe(plan, runtime),
        load,
        lambda: bool(spare),
        lambda: load_span(manifest, layers, dtype=dtype, device=plan.host.device),
        manifest.hidden_size,
        bytes_read,
        (time.perf_counter() - started) * 1000,
        (plan.dtype.reason, *runtime.reasons),
    )


def _load(plan: LoadPlan) -> tuple[SpanRuntime, int]:
    device, dtype = plan.host.device, plan.dtype.value
    progress = plan.progress
    loaded = load_span(
        plan.manifest, plan.request.layers, dtype=dtype, device=device, progress=progress
    )
    invariant = plan.request.settings.batch_invariant
    runtime = SpanRuntime(
        loaded, device=device, dtype=dtype, batch_invariant=invariant, progress=progress
    )
    return runtime, loaded.bytes_read


def _describe(plan: LoadPlan, runtime: SpanRuntime) -> ShardDescriptor:
    manifest, host, settings = plan.manifest, plan.host, plan.request.settings
    kernels = f"{runtime.kernels}+{settings.prefill_rows}rows"
    taken = replace(plan.need, weights_mb=math.ceil(runtime.weight_bytes / 2**20))
    return ShardDescriptor(
        shard_id=plan.shard_id,
        model_id=manifest.model_id,
        weights_sha256=manifest.weights_sha256,
        layer_range=plan.request.layers,
        total_layers=manifest.total_layers,
        vram_required_mb=taken.total_mb,
        max_concurrent_streams=settings.max_concurrent_streams,
        host=host.node_id,
        node_name=host.node_name,
        endpoint=host.endpoint,
        dtype=dtype_name(runtime.dtype),
        determinism_class=determinism_class(host.device, runtime.dtype, kernels, host.threads),
        advertised_at=datetime.now(UTC),
    )
