"""Coordination on this node: what it holds is published, what neighbours offer is heard.

Looks every few seconds at the shards that are served, the checkpoints on the disk and the directory
of neighbours, and tells the coordinator what has changed. Part of the composition root.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh.api.services import ReadyQuestion
from mesh.clock import Clock, tick
from mesh.config import Config
from mesh.coordination.coordinator import Coordinator
from mesh.coordination.opening import open_coordinator
from mesh.coordination.ready import READY, READY_LIMIT_S
from mesh.coordination.records import (
    ModelRef,
    ModelWorker,
    TensorDescriptor,
    WorkerKind,
    WorkerPlace,
    worker_rank,
)
from mesh.discovery.advertisement import Advertisement, at_host
from mesh.discovery.directory import ShardStore
from mesh.errors import BadRequest, CoordinationError, MeshError, StoreUnavailable
from mesh.health.eventstream import EventFeed
from mesh.hearth.network import Network
from mesh.models.local import LocalModel
from mesh.models.manifest import Manifest, read_manifest
from mesh.paths import StatePaths, cache_dir
from mesh.processes.tasks import end, spawn
from mesh.types import Endpoint, LayerRange, ModelId, NodeId, ShardDescriptor

logger = logging.getLogger(__name__)

LOOK_S = 2.0
RENEW_S = READY_LIMIT_S / 4
_TIDY_S = 30.0
"""How often partial checkpoints are read again, and records of earlier runs are looked for."""
_TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
}  # fmt: skip
"""safetensors' names of number formats, as records spell them; others stay as they are."""

_Entry = tuple[ModelRef, int]


@dataclass(frozen=True, slots=True)
class OwnPart:
    """One thing this node holds: `shard` is what serves it, None for files on the disk."""

    model: ModelRef
    place: WorkerPlace
    directory: Path
    shard: ShardDescriptor | None


@dataclass(slots=True)
class _Published:
    held: OwnPart
    renewed_at: float


class CoordinationHere:
    """`start`, then `stop`. `served` gives our own shards."""

    def __init__(
        self,
        config: Config,
        own: NodeId,
        models: Mapping[ModelId, LocalModel],
        network: Network,
        neighbours: ShardStore,
        served: Callable[[], Sequence[Advertisement]],
        events: EventFeed,
    ) -> None:
        self._own = own
        self._models = models
        self._network = network
        self._neighbours = neighbours
        self._served = served
        self._events = events
        self._is_distributed = config.is_distributed
        self._clock: Clock = events.clock
        file = StatePaths(config.state_dir).coordination
        self.coordinator: Coordinator = open_coordinator(
            config.coordination, file, self._clock, self._warn
        )
        self._published: dict[_Entry, _Published] = {}
        self._refused: set[_Entry] = set()
        """What the records would not take when it was tried last."""
        self._on_disk: dict[LocalModel, tuple[LayerRange, ...]] = {}
        """The runs of layers of which every byte is here, in checkpoints that were read."""
        self._tidied_at = -_TIDY_S
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to publish."""
        self.coordinator.start()
        self._task = spawn(self._keep(), "publish what this node holds")

    async def stop(self) -> None:
        """Withdraw the shards, which end with this node, and let go. Files stay published."""
        await end([self._task])
        shards = [key for key, each in self._published.items() if each.held.shard is not None]
        try:
            for model, rank in shards:
                await self.coordinator.withdraw(model, [rank])
        except CoordinationError as error:
            logger.warning("coordination=withdraw failed: %s", error)
        await self.coordinator.stop()

    async def view(self) -> dict[str, Any]:
        """See `mesh.api.services.CoordinationView`."""
        return await self.coordinator.view()

    async def when_ready(self, question: ReadyQuestion) -> dict[str, Any]:
        """See `mesh.api.services.CoordinationView`. Of a model of which nobody knows how many
        layers it has, every worker that serves some has to be ready. Raises BadRequest for layers
        that nothing of that name has."""
        self._require_possible(question)
        ready = await self.coordinator.wait_ready(
            question.model,
            timeout_s=question.wait_s,
            weights_sha256=question.weights_sha256,
            layers=lambda model: question.layers or self._whole(model),
        )
        return self.coordinator.row(ready)

    def _whole(self, model: ModelRef) -> LayerRange | None:
        """All its layers, where it is held here or neighbours serve some of it."""
        sizes = self._sizes(model.name, model.weights_sha256)
        return LayerRange(0, sizes[0]) if sizes else None

    def _sizes(self, name: str, digest: str | None) -> list[int]:
        """How many layers the models of this name have; `digest` is of one, None of any."""
        seen = [(v.model_id, v.weights_sha256, v.total_layers) for v in self._neighbours.models()]
        held = [(m.model_id, m.weights_sha256, m.total_layers) for m in self._models.values()]
        return [
            total_layers
            for known, weights, total_layers in seen + held
            if known == name and digest in (None, weights)
        ]

    def _require_possible(self, question: ReadyQuestion) -> None:
        sizes = self._sizes(question.model, question.weights_sha256)
        if question.layers is None or not sizes or question.layers.stop <= max(sizes):
            return
        whole = LayerRange(0, max(sizes))
        raise BadRequest(
            f"{question.model} has layers {whole}, not {question.layers}.",
            fix="Ask for layers that it has.",
            param="layers",
        )

    async def _keep(self) -> None:
        while True:
            try:
                await self._look()
            except CoordinationError as error:
                logger.debug("coordination=look failed: %s", error)  # the records have warned
            await tick(LOOK_S)

    async def _look(self) -> None:
        self.coordinator.hear(self._offered())
        parts = await self._held_now() if self._is_distributed else ()
        held = {(each.model, worker_rank(each.place)): each for each in parts}
        self._refused &= self._published.keys() | held.keys()
        for key in self._published.keys() | held.keys():
            await self._settle(key, held.get(key))
        now = self._clock.monotonic()
        if now - self._tidied_at < _TIDY_S:
            return
        await self._tidy()
        if self.coordinator.state()["reachable"]:  # before, there is nothing to find
            self._tidied_at = now
            self._on_disk = {
                model: runs
                for model, runs in self._on_disk.items()
                if runs == (LayerRange(0, model.total_layers),)
            }

    async def _settle(self, key: _Entry, held: OwnPart | None) -> None:
        """Publish or withdraw one thing. Where that fails it is tried again at the next look."""
        model, rank = key
        try:
            if held is not None:
                await self._publish(key, held)
            else:
                await self.coordinator.withdraw(model, [rank])
                del self._published[key]
            self._refused.discard(key)
        except StoreUnavailable as error:
            logger.debug("coordination=%s failed: %s", model.name, error)  # the records have warned
        except CoordinationError as error:
            if key not in self._refused:
                self._refused.add(key)
                self._warn(f"what is held here of {model.name} is not in the records: {error}")

    async def _publish(self, key: _Entry, held: OwnPart) -> None:
        (model, rank), now = key, self._clock.monotonic()
        known = self._published.get(key)
        if known is None or known.held != held:
            tensors = await asyncio.to_thread(_tensors, held)
            published_at = int(self._clock.now().timestamp())
            worker = ModelWorker(rank, held.place, tensors, published_at)
            await self.coordinator.publish(model, [worker])
            known = self._published[key] = _Published(held, now - RENEW_S)
        if held.shard is not None and now - known.renewed_at >= RENEW_S:
            # It was tested as it was loaded (`mesh.shard.loading`); since then its weights are
            # watched, and it is not served once they change or its process is silent.
            await self.coordinator.mark_ready(model, rank, READY)
            known.renewed_at = now

    async def _tidy(self) -> None:
        """Withdraw what an earlier run of this node has published and this one does not hold, and
        have published again what is in the records no more."""
        for model in {*await self.coordinator.models(), *(model for model, _ in self._published)}:
            record = await self.coordinator.lookup(model)
            workers = record.workers if record is not None else ()
            there = {each.worker_rank for each in workers if each.place.holder == self._own}
            mine = {rank for other, rank in self._published if other == model}
            if there - mine:
                await self.coordinator.withdraw(model, there - mine)
            for rank in mine - there:
                del self._published[model, rank]

    async def _held_now(self) -> list[OwnPart]:
        # Both change with every load and every deployment, also while a thread looks.
        models, shards = dict(self._models), [each.descriptor for each in self._served()]
        return await asyncio.to_thread(lambda: [*self._all_held(models, shards)])

    def _all_held(
        self, models: Mapping[ModelId, LocalModel], shards: Sequence[ShardDescriptor]
    ) -> Iterator[OwnPart]:
        """In a thread: a checkpoint's layers are read from its headers."""
        for shard in shards:
            model, ref = models.get(shard.model_id), _ref(shard.model_id, shard.weights_sha256)
            if model is not None and ref is not None:
                place = _place(shard, at_host(shard.endpoint, self._network.host))
                yield OwnPart(ref, place, Path(model.directory), shard)
        address = self._network.address
        for model in models.values():
            ref = _ref(model.model_id, model.weights_sha256)
            if ref is None or address is None:
                continue
            if model not in self._on_disk:
                self._on_disk[model] = _layers_on_disk(model)
            for layers in self._on_disk[model]:
                place = WorkerPlace(self._own, WorkerKind.CHECKPOINT, layers, str(address))
                yield OwnPart(ref, place, Path(model.directory), None)

    def _offered(self) -> dict[ModelRef, list[ModelWorker]]:
        """What trusted neighbours serve now, by model. They do not say its tensors here."""
        found: dict[ModelRef, list[ModelWorker]] = {}
        for shard in (
            each.descriptor for view in self._neighbours.models() for each in view.shards
        ):
            ref = _ref(shard.model_id, shard.weights_sha256)
            if ref is None or shard.host == self._own or not self._network.may_serve(shard.host):
                continue
            place, at = _place(shard, shard.endpoint), int(shard.advertised_at.timestamp())
            found.setdefault(ref, []).append(ModelWorker(worker_rank(place), place, (), at))
        return found

    def _warn(self, why: str) -> None:
        logger.warning("coordination=%s", why)
        self._events.emit("warning", code="coordination", message=why, fix="")


def _ref(model_id: ModelId, weights_sha256: str) -> ModelRef | None:
    """None for a name that records do not take."""
    try:
        return ModelRef(model_id, weights_sha256)
    except ValueError as error:
        logger.debug("coordination=%.300r left out: %s", model_id, error)
        return None


def _place(shard: ShardDescriptor, endpoint: Endpoint) -> WorkerPlace:
    return WorkerPlace(shard.host, WorkerKind.SHARD, shard.layers, endpoint)


def _manifest(directory: Path, model_id: ModelId) -> Manifest | None:
    try:
        return read_manifest(directory, model_id=model_id, cache_dir=cache_dir())
    except MeshError as error:
        logger.debug("coordination=%s not published: %s", directory, error)
        return None


def _layers_on_disk(model: LocalModel) -> tuple[LayerRange, ...]:
    manifest = _manifest(Path(model.directory), model.model_id)
    return () if manifest is None else manifest.layers_here()


def _tensors(held: OwnPart) -> tuple[TensorDescriptor, ...]:
    manifest = _manifest(held.directory, held.model.name)
    if manifest is None:
        return ()
    entries = manifest.layer_tensors(held.place.layers)
    if held.shard is None and len(held.place.layers) == manifest.total_layers:
        entries = (*manifest.ends_tensors(), *entries)
    return tuple(
        TensorDescriptor(each.name, each.nbytes, _TORCH_NAMES.get(each.dtype, each.dtype))
        for each in entries
        if each.present
    )
