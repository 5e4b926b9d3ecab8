"""What loading a shard will do, decided from the checkpoint's headers before a weight is read.

In which numbers it is computed, by which runtime, and what that takes of the device. Blocks for
files and, the first time, for the proofs of a family: called on the loading thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from mesh.errors import UnsupportedFamily
from mesh.models.families import Family, family_of, has_states
from mesh.models.manifest import Manifest, read_manifest
from mesh.models.partial import require_present
from mesh.models.progress import Progress
from mesh.models.standard import experts_met, goes_by_torch, has_other_layers, other_formats
from mesh.shard import int4
from mesh.shard.block_modules import rounded_size
from mesh.shard.commands import ShardRequest
from mesh.shard.compiled.formats import MIXED_SIZE, Quant, bytes_per_weight
from mesh.shard.compiled.parts import NotCompilable
from mesh.shard.device import (
    DTYPES,
    Choice,
    choose_dtype,
    choose_quant,
    dtype_name,
    plain_dtype,
    short_dtype_name,
)
from mesh.shard.ends import EndsPlan, maps_inputs
from mesh.shard.footprint import ends_mb, estimate
from mesh.shard.lean_proof import require_lean
from mesh.shard.linear import kept_dtype
from mesh.types import Endpoint, NodeId, ShardId, ShardMemory


@dataclass(frozen=True, slots=True)
class HostedOn:
    """Where a shard runs: the node, its address for askers, and the device, with what that is
    called among the node's, '' where it has one."""

    node_id: NodeId
    node_name: str
    endpoint: Endpoint
    device: torch.device
    threads: int
    device_name: str = ""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a load will do, known before it is done: `need` is what it takes of the device.

    `dtype` is that of the torch runtime; the compiled one computes where it `is_compiled`. With
    `lean` the torch runtime does without modules where it can, and keeps weights in 16 bit that it
    computes with in fp32.
    """

    manifest: Manifest
    request: ShardRequest
    host: HostedOn
    dtype: Choice[torch.dtype]
    quant: Choice[Quant | None]
    is_compiled: bool
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
        computed, device = self.dtype.value, self.host.device
        asked = self.request.dtype, computed, self.request.quant
        maps = maps_inputs(self.manifest, device, *asked)
        return ShardMemory(weights_mb=ends_mb(self.manifest, computed.itemsize, maps_inputs=maps))

    @property
    def is_halved(self) -> bool:
        """Whether linear layers stay in 16 bit though fp32 is computed."""
        return _is_halved(self.quant.value, self.lean, self.dtype.value)

    @property
    def loaded_dtype(self) -> torch.dtype:
        """Of the weights before layers are made of them, where they are not quantised."""
        return plain_dtype(self.manifest.dtype) if self.is_halved else self.dtype.value


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
    quant, is_compiled = _quant(request, manifest, host)
    if quant.value is not None and not is_compiled:
        beside = torch.float32 if host.device.type == "cpu" else torch.bfloat16
        dtype = Choice(
            beside, f"dtype {dtype_name(beside)}: what is computed beside products in 4 bit"
        )
        lean = _lean_in_4_bit(request, manifest, host)
    elif is_compiled:
        lean = Choice(False, "")
    else:
        lean = _lean(request, manifest, host, dtype.value)
    settings = request.settings
    size = 2.0 if _is_halved(quant.value, lean, dtype.value) else None
    if quant.value is not None:
        size = _few_bits(manifest, quant.value) if is_compiled else _by_torch(manifest, lean)
    need = estimate(
        manifest,
        request.layers,
        4 if is_compiled else dtype.value.itemsize,
        kv_tokens=settings.kv_tokens,
        rows=settings.prefill_rows,
        streams=settings.max_concurrent_streams,
        weight_size=size,
    )
    return LoadPlan(manifest, request, host, dtype, quant, is_compiled, lean, need)


def _is_halved(quant: Quant | None, lean: Choice[bool], dtype: torch.dtype) -> bool:
    return quant is None and lean.value and dtype == torch.float32


def _few_bits(manifest: Manifest, quant: Quant) -> float:
    """What a weight takes in that format, as the compiled runtime computes with it."""
    is_mixed = experts_met(manifest.config) < 1
    return bytes_per_weight(quant) * (MIXED_SIZE[quant] if is_mixed else 1.0)


def _by_torch(manifest: Manifest, lean: Choice[bool]) -> float:
    return int4.BYTES_PER_WEIGHT if lean.value else rounded_size(family_of(manifest))


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
    require = _require_lean_on_card if kind == "cuda" else require_lean
    try:
        require(family, manifest.cache_dir, request.settings.kv_tokens)
    except NotCompilable as error:
        return Choice(False, f"layers by modules: {family.model_type} has no lean ones, {error}")
    return Choice(True, "")


def _require_lean_on_card(family: Family, cache_dir: Path | None, positions: int) -> None:
    """As `require_lean`. Running states, and experts, go without modules on a CPU only."""
    if has_states(family.config):
        raise NotCompilable("some of its layers keep a running state")
    if experts_met(family.config.to_dict()) < 1:
        raise NotCompilable("it is a mixture of experts")
    require_lean(family, cache_dir, positions)


def _lean_in_4_bit(request: ShardRequest, manifest: Manifest, host: HostedOn) -> Choice[bool]:
    """The same where they are in 4 bit and by torch; on a card they do without them always."""
    known = family_of(manifest), manifest.cache_dir, request.settings.kv_tokens
    if host.device.type != "cpu" or _has_lean_layers(*known):
        return Choice(True, "")
    return Choice(False, "layers by modules: no graph is built for them")


def _has_lean_layers(family: Family, cache_dir: Path | None, positions: int) -> bool:
    try:
        require_lean(family, cache_dir, positions)
    except NotCompilable:
        return False
    return True


def _goes_by_torch(manifest: Manifest, choice: Choice[Quant | None], host: HostedOn) -> bool:
    """Whether what is refused could be had in 4 bit."""
    known = goes_by_torch(manifest.config, manifest.model_type)
    return known and choice.value != "int4" and host.device.type == "cpu"


def stored_dtype(manifest: Manifest) -> torch.dtype:
    """What the checkpoint's weights are in; fp32 for what torch has no numbers like."""
    return DTYPES.get(short_dtype_name(manifest.dtype), torch.float32)


def _quant(
    request: ShardRequest, manifest: Manifest, host: HostedOn
) -> tuple[Choice[Quant | None], bool]:
    """The format, and whether the compiled runtime computes in it."""
    faster = "int8"
    if has_other_layers(manifest.config):
        faster = "int4" if goes_by_torch(manifest.config, manifest.model_type) else ""
    choice = choose_quant(request.quant, host.device, is_int4=manifest.is_int4, faster=faster)
    if choice.value is None:
        return choice, False
    family = family_of(manifest)
    known = family, manifest.cache_dir, request.settings.kv_tokens
    try:
        if host.device.type == "cpu":
            return choice, _is_compiled(choice.value, *known)
        _require_lean_on_card(*known)
    except NotCompilable as error:
        if request.quant == "auto":
            return Choice(None, f"quant none: {family.model_type} is not compiled, {error}"), False
        raise UnsupportedFamily(
            f"Model type {family.model_type} cannot be served in {choice.value}: {error}.",
            fix=other_formats(("int4",) if _goes_by_torch(manifest, choice, host) else ()),
            param="quant",
        ) from error
    return choice, False


def _is_compiled(quant: Quant, family: Family, cache_dir: Path | None, positions: int) -> bool:
    """Whether the compiled runtime computes in that format, or torch. Raises NotCompilable where
    neither does."""
    # Not before somebody wants it: onnxruntime takes its time to import, and memory.
    from mesh.shard.compiled.proof import require_compilable

    try:
        require_compilable(family, cache_dir, positions)
    except NotCompilable:
        if quant != "int4":
            raise
        if not _has_lean_layers(family, cache_dir, positions):
            rounded_size(family)
        return False
    return True
