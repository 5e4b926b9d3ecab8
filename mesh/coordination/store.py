"""What a store of records does, whatever keeps them, and the store in memory.

Every method may raise CoordinationError: StoreUnavailable when the store does not answer,
StoreRefused when it will not, BadRecord when it holds something else than records.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

from mesh.coordination.ready import ReadySignal
from mesh.coordination.records import (
    MAX_MODELS,
    MAX_WORKERS,
    ModelRecord,
    ModelRef,
    ModelWorker,
    merged,
)
from mesh.errors import RecordsFull, StoreClientMissing


class RecordStore(Protocol):
    """Keeps one record per model beyond this process. `connect` first, `close` last.

    `shared` says whether other nodes write to it too.
    """

    name: str
    shared: bool

    async def connect(self) -> None:
        """Reach it and make it ready; again after it was lost."""

    async def publish(self, model: ModelRef, workers: Sequence[ModelWorker]) -> None:
        """Put these workers into the model's record, in one atomic step. May raise RankTaken."""

    async def withdraw(self, model: ModelRef, ranks: Collection[int]) -> None:
        """Take workers out; a record without workers goes."""

    async def get(self, model: ModelRef) -> ModelRecord | None:
        """The model's record."""

    async def models(self) -> list[ModelRef]:
        """The models that have a record."""

    async def changed(self, timeout_s: float) -> None:
        """Wait until somebody may have changed a record, `timeout_s` at the most."""

    async def close(self) -> None:
        """Let go of connections and files."""


@runtime_checkable
class ReadyMirror(Protocol):
    """A store that shows people who is ready. It is never read back."""

    async def mirror_ready(self, model: ModelRef, signals: dict[int, ReadySignal]) -> None:
        """Show of workers, by rank, that they are ready, or are not any more."""


class MemoryRecords:
    """The records in memory. Every method is one step of the event loop, and so atomic."""

    def __init__(self) -> None:
        self._records: dict[str, ModelRecord] = {}

    def publish(self, model: ModelRef, workers: Sequence[ModelWorker]) -> None:
        """As `RecordStore.publish`. Raises RankTaken and RecordsFull."""
        self.put(merged(model, self._records.get(model.key), workers))

    def put(self, record: ModelRecord) -> None:
        """Put a whole record in the place of the model's. Raises RecordsFull."""
        key = record.model.key
        if not record.workers:
            self._records.pop(key, None)
            return
        if key not in self._records and len(self._records) >= MAX_MODELS:
            raise _full(f"records of {MAX_MODELS} models")
        if len(record.workers) > MAX_WORKERS:
            raise _full(f"{MAX_WORKERS} workers of {record.model.name}")
        self._records[key] = record

    def withdraw(self, model: ModelRef, ranks: Collection[int]) -> None:
        """As `RecordStore.withdraw`."""
        record = self._records.get(model.key)
        if record is not None:
            self.put(record.without(ranks))

    def get(self, model: ModelRef) -> ModelRecord | None:
        """As `RecordStore.get`."""
        return self._records.get(model.key)

    def models(self) -> list[ModelRef]:
        """As `RecordStore.models`."""
        return [record.model for record in self._records.values()]


def _full(what: str) -> RecordsFull:
    return RecordsFull(
        f"There are {what} already, which is the most.",
        fix="Withdraw what is no longer held, or keep other models in another store.",
    )


def client_missing(package: str, extra: str) -> StoreClientMissing:
    """The error of a store whose Python package is not installed."""
    return StoreClientMissing(
        f"The Python package {package!r}, which speaks to the configured store, is not installed.",
        fix=f"Run `pip install 'hearthnet[{extra}]'`, or set coordination.store to sqlite.",
        param="coordination.store",
    )
