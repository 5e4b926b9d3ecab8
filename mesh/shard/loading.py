"""From a checkpoint directory to a loaded shard and what it advertises of itself.

Blocks throughout (files, hashes, packing): called on the loading thread. Knows no sessions.

A `HeldShard` is one shard of the shard process, whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch

from mesh.errors import BadCheckpoint, ShardCorrupt
from mesh.models.load import LoadedSpan, load_span
from mesh.models.manifest import read_manifest
from mesh.models.rounded import note_place
from mesh.shard import int4
from mesh.shard.admission import LayerShape
from mesh.shard.block_modules import rounded_modules
from mesh.shard.compiled.formats import Quant
from mesh.shard.device import (
    determinism_class,
    dtype_name,
)
from mesh.shard.ends import LoadedEnds, load_computed
from mesh.shard.linear import HALVED
from mesh.shard.load_plan import LoadPlan, stored_dtype
from mesh.shard.memory import settle
from mesh.shard.runtime import StepInput
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import (
    ShardDescriptor,
    ShardMemory,
)

if TYPE_CHECKING:
    from mesh.shard.compiled.store import GraphSpan
    from mesh.shard.runtime import Runtime
    from mesh.shard.server import ShardServer
    from mesh.shard.taps.server import TapServer

_TEST_ROWS = 2


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
class LoadedShard:
    """A shard ready to serve.

    `load` gives its runtime: the loaded one the first time, while `is_spare`, a freshly loaded one
    afterwards. `load_plain` reads its layers once more, as they are stored; `load_ends` the model's
    ends, where its descriptor says that it runs them.
    """

    descriptor: ShardDescriptor
    load: Callable[[], Runtime]
    is_spare: Callable[[], bool]
    load_plain: Callable[[], LoadedSpan]
    load_ends: Callable[[], LoadedEnds]
    shape: LayerShape
    bytes_read: int
    load_ms: float
    reasons: tuple[str, ...]


def load_shard(plan: LoadPlan) -> LoadedShard:
    """Load the layers, test and describe them.

    Raises BadCheckpoint, UnsupportedFamily, DeviceFailed, ShardCorrupt.
    """
    started = time.perf_counter()
    runtime, bytes_read = _load(plan)
    _test(runtime)
    spare = [runtime]

    def load() -> Runtime:
        if spare:
            return spare.pop()
        return _load(_as_of_now(plan))[0]

    def load_plain() -> LoadedSpan:
        return _load_span(_as_of_now(plan), plan.dtype.value)

    def load_ends() -> LoadedEnds:
        return load_computed(_as_of_now(plan).ends)

    return LoadedShard(
        _describe(plan, runtime),
        load,
        lambda: bool(spare),
        load_plain,
        load_ends,
        LayerShape(plan.manifest.hidden_size, runtime.row_size, plan.manifest.cuts),
        bytes_read,
        (time.perf_counter() - started) * 1000,
        tuple(
            filter(None, (plan.dtype.reason, plan.quant.reason, plan.lean.reason, *runtime.reasons))
        ),
    )


def _as_of_now(plan: LoadPlan) -> LoadPlan:
    """The plan with the checkpoint that lies there by now, of which less may be there: who loads
    of it is refused what is not, which the earlier one says is there and the files have as zeros.

    Raises BadCheckpoint where those are other weights: they would be served, and what is rounded of
    them be kept, as those that were loaded before.
    """
    manifest = plan.manifest
    now = read_manifest(manifest.path, model_id=manifest.model_id, cache_dir=manifest.cache_dir)
    if now.weights_sha256 != manifest.weights_sha256:
        raise BadCheckpoint(
            f"The weights in {manifest.path} are not those that were loaded before.",
            fix="Put those back, or restart the node: it serves these then.",
        )
    return replace(plan, manifest=now)


def _load(plan: LoadPlan) -> tuple[Runtime, int]:
    loaded = _made(plan)
    settle()
    return loaded


def _made(plan: LoadPlan) -> tuple[Runtime, int]:
    if plan.quant.value is not None and plan.is_compiled:
        return _load_compiled(plan, plan.quant.value)
    if plan.quant.value is not None:
        loaded = _in_4_bit(plan)
        int4.to_device(loaded.module, plan.host.device, plan.dtype.value)
    else:
        loaded = _load_span(plan, plan.loaded_dtype)
    runtime = TorchRuntime(
        loaded,
        device=plan.host.device,
        dtype=plan.dtype.value,
        batch_invariant=plan.request.settings.batch_invariant,
        lean=plan.lean.value,
        positions=plan.request.settings.kv_tokens,
        progress=plan.progress,
    )
    return runtime, loaded.bytes_read


def _load_compiled(plan: LoadPlan, quant: Quant) -> tuple[Runtime, int]:
    from mesh.shard.compiled.proof import check_kernels
    from mesh.shard.compiled.runtime import CompiledRuntime

    manifest, settings = plan.manifest, plan.request.settings
    span = _round(plan, quant)
    runtime = CompiledRuntime(
        span,
        threads=plan.host.threads,
        positions=min(settings.kv_tokens, manifest.max_positions or settings.kv_tokens),
        batch_invariant=settings.batch_invariant,
    )
    runtime.reasons += (check_kernels(runtime),)
    return runtime, span.loaded.bytes_read


def _in_4_bit(plan: LoadPlan) -> LoadedSpan:
    """Its layers for torch, in main memory."""
    if plan.lean.value:
        return _round(plan, "int4").loaded
    sha256 = plan.manifest.weights_sha256
    return rounded_modules(_to_round(plan), sha256, plan.request.cache_dir, plan.progress)


def _round(plan: LoadPlan, quant: Quant) -> GraphSpan:
    """Its layers in few bits, in main memory."""
    from mesh.shard.compiled.store import quantised_span

    sha256 = plan.manifest.weights_sha256
    return quantised_span(_to_round(plan), quant, sha256, plan.request.cache_dir, plan.progress)


def _to_round(plan: LoadPlan) -> LoadedSpan:
    """Its layers as they are stored: most of that is only mapped then, and read where it was not
    rounded before."""
    manifest = plan.manifest
    note_place(plan.request.cache_dir, manifest.weights_sha256, manifest.path)
    return load_span(
        manifest, plan.request.layers, dtype=stored_dtype(manifest), device=torch.device("cpu"),
        progress=plan.progress, defer=True,
    )  # fmt: skip


def _load_span(plan: LoadPlan, dtype: torch.dtype) -> LoadedSpan:
    return load_span(
        plan.manifest,
        plan.request.layers,
        dtype=dtype,
        device=plan.host.device,
        progress=plan.progress,
    )


def _test(runtime: Runtime) -> None:
    """A test inference: a few rows through every layer, as a session's first step.

    Raises ShardCorrupt when what comes out is not finite, and what the device raises.
    """
    size = runtime.row_size
    row = torch.linspace(-1, 1, size, dtype=runtime.dtype, device=runtime.device)
    hidden = row.expand(1, _TEST_ROWS, size).contiguous()
    (output,) = runtime.forward([StepInput(runtime.new_cache(_TEST_ROWS), 0, hidden)])
    if output.shape != hidden.shape or not bool(torch.isfinite(output).all()):
        raise ShardCorrupt(
            f"Layers {runtime.layers} gave something else than finite numbers in their test.",
            fix="Download the checkpoint again; if it is whole, choose another --dtype.",
        )


def _describe(plan: LoadPlan, runtime: Runtime) -> ShardDescriptor:
    manifest, host, settings = plan.manifest, plan.host, plan.request.settings
    kernels = f"{runtime.kernels}+{settings.prefill_rows}rows"
    taken = replace(plan.need, weights_mb=math.ceil(runtime.weight_bytes / 2**20))
    return ShardDescriptor(
        shard_id=plan.shard_id,
        model_id=manifest.model_id,
        weights_sha256=manifest.weights_sha256,
        layers=plan.request.layers,
        total_layers=manifest.total_layers,
        vram_required_mb=taken.total_mb,
        max_concurrent_streams=settings.max_concurrent_streams,
        host=host.node_id,
        node_name=host.node_name,
        endpoint=host.endpoint,
        dtype=plan.quant.value or dtype_name(runtime.dtype),
        determinism_class=determinism_class(host.device, runtime.dtype, kernels, host.threads),
        advertised_at=datetime.now(UTC),
        embeds=manifest.has_ends and plan.request.layers.start == 0,
        head=manifest.has_ends and plan.request.layers.stop == manifest.total_layers,
        kv_tokens=settings.kv_tokens,
        halved=runtime.kernels.startswith(HALVED),
        quant=plan.request.quant,
        own_quant=plan.request.own_quant,
        short_rows=runtime.short_rows,
        device=host.device_name,
        norms=manifest.has_ends and plan.request.layers.stop == manifest.total_layers,
    )
