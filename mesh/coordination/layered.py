"""Records in memory, written through to a store behind: reads never wait, writes are best effort.

A write changes memory and returns; one task carries it to the store, and reads the store back when
it starts, after every outage and when somebody else may have changed it. Knows nothing of what the
store is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mesh.clock import backoff_s
from mesh.coordination.ready import ReadyFlags
from mesh.coordination.records import (
    MAX_MODELS,
    MAX_WORKERS,
    ModelRecord,
    ModelRef,
    ModelWorker,
    merged,
)
from mesh.coordination.store import RecordStore, T, Warn, at_the_end, in_time
from mesh.errors import CoordinationError, RecordsFull, StoreUnavailable
from mesh.processes.tasks import end, spawn

logger = logging.getLogger(__name__)

_Workers = set[tuple[ModelRef, int]]
"""Workers by their models and ranks."""


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
    """The records of all models as this node sees them. `start` first, `stop` last. Without a
    `store` it is memory alone.

    `flags` say who is ready, and tell whoever waits when the records have changed. `warn` is called
    once per outage and for each model of which the store takes or gives no record.
    """

    def __init__(
        self,
        store: RecordStore | None,
        flags: ReadyFlags,
        warn: Warn,
        times: StoreTimes = StoreTimes(),
    ) -> None:
        self._store = store
        self._flags = flags
        self._warn = warn
        self._times = times
        self._records: dict[ModelRef, ModelRecord] = {}
        self._own: _Workers = set()
        """What was published here."""
        self._unwritten: _Workers = set()
        """What memory and store differ in; memory is right. No more than memory holds and has held
        of its own."""
        self._unshown: _Workers = set()
        """Own workers of which the store may show something else than the flags say."""
        self._warned: set[tuple[ModelRef, str]] = set()
        self._wake = asyncio.Event()
        """There is something to write, or to read."""
        self._is_read_back = False
        self._error: CoordinationError | None = None
        self._failures = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to reach the store, if there is one."""
        if self._store is not None:
            self._task = spawn(self._keep(self._store), "write records through")

    async def stop(self) -> None:
        """Bring out what is not written yet, within a moment, and let go."""
        if self._store is None or self._task is None:
            return
        await end([self._task])
        if self._is_read_back and self._error is None:
            await at_the_end(self._write(self._store), self._times.stop_s, "all written")
        await at_the_end(self._store.close(), self._times.stop_s, "closed")

    async def publish(self, model: ModelRef, workers: Sequence[ModelWorker]) -> None:
        """Put workers into the model's record in memory, atomically; the store follows. Raises
        RankTaken and RecordsFull."""
        self._put(merged(model, self._records.get(model), workers))
        ranks = {each.worker_rank for each in workers}
        self._own |= {(model, rank) for rank in ranks}
        self._bring_out(self._unwritten, model, ranks)
        self._flags.stir()

    async def withdraw(self, model: ModelRef, ranks: Collection[int]) -> None:
        """Take workers out of memory; the store follows."""
        if (record := self._records.get(model)) is not None:
            self._put(record.without(ranks))
        gone = {(model, rank) for rank in ranks}
        self._own -= gone
        self._unshown -= gone
        self._bring_out(self._unwritten, model, ranks)
        self._flags.stir()

    async def get(self, model: ModelRef) -> ModelRecord | None:
        """The model's record, from memory."""
        return self._records.get(model)

    async def models(self) -> list[ModelRef]:
        """The models that have a record, from memory."""
        return list(self._records)

    async def show_ready(self, model: ModelRef, ranks: Collection[int]) -> None:
        """Let people see, where the store shows it, who is ready of these that are our own."""
        own = [rank for rank in ranks if (model, rank) in self._own]
        self._bring_out(self._unshown, model, own)

    def state(self) -> dict[str, Any]:
        """``{"store", "reachable", "error": why not | None, "unwritten": workers}``."""
        return {
            "store": "memory" if self._store is None else self._store.name,
            "reachable": self._store is None or (self._error is None and self._is_read_back),
            "error": None if self._error is None else str(self._error),
            "unwritten": len(self._unwritten),
        }

    # Memory

    def _put(self, record: ModelRecord) -> None:
        if not record.workers:
            self._records.pop(record.model, None)
            return
        if record.model not in self._records and len(self._records) >= MAX_MODELS:
            raise _full(f"records of {MAX_MODELS} models")
        if len(record.workers) > MAX_WORKERS:
            raise _full(f"{MAX_WORKERS} workers of {record.model.name}")
        self._records[record.model] = record

    def _bring_out(self, due: _Workers, model: ModelRef, ranks: Collection[int]) -> None:
        if self._store is not None:
            due |= {(model, rank) for rank in ranks}
            self._wake.set()

    # The store

    async def _keep(self, store: RecordStore) -> None:
        while True:
            try:
                await self._serve(store)
            except CoordinationError as error:
                if self._error is None:
                    self._warn(f"records stay in memory only, {store.name} fails: {error}")
                self._error = error
            self._failures += 1
            times = self._times
            await asyncio.sleep(backoff_s(self._failures, times.first_retry_s, times.last_retry_s))

    async def _serve(self, store: RecordStore) -> None:
        """Read back, then write and read again, until something fails."""
        await self._visit(store.connect())
        await self._read_back(store)
        await self._write(store)
        if self._error is not None:
            logger.info("records=%s answers again", store.name)
        self._error, self._failures = None, 0
        self._is_read_back = True
        while True:
            changed = asyncio.create_task(
                store.changed(self._times.refresh_s), name="wait for others' records"
            )
            changed.add_done_callback(lambda _: self._wake.set())
            try:
                while not changed.done():
                    self._wake.clear()
                    await self._write(store)
                    await self._wake.wait()
                changed.result()
            finally:
                await end([changed])
            await self._read_back(store)

    async def _visit(self, work: Awaitable[T]) -> T:
        return await in_time(work, self._times.visit_s)

    async def _read_back(self, store: RecordStore) -> None:
        """Take over what the store says, except of workers of which memory knows better."""
        stored = set(await self._visit(store.models()))
        for model in stored | self._records.keys():
            with self._told_once(model, f"{store.name} gives no record"):
                self._take(model, await self._visit(store.get(model)) if model in stored else None)
        self._flags.stir()

    def _take(self, model: ModelRef, found: ModelRecord | None) -> None:
        theirs = {} if found is None else found.by_rank
        here = self._records.get(model, ModelRecord(model, ())).by_rank
        mine = {rank: each for rank, each in here.items() if (model, rank) in self._own}
        # It was lost there, or changed.
        self._unwritten |= {(model, rank) for rank in mine if theirs.get(rank) != mine[rank]}
        known = {rank: w for rank, w in theirs.items() if (model, rank) not in self._unwritten}
        self._put(ModelRecord.of(model, {**known, **mine}))

    async def _write(self, store: RecordStore) -> None:
        async def write(model: ModelRef, ranks: set[int]) -> None:
            here = self._records.get(model, ModelRecord(model, ())).by_rank
            if gone := ranks - here.keys():
                await self._visit(store.withdraw(model, gone))
            if new := [here[rank] for rank in ranks & here.keys()]:
                await self._visit(store.publish(model, new))
                # Written anew, they are shown as not ready, whatever was shown before.
                ready = [rank for rank in ranks if self._flags.of(model, rank).ready]
                await self.show_ready(model, ready)

        async def show(model: ModelRef, ranks: set[int]) -> None:
            signals = {rank: self._flags.of(model, rank) for rank in ranks}
            await self._visit(store.mirror_ready(model, signals))

        await self._work_off(self._unwritten, write, f"{store.name} does not take what is held")
        await self._work_off(self._unshown, show, f"{store.name} does not show who is ready")

    async def _work_off(
        self, due: _Workers, work: Callable[[ModelRef, set[int]], Awaitable[None]], fails: str
    ) -> None:
        """Do the `work` of all workers that are `due`, model by model; they are again where it is
        broken off."""
        while due:
            model, _ = next(iter(due))
            ranks = {rank for other, rank in due if other == model}
            batch = {(model, rank) for rank in ranks}
            due -= batch
            try:
                with self._told_once(model, fails):
                    await work(model, ranks)
            except (StoreUnavailable, asyncio.CancelledError):
                due |= batch  # memory may change meanwhile; what it holds then is written
                raise

    @contextmanager
    def _told_once(self, model: ModelRef, fails: str) -> Iterator[None]:
        """What fails for one record only keeps no other back: people are told, until it goes well
        again."""
        try:
            yield
            self._warned.discard((model, fails))
        except StoreUnavailable:
            raise
        except CoordinationError as error:
            if (model, fails) not in self._warned:
                self._warned.add((model, fails))
                self._warn(f"{fails} of {model.name}: {error}")


def _full(what: str) -> RecordsFull:
    return RecordsFull(
        f"There are {what} already, which is the most.",
        fix="Withdraw what is no longer held, or keep other models in another store.",
    )
