"""Records in a store alone, with no copy in memory: every read and write goes there and may fail.

ModelExpress' modes ``redis-only`` and ``kubernetes-only``. After a failure the store is left alone
for a moment, and whoever asks meanwhile is told at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from mesh.clock import Clock, backoff_s
from mesh.coordination.ready import ReadyFlags
from mesh.coordination.records import ModelRecord, ModelRef, ModelWorker
from mesh.coordination.store import RecordStore, T, Warn, at_the_end, in_time
from mesh.errors import CoordinationError, StoreUnavailable

_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 60.0
_CALL_TIMEOUT_S, _CLOSE_TIMEOUT_S = 10.0, 3.0


class DirectRecords:
    """As `mesh.coordination.layered.LayeredRecords`, in the store when a call returns, and none of
    it elsewhere. A call takes 10 s at the most, and raises what the store fails with."""

    def __init__(self, store: RecordStore, flags: ReadyFlags, clock: Clock, warn: Warn) -> None:
        self._store = store
        self._flags = flags
        self._clock = clock
        self._warn = warn
        self._connecting = asyncio.Lock()
        self._is_connected = False
        self._error: CoordinationError | None = None
        self._failures = 0
        self._attempt = 0
        """Rises with each failure, so that those who failed together count as one."""
        self._retry_at = 0.0

    def start(self) -> None:
        """The first call connects."""

    async def stop(self) -> None:
        """Let go."""
        await at_the_end(self._store.close(), _CLOSE_TIMEOUT_S, "closed")

    async def publish(self, model: ModelRef, workers: Sequence[ModelWorker]) -> None:
        await self._visit(lambda: self._store.publish(model, workers))

    async def withdraw(self, model: ModelRef, ranks: Collection[int]) -> None:
        await self._visit(lambda: self._store.withdraw(model, ranks))

    async def get(self, model: ModelRef) -> ModelRecord | None:
        return await self._visit(lambda: self._store.get(model))

    async def models(self) -> list[ModelRef]:
        return await self._visit(self._store.models)

    async def show_ready(self, model: ModelRef, ranks: Collection[int]) -> None:
        signals = {rank: self._flags.of(model, rank) for rank in ranks}
        await self._visit(lambda: self._store.mirror_ready(model, signals))

    def state(self) -> dict[str, Any]:
        return {
            "store": f"{self._store.name}-only",
            "reachable": self._is_connected and self._error is None,
            "error": None if self._error is None else str(self._error),
            "unwritten": 0,
        }

    async def _visit(self, work: Callable[[], Awaitable[T]]) -> T:
        if self._error is not None and self._clock.monotonic() < self._retry_at:
            raise self._error
        attempt = self._attempt

        async def visit() -> T:
            nonlocal attempt
            async with self._connecting:
                if not self._is_connected:
                    await self._store.connect()
                    self._is_connected = True
                attempt = self._attempt
            return await work()

        try:
            result = await in_time(visit(), _CALL_TIMEOUT_S)
        except StoreUnavailable as error:
            raise self._failed(error, attempt) from None
        self._error, self._failures = None, 0
        return result

    def _failed(self, error: StoreUnavailable, attempt: int) -> StoreUnavailable:
        if attempt != self._attempt:  # counted already; it may be connected again meanwhile
            return error
        self._attempt += 1
        if self._error is None:
            self._warn(f"records are not kept, {self._store.name} fails: {error}")
        self._error, self._is_connected = error, False
        self._failures += 1
        wait_s = backoff_s(self._failures, _FIRST_RETRY_S, _LAST_RETRY_S)
        self._retry_at = self._clock.monotonic() + wait_s
        return error
