"""What the rest of a node uses: publish what is held, look up who holds it, wait until it is ready.

Puts together the records, what neighbours say of themselves now, and who is ready. Knows no store
by name; `mesh.coordination.opening` chooses one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from mesh.clock import set_by
from mesh.coordination.direct import DirectRecords
from mesh.coordination.layered import LayeredRecords
from mesh.coordination.ready import READY, ReadyFlags, ReadySignal
from mesh.coordination.records import ModelRecord, ModelRef, ModelWorker
from mesh.errors import NotReady, StoreUnavailable
from mesh.types import LayerRange

_LOOK_S = 1.0
"""How often somebody who waits looks at records that others write."""
_MAX_NAMED = 8
_NOBODY = "every worker"


class Coordinator:
    """Who holds which model, and whether it is ready. `start` first, `stop` last."""

    def __init__(self, records: LayeredRecords | DirectRecords, flags: ReadyFlags) -> None:
        self._records = records
        self._flags = flags
        self._heard: dict[ModelRef, dict[int, ModelWorker]] = {}
        """What neighbours offer, by rank."""

    def start(self) -> None:
        """Begin to read back and write through."""
        self._records.start()

    async def stop(self) -> None:
        """Let go of the store."""
        await self._records.stop()

    async def publish(self, model: ModelRef, workers: Sequence[ModelWorker]) -> None:
        """Say that these workers hold their parts of the model. They are not ready yet.

        Returns at once where records are kept in memory; a store behind follows. Raises RankTaken,
        RecordsFull and, where there is no memory, what the store fails with.
        """
        await self._records.publish(model, workers)
        for worker in workers:
            self._flags.clear(model, worker.worker_rank)
        self._flags.stir()

    async def withdraw(self, model: ModelRef, ranks: Collection[int]) -> None:
        """Say that these workers hold it no more."""
        for rank in ranks:
            self._flags.clear(model, rank)
        await self._records.withdraw(model, ranks)

    async def lookup(self, model: ModelRef) -> ModelRecord | None:
        """Who holds the model, by rank: published workers and those that neighbours offer now."""
        record = await self._records.get(model)
        heard = self._heard.get(model)
        if heard is None:
            return record
        return ModelRecord.of(model, {**(record.by_rank if record else {}), **heard})

    async def models(self) -> list[ModelRef]:
        """The models of which anything is known. Raises what the store fails with."""
        known = {*await self._records.models(), *self._heard}
        return sorted(known, key=lambda model: model.key)

    async def mark_ready(self, model: ModelRef, rank: int, signal: ReadySignal) -> None:
        """Say that a worker serves, and whether a test inference on it has succeeded. Counts for
        `READY_LIMIT_S`, unless it is said again; also where the store, which shows it, fails and
        CoordinationError is raised."""
        self._flags.set(model, rank, signal)
        await self._records.show_ready(model, [rank])

    def hear(self, offered: Mapping[ModelRef, Sequence[ModelWorker]]) -> None:
        """All that neighbours offer now, in the place of what they offered before.

        They are ready: a neighbour advertises a shard after its test, again and again while it
        serves. None of it is written to a store.
        """
        self._heard = {
            model: {worker.worker_rank: worker for worker in workers}
            for model, workers in offered.items()
        }
        self._flags.stir()

    async def wait_ready(
        self,
        name: str,
        *,
        timeout_s: float,
        weights_sha256: str | None = None,
        layers: Callable[[ModelRef], LayerRange | None] = lambda _: None,
    ) -> ModelRecord:
        """Wait for a checkpoint of this name, with these weights or with any: its ready workers.

        It is ready when ready workers cover the `layers` that have to be of it, or else, where
        these are None, when every worker that serves some is ready and there is one. It need not be
        known yet. Raises NotReady after `timeout_s` seconds, naming what is missing.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while True:
            changed = self._flags.changed
            missing = _NOBODY
            try:
                for model in await self.models():
                    if model.name == name and weights_sha256 in {None, model.weights_sha256}:
                        record = await self.lookup(model) or ModelRecord(model, ())
                        missing = self._missing(record, layers(model))
                        if not missing:
                            return self.ready(record)
            except StoreUnavailable as error:
                missing = f"the records ({error.message})"
            if loop.time() >= until:
                raise NotReady(
                    f"Not ready in time: {missing} of {name}.",
                    fix="Wait longer, or see in `hearthnet status` what the nodes that hold it"
                    " are doing.",
                )
            await set_by(changed, min(until, loop.time() + _LOOK_S))

    def _missing(self, record: ModelRecord, layers: LayerRange | None) -> str:
        """In words what lacks until it is ready; empty when nothing does."""
        ready = self.ready(record).workers
        if layers is not None:
            covered = {layer for each in ready for layer in _numbers(each.place.layers)}
            return _named("layer", set(_numbers(layers)) - covered)
        serving = {each.worker_rank for each in record.workers if each.place.kind.serves}
        if not serving:
            return _NOBODY
        return _named("worker", serving - {each.worker_rank for each in ready})

    def ready(self, record: ModelRecord) -> ModelRecord:
        """The record with its ready workers only."""
        left = [w for w in record.workers if self._signal(record.model, w.worker_rank).counts]
        return ModelRecord(record.model, tuple(left))

    def _signal(self, model: ModelRef, rank: int) -> ReadySignal:
        return READY if rank in self._heard.get(model, ()) else self._flags.of(model, rank)

    def state(self) -> dict[str, Any]:
        """How it is with the store; see `LayeredRecords.state`."""
        return self._records.state()

    async def view(self) -> dict[str, Any]:
        """See `mesh.api.services.CoordinationView`. Raises what the store fails with."""
        records = [await self.lookup(model) for model in await self.models()]
        return {**self.state(), "models": [self.row(each) for each in records if each is not None]}

    def row(self, record: ModelRecord) -> dict[str, Any]:
        """A model of `view`."""
        return {
            "model_name": record.model.name,
            "weights_sha256": record.model.weights_sha256,
            "published_at": record.published_at,
            "workers": [self._worker_row(record.model, worker) for worker in record.workers],
        }

    def _worker_row(self, model: ModelRef, worker: ModelWorker) -> dict[str, Any]:
        signal = self._signal(model, worker.worker_rank)
        return {
            "worker_rank": worker.worker_rank,
            "holder": worker.place.holder,
            "kind": worker.place.kind.value,
            "layers": str(worker.place.layers),
            "endpoint": worker.place.endpoint,
            "tensor_count": len(worker.tensors) or None,
            "published_at": worker.published_at,
            "ready": signal.ready,
            "stability_verified": signal.stability_verified,
        }


def _numbers(layers: LayerRange) -> Iterable[int]:
    return range(layers.start, layers.stop)


def _named(what: str, numbers: Collection[int]) -> str:
    if not numbers:
        return ""
    shown = ", ".join(map(str, sorted(numbers)[:_MAX_NAMED]))
    more = f" and {len(numbers) - _MAX_NAMED} more" if len(numbers) > _MAX_NAMED else ""
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}{more}"
