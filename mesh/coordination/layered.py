"""Records in memory, written through to a store behind: reads never wait, writes are best effort.

A write changes memory and returns; one task carries it to the store, and reads the store back when
it starts, after every outage and, where others write to it as well, when it changes. Knows nothing
of what the store is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mesh.clock import backoff_s
from mesh.coordination.ready import ReadyFlags
from mesh.coordination.records import ModelRecord, ModelRef, ModelWorker
from mesh.coordination.store import MemoryRecords, ReadyMirror, RecordStore
from mesh.errors import CoordinationError, StoreUnavailable
from mesh.processes.tasks import end, spawn

logger = logging.getLogger(__name__)

Warn = Callable[[str], None]
"""Tells people, in a sentence, that something is not as it should be."""

_Entry = tuple[str, int]
"""A model's key and a worker's rank."""
_Work = Callable[[ModelRef, list[int]], Awaitable[None]]


class Records(Protocol):
    """The records of all models as this node sees them. `start` first, `stop` last."""

    def start(self) -> None:
        """Begin to reach the store, if there is one."""

    async def stop(self) -> None:
        """Bring out what is not written yet, within a moment, and let go."""

    async def publish(self, model: ModelRef, workers: Sequence[ModelWorker]) -> None:
        """Put workers into the model's record, atomically. Raises CoordinationError."""

    async def withdraw(self, model: ModelRef, ranks: Collection[int]) -> None:
        """Take workers out. Raises CoordinationError."""

    async def get(self, model: ModelRef) -> ModelRecord | None:
        """The model's record. Raises CoordinationError."""

    async def models(self) -> list[ModelRef]:
        """The models that have a record. Raises CoordinationError."""

    async def show_ready(self, model: ModelRef, ranks: Collection[int]) -> None:
        """Let people see where the store shows it who of these is ready. Raises as
        `publish`."""

    def state(self) -> dict[str, Any]:
        """``{"store", "reachable", "error": why not | None, "unwritten": workers}``."""


@dataclass(frozen=True, slots=True)
class StoreTimes:
    """Seconds: what one visit to the store may take, how often it is read again, how long to wait
    after failures, and what a node that stops gives to writes that are left."""

    visit_s: float = 30.0
    refresh_s: float = 15.0
    first_retry_s: float = 1.0
    last_retry_s: float = 120.0
    stop_s: float = 3.0


class LayeredRecords:
    """See `Records`. Without a `store` it is memory alone.

    `flags` say who is ready, and tell whoever waits when the records have changed. `warn` is called
    once per outage and for each worker that the store will not take.
    """

    def __init__(
        self,
        store: RecordStore | None,
        flags: ReadyFlags,
        warn: Warn,
        pace: StoreTimes = StoreTimes(),
    ) -> None:
        self._store = store
        self._flags = flags
        self._warn = warn
        self._pace = pace
        self._memory = MemoryRecords()
        self._own: dict[_Entry, ModelRef] = {}
        """What was published here."""
        self._unwritten: dict[_Entry, ModelRef] = {}
        """Workers that memory and store differ in; memory is right. No more than memory holds and
        has held of its own."""
        self._unshown: dict[_Entry, ModelRef] = {}
        """Own workers of which the store may show something else than the flags say."""
        self._warned: set[str] = set()
        self._due = asyncio.Event()
        self._is_read_back = False
        self._error: CoordinationError | None = None
        self._failures = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._store is not None:
            self._task = spawn(self._keep(self._store), "write records through")

    async def stop(self) -> None:
        if self._store is None:
            return
        if self._task is not None:
            await end([self._task])
        try:
            async with asyncio.timeout(self._pace.stop_s):
                if self._is_read_back and self._error is None:
                    await self._write(self._store)
        except (CoordinationError, TimeoutError) as error:
            logger.warning("records=%s not all written at the end: %s", self._store.name, error)
        try:
            async with asyncio.timeout(self._pace.stop_s):
                await self._store.close()
        except (CoordinationError, TimeoutError) as error:
            logger.warning("records=%s not closed: %s", self._store.name, error)

    async def publish(self, model: ModelRef, workers: Sequence[ModelWorker]) -> None:
        """See `Records`; memory only, the store follows."""
        self._memory.publish(model, workers)
        for worker in workers:
            self._own[model.key, worker.worker_rank] = model
        self._differ(model, [worker.worker_rank for worker in workers])

    async def withdraw(self, model: ModelRef, ranks: Collection[int]) -> None:
        """See `Records`; memory only, the store follows."""
        self._memory.withdraw(model, ranks)
        for rank in ranks:
            self._own.pop((model.key, rank), None)
            self._unshown.pop((model.key, rank), None)
        self._differ(model, ranks)

    async def get(self, model: ModelRef) -> ModelRecord | None:
        """See `Records`; from memory."""
        return self._memory.get(model)

    async def models(self) -> list[ModelRef]:
        """See `Records`; from memory."""
        return self._memory.models()

    async def show_ready(self, model: ModelRef, ranks: Collection[int]) -> None:
        """See `Records`; own workers only, the store follows."""
        store = self._store
        if store is not None and isinstance(store, ReadyMirror):
            own = [rank for rank in ranks if (model.key, rank) in self._own]
            self._unshown |= {(model.key, rank): model for rank in own}
            self._due.set()

    def state(self) -> dict[str, Any]:
        return {
            "store": "memory" if self._store is None else self._store.name,
            "reachable": self._store is None or (self._error is None and self._is_read_back),
            "error": None if self._error is None else str(self._error),
            "unwritten": len(self._unwritten),
        }

    # Private

    def _differ(self, model: ModelRef, ranks: Collection[int]) -> None:
        if self._store is not None:
            self._unwritten |= {(model.key, rank): model for rank in ranks}
            self._due.set()
        self._flags.stir()

    async def _keep(self, store: RecordStore) -> None:
        while True:
            try:
                await self._serve(store)
            except CoordinationError as error:
                if self._error is None:
                    self._warn(f"records stay in memory only, {store.name} fails: {error}")
                self._error = error
            self._failures += 1
            pace = self._pace
            await asyncio.sleep(backoff_s(self._failures, pace.first_retry_s, pace.last_retry_s))

    async def _serve(self, store: RecordStore) -> None:
        """Read back, then write and read again, until something fails."""
        await self._visit(store.connect())
        await self._read_back(store)
        await self._write(store)
        if self._error is not None:
            logger.info("records=%s answers again", store.name)
        self._error, self._failures = None, 0
        self._is_read_back = True
        changed: asyncio.Task[None] | None = None
        try:
            while True:
                self._due.clear()
                await self._write(store)
                if not store.shared:
                    await self._due.wait()
                    continue
                if changed is None:
                    changed = asyncio.create_task(
                        store.changed(self._pace.refresh_s), name="wait for others' records"
                    )
                await self._either(changed)
                if changed.done():
                    changed.result()
                    changed = None
                    await self._read_back(store)
        finally:
            if changed is not None:
                await end([changed])

    async def _either(self, changed: asyncio.Task[None]) -> None:
        """Until there is something to write, or something may have changed."""
        if self._due.is_set():
            return
        due = asyncio.create_task(self._due.wait(), name="wait for records to write")
        try:
            await asyncio.wait({due, changed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            due.cancel()

    async def _visit(self, work: Any) -> Any:
        try:
            async with asyncio.timeout(self._pace.visit_s):
                return await work
        except TimeoutError:
            raise StoreUnavailable(
                f"the store did not answer within {self._pace.visit_s:g} s.",
                fix="Look at its log, or choose another coordination.store.",
            ) from None

    async def _read_back(self, store: RecordStore) -> None:
        """Take over what the store says, except of workers of which memory knows better."""
        models = {model.key: model for model in await self._visit(store.models())}
        known = {model.key: model for model in self._memory.models()}
        for key, model in (models | known).items():
            try:
                found = await self._visit(store.get(model)) if key in models else None
                self._take(model, found)
                self._warned.discard(f"read {key}")
            except StoreUnavailable:
                raise
            except CoordinationError as error:
                self._warn_once(f"read {key}", f"a record cannot be read back: {error}")
        self._flags.stir()

    def _take(self, model: ModelRef, found: ModelRecord | None) -> None:
        here = self._memory.get(model)
        mine = [
            worker
            for worker in (here.workers if here is not None else ())
            if (model.key, worker.worker_rank) in self._own
        ]
        theirs = {worker.worker_rank: worker for worker in (found.workers if found else ())}
        for worker in mine:
            if theirs.get(worker.worker_rank) != worker:  # it was lost there, or changed
                self._unwritten[model.key, worker.worker_rank] = model
        known_better = {rank for key, rank in self._unwritten if key == model.key}
        kept = [worker for rank, worker in theirs.items() if rank not in known_better]
        mine = [worker for worker in mine if worker.worker_rank in known_better]
        workers = sorted([*kept, *mine], key=lambda worker: worker.worker_rank)
        self._memory.put(ModelRecord(model, tuple(workers)))

    async def _write(self, store: RecordStore) -> None:
        await self._work_off(
            self._unwritten,
            lambda model, ranks: self._write_model(store, model, ranks),
            f"{store.name} does not take what is held",
        )
        if isinstance(store, ReadyMirror):
            mirror = store
            await self._work_off(
                self._unshown,
                lambda model, ranks: self._show(mirror, model, ranks),
                f"{store.name} does not show who is ready",
            )

    async def _work_off(self, due: dict[_Entry, ModelRef], work: _Work, fails: str) -> None:
        """Do the `work` of all workers that are `due`, model by model; they are again where it is
        broken off."""
        while due:
            (key, _), model = next(iter(due.items()))
            ranks = [rank for other, rank in due if other == key]
            for rank in ranks:
                del due[key, rank]
            is_over = False
            try:
                await work(model, ranks)
                is_over = True
                self._warned.discard(f"{fails} {key}")
            except StoreUnavailable:
                raise
            except CoordinationError as error:
                is_over = True
                self._warn_once(f"{fails} {key}", f"{fails} of {model.name}: {error}")
            finally:
                if not is_over:  # memory may change meanwhile; what it holds then is written
                    due |= {(key, rank): model for rank in ranks}

    def _warn_once(self, about: str, why: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            self._warn(why)

    async def _write_model(self, store: RecordStore, model: ModelRef, ranks: list[int]) -> None:
        record = self._memory.get(model)
        here = {each.worker_rank: each for each in (record.workers if record else ())}
        if gone := [rank for rank in ranks if rank not in here]:
            await self._visit(store.withdraw(model, gone))
        if new := [here[rank] for rank in ranks if rank in here]:
            await self._visit(store.publish(model, new))
            # Written anew, they are shown as not ready, whatever was shown before.
            ready = [each.worker_rank for each in new if self._is_ready(model, each)]
            await self.show_ready(model, ready)

    def _is_ready(self, model: ModelRef, worker: ModelWorker) -> bool:
        return self._flags.of(model, worker.worker_rank).ready

    async def _show(self, store: ReadyMirror, model: ModelRef, ranks: list[int]) -> None:
        signals = {rank: self._flags.of(model, rank) for rank in ranks}
        await self._visit(store.mirror_ready(model, signals))
