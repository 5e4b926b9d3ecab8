"""What the rest of a node uses: publish what is held, look up who holds it, wait until it is ready.

Puts together the records, what neighbours say of themselves now, and who is ready. Knows no store
by name; `mesh.coordination.opening` chooses one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from mesh.coordination.layered import Records
from mesh.coordination.ready import ReadyFlags, ReadySignal
from mesh.coordination.records import ModelRecord, ModelRef, ModelWorker, merged
from mesh.errors import NotReady, StoreUnavailable
from mesh.types import LayerRange

_LOOK_S = 1.0
"""How often somebody who waits looks at records that others write."""
_MAX_NAMED = 8
_NOBODY = "every worker"
_Found = tuple[ModelRecord | None, str]
"""The ready workers of a model, and in words what lacks; empty when nothing does."""


class Coordinator:
    """Who holds which model, and whether it is ready. `start` first, `stop` last."""

    def __init__(self, records: Records, flags: ReadyFlags) -> None:
        self._records = records
        self._flags = flags
        self._heard: dict[str, ModelRecord] = {}

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
        return self._with_heard(model, await self._records.get(model))

    async def models(self) -> list[ModelRef]:
        """The models of which anything is known. Raises what the store fails with."""
        known = {model.key: model for model in await self._records.models()}
        known |= {key: record.model for key, record in self._heard.items()}
        return sorted(known.values(), key=lambda model: model.key)

    async def mark_ready(self, model: ModelRef, rank: int, signal: ReadySignal) -> None:
        """Say that a worker serves, and whether a test inference on it has succeeded. Counts for
        `READY_LIMIT_S`, unless it is said again; also where the store, which shows it, fails and
        CoordinationError is raised."""
        self._flags.set(model, rank, signal)
        await self._records.show_ready(model, [rank])

    def hear(self, offered: Mapping[ModelRef, Sequence[ModelWorker]], session: str) -> None:
        """All that neighbours offer now, in the place of what they offered before.

        They are ready: a neighbour advertises a shard after its test, again and again while it
        serves. None of it is written to a store.
        """
        for record in self._heard.values():
            for worker in record.workers:
                self._flags.clear(record.model, worker.worker_rank)
        self._heard = {}
        signal = ReadySignal(session, ready=True, stability_verified=True)
        for model, workers in offered.items():
            ordered = sorted(workers, key=lambda worker: worker.worker_rank)
            self._heard[model.key] = ModelRecord(model, tuple(ordered))
            for worker in ordered:
                self._flags.set(model, worker.worker_rank, signal)
        self._flags.stir()

    async def wait_ready(
        self,
        model: ModelRef,
        *,
        timeout_s: float,
        ranks: Collection[int] | None = None,
        layers: LayerRange | None = None,
    ) -> ModelRecord:
        """Wait until all workers of `ranks` are ready, ready workers cover `layers`, or else, with
        neither, every worker that serves layers is ready and there is one: the ready ones.

        Raises NotReady after `timeout_s` seconds, naming what is missing.
        """
        return await self._wait(lambda: self._missing(model, ranks, layers), model.name, timeout_s)

    async def wait_any_ready(
        self,
        name: str,
        *,
        timeout_s: float,
        weights_sha256: str | None,
        layers: Callable[[ModelRef], LayerRange | None],
    ) -> ModelRecord:
        """As `wait_ready`, of the first checkpoint of this name that is ready: with these weights,
        or with any. `layers` says which of a checkpoint have to be. None need be known yet."""

        async def look() -> _Found:
            found: _Found = None, _NOBODY
            for model in await self.models():
                if model.name == name and weights_sha256 in {None, model.weights_sha256}:
                    found = await self._missing(model, None, layers(model))
                    if not found[1]:
                        break
            return found

        return await self._wait(look, name, timeout_s)

    async def _wait(
        self, look: Callable[[], Awaitable[_Found]], name: str, timeout_s: float
    ) -> ModelRecord:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        with self._flags.watching() as news:
            while True:
                news.clear()
                try:
                    ready, missing = await look()
                    if ready is not None and not missing:
                        return ready
                except StoreUnavailable as error:
                    missing = f"the records ({error.message})"
                if loop.time() >= until:
                    raise NotReady(
                        f"Not ready in time: {missing} of {name}.",
                        fix="Wait longer, or see in `hearthnet status` what the nodes that hold it"
                        " are doing.",
                    )
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(min(until, loop.time() + _LOOK_S)):
                        await news.wait()

    async def _missing(
        self, model: ModelRef, ranks: Collection[int] | None, layers: LayerRange | None
    ) -> _Found:
        record = await self.lookup(model) or ModelRecord(model, ())
        ready = self.ready(record)
        if ranks is not None:
            here = {worker.worker_rank for worker in ready.workers}
            return ready, _named("worker", sorted(set(ranks) - here))
        if layers is not None:
            covered = {n for each in ready.workers for n in _numbers(each.place.layers)}
            return ready, _named("layer", sorted(set(_numbers(layers)) - covered))
        serving = {w.worker_rank for w in record.workers if w.place.kind.serves}
        if not serving:
            return ready, _NOBODY
        return ready, _named("worker", sorted(serving - {w.worker_rank for w in ready.workers}))

    def ready(self, record: ModelRecord) -> ModelRecord:
        """The record with its ready workers only."""
        left = [w for w in record.workers if self._flags.of(record.model, w.worker_rank).counts]
        return ModelRecord(record.model, tuple(left))

    def state(self) -> dict[str, Any]:
        """How it is with the store; see `Records.state`."""
        return self._records.state()

    async def view(self) -> dict[str, Any]:
        """See `mesh.api.services.CoordinationView`. Raises what the store fails with."""
        rows = []
        for model in await self.models():
            record = await self.lookup(model)
            if record is not None:
                rows.append(self.row(record))
        return {**self._records.state(), "models": rows}

    def row(self, record: ModelRecord) -> dict[str, Any]:
        """A model of `view`."""
        return {
            "model_name": record.model.name,
            "weights_sha256": record.model.weights_sha256,
            "published_at": record.published_at,
            "workers": [self._worker_row(record.model, worker) for worker in record.workers],
        }

    def _worker_row(self, model: ModelRef, worker: ModelWorker) -> dict[str, Any]:
        signal = self._flags.of(model, worker.worker_rank)
        return {
            "worker_rank": worker.worker_rank,
            "holder": worker.place.holder,
            "kind": worker.place.kind.value,
            "layers": str(worker.place.layers),
            "endpoint": worker.place.endpoint,
            "tensor_count": len(worker.tensors),
            "published_at": worker.published_at,
            "ready": signal.ready,
            "stability_verified": signal.stability_verified,
        }

    def _with_heard(self, model: ModelRef, record: ModelRecord | None) -> ModelRecord | None:
        heard = self._heard.get(model.key)
        if heard is None:
            return record
        ranks = {worker.worker_rank for worker in heard.workers}
        rest = () if record is None else record.without(ranks).workers
        return merged(model, heard, rest)


def _numbers(layers: LayerRange) -> Iterable[int]:
    return range(layers.start, layers.stop)


def _named(what: str, numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    shown = ", ".join(map(str, numbers[:_MAX_NAMED]))
    more = f" and {len(numbers) - _MAX_NAMED} more" if len(numbers) > _MAX_NAMED else ""
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}{more}"
