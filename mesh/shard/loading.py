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

import torch

from mesh.errors import BadCheckpoint, ShardCorrupt, UnsupportedFamily
from mesh.models.families import family_of
from mesh.models.load import LoadedSpan, load_span
from mesh.models.manifest import Manifest, read_manifest
from mesh.models.partial import require_present
from mesh.models.progress import Progress
from mesh.models.rounded import note_place
from mesh.shard.commands import ShardRequest
from mesh.shard.compiled.formats import Quant, bytes_per_weight
from mesh.shard.compiled.parts import NotCompilable
from mesh.shard.cuda import int4
from mesh.shard.device import (
    DTYPES,
    Choice,
    choose_dtype,
    choose_quant,
    determinism_class,
    dtype_name,
    short_dtype_name,
)
from mesh.shard.ends import EndsPlan, LoadedEnds, load_computed
from mesh.shard.footprint import ends_mb, estimate
from mesh.shard.lean_proof import require_lean
from mesh.shard.linear import HALVED, kept_dtype
from mesh.shard.runtime import StepInput
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import (
    Endpoint,
    NodeId,
    ShardDescriptor,
    ShardId,
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
class HostedOn:
    """Where a shard runs: the node, its address for askers, and the device."""

    node_id: NodeId
    node_name: str
    endpoint: Endpoint
    device: torch.device
    threads: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a load will do, known before it is done: `need` is what it takes of the device.

    `dtype` is that of the torch runtime; with a `quant` the compiled one computes. With `lean` the
    torch runtime does without modules where it can, and keeps weights in 16 bit that it computes
    with in fp32.
    """

    manifest: Manifest
    request: ShardRequest
    host: HostedOn
    dtype: Choice[torch.dtype]
    quant: Choice[Quant | None]
    lean: Choice[bool]
    need: ShardMemory
    progress: Progress = field(default_factory=Progress, compare=False)

    @property
    def shard_id(self) -> ShardId:
        """Of the shard that it gives."""
        return self.request.shard_id

    @property
    def plain_need(self) -> ShardMemory:
        """What its weights take once more, in the form in which interventions show them."""
        weights_mb = self.need.weights_mb
        return ShardMemory(weights_mb=2 * weights_mb if self.is_halved else weights_mb)

    @property
    def ends(self) -> EndsPlan:
        """How the model's ends are computed, by the same settings."""
        request, host = self.request, self.host
        return EndsPlan(
            self.manifest, host.device, request.dtype, self.dtype, request.quant, host.threads,
            request.cache_dir,
        )  # fmt: skip

    @property
    def ends_need(self) -> ShardMemory:
        """What they take."""
        return ShardMemory(weights_mb=ends_mb(self.manifest, self.dtype.value.itemsize))

    @property
    def is_halved(self) -> bool:
        """Whether linear layers stay in 16 bit though fp32 is computed."""
        return self.lean.value and self.dtype.value == torch.float32


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
    hidden_size: int
    bytes_read: int
    load_ms: float
    reasons: tuple[str, ...]


def plan_shard(request: ShardRequest, host: HostedOn) -> LoadPlan:
    """Read the checkpoint's headers, and its hashes where nobody did before.

    Raises ModelNotFound, BadCheckpoint, UnsupportedFamily for a model that cannot be quantised as
    it was requested, or BadValue for an unknown dtype or format.
    """
    manifest = read_manifest(
        request.directory, model_id=request.model_id, cache_dir=request.cache_dir
    )
    require_present(manifest.layer_tensors(request.layers))  # which refuses those it does not have
    dtype = choose_dtype(request.dtype, manifest.dtype, host.device)
    quant = _quant(request, manifest, host)
    on_card = quant.value is not None and host.device.type != "cpu"
    if on_card:
        dtype = Choice(torch.bfloat16, "dtype bf16: what weights in 4 bit are computed in")
    is_compiled = quant.value is not None and not on_card
    lean = Choice(False, "") if is_compiled else _lean(request, manifest, host, dtype.value)
    settings = request.settings
    halved = 2.0 if lean.value and dtype.value == torch.float32 else None
    need = estimate(
        manifest,
        request.layers,
        4 if is_compiled else dtype.value.itemsize,
        kv_tokens=settings.kv_tokens,
        rows=settings.prefill_rows,
        weight_size=bytes_per_weight(quant.value) if quant.value else halved,
    )
    return LoadPlan(manifest, request, host, dtype, quant, lean, need)


def _lean(
    request: ShardRequest, manifest: Manifest, host: HostedOn, dtype: torch.dtype
) -> Choice[bool]:
    """Whether layers may do without transformers' modules: in 16 bit, or where only their weights
    have 16 bit; what is asked for in fp32 is computed as transformers does."""
    kept = kept_dtype(request.dtype, manifest.dtype, dtype, host.device)
    kind = host.device.type
    if kind not in ("cpu", "cuda") or kept == torch.float32:
        return Choice(False, "")
    if kind == "cpu" and dtype == torch.float16:
        return Choice(False, "")
    family = family_of(manifest)
    try:
        require_lean(family, manifest.cache_dir)
    except NotCompilable as error:
        return Choice(False, f"layers by modules: {family.model_type} has no lean ones, {error}")
    return Choice(True, "")


def _stored(manifest: Manifest) -> torch.dtype:
    return DTYPES.get(short_dtype_name(manifest.dtype), torch.float32)


def _quant(request: ShardRequest, manifest: Manifest, host: HostedOn) -> Choice[Quant | None]:
    choice = choose_quant(request.quant, host.device)
    if choice.value is None:
        return choice
    require = require_lean
    if host.device.type == "cpu":
        # Not before somebody wants it: onnxruntime takes its time to import, and memory.
        from mesh.shard.compiled.proof import require_compilable

        require = require_compilable
    family = family_of(manifest)
    try:
        require(family, manifest.cache_dir)
    except NotCompilable as error:
        if request.quant == "auto":
            return Choice(None, f"quant none: {family.model_type} is not compiled, {error}")
        raise UnsupportedFamily(
            f"Model type {family.model_type} cannot be served in {choice.value}: {error}.",
            fix="Serve it unquantised (--quant none).",
            param="quant",
        ) from error
    return choice


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
        _require_same(plan.manifest)
        return _load(plan)[0]

    def load_plain() -> LoadedSpan:
        _require_same(plan.manifest)
        return _load_span(plan, plan.dtype.value)

    def load_ends() -> LoadedEnds:
        _require_same(plan.manifest)
        return load_computed(plan.ends)

    return LoadedShard(
        _describe(plan, runtime),
        load,
        lambda: bool(spare),
        load_plain,
        load_ends,
        plan.manifest.hidden_size,
        bytes_read,
        (time.perf_counter() - started) * 1000,
        tuple(
            filter(None, (plan.dtype.reason, plan.quant.reason, plan.lean.reason, *runtime.reasons))
        ),
    )


def _require_same(manifest: Manifest) -> None:
    """Raise BadCheckpoint where other weights lie there by now: they would be served, and what is
    rounded of them be kept, as those that the manifest was read of."""
    now = read_manifest(manifest.path, cache_dir=manifest.cache_dir)
    if now.weights_sha256 != manifest.weights_sha256:
        raise BadCheckpoint(
            f"The weights in {manifest.path} are not those that were loaded before.",
            fix="Put those back, or restart the node: it serves these then.",
        )


def _load(plan: LoadPlan) -> tuple[Runtime, int]:
    on_cpu = plan.host.device.type == "cpu"
    if plan.quant.value is not None and on_cpu:
        return _load_compiled(plan, plan.quant.value)
    if plan.quant.value is not None:
        loaded = _round(plan, plan.quant.value).loaded
        int4.to_device(loaded.module, plan.host.device)
    else:
        loaded = _load_span(plan, _stored(plan.manifest) if plan.is_halved else plan.dtype.value)
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


def _round(plan: LoadPlan, quant: Quant) -> GraphSpan:
    """Its layers in few bits, in main memory."""
    from mesh.shard.compiled.store import quantised_span

    manifest = plan.manifest
    note_place(plan.request.cache_dir, manifest.weights_sha256, manifest.path)
    # As it is stored: most of it is only mapped then, and read where it was not rounded before.
    loaded = load_span(
        manifest, plan.request.layers, dtype=_stored(manifest), device=torch.device("cpu"),
        progress=plan.progress, defer=True,
    )  # fmt: skip
    return quantised_span(
        loaded, quant, manifest.weights_sha256, plan.request.cache_dir, plan.progress
    )


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
    size = runtime.hidden_size
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
    )
