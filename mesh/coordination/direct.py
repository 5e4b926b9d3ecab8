"""Records in a store alone, with no copy in memory: every read and write goes there and may fail.

ModelExpress' modes ``redis-only`` and ``kubernetes-only``. After a failure the store is left alone
for a moment, and whoever asks meanwhile is told at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, TypeVar

from mesh.clock import Clock
from mesh.coordination.layered import Warn
from mesh.coordination.ready import ReadyFlags
from mesh.coordination.records import ModelRecord, ModelRef, ModelWorker
from mesh.coordination.store import ReadyMirror, RecordStore
from mesh.errors import CoordinationError, StoreUnavailable

T = TypeVar("T")

logger = logging.getLogger(__name__)

_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 60.0
_CALL_TIMEOUT_S, _CLOSE_TIMEOUT_S = 10.0, 3.0


class DirectRecords:
    """See `mesh.coordination.layered.Records`. A call takes 10 s at the most."""

    def __init__(
        self,
        store: RecordStore,
        flags: ReadyFlags,
        clock: Clock,
        warn: Warn,
    ) -> None:
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
        """See `Records`; the first call connects."""

    async def stop(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._store.close()
        except (CoordinationError, TimeoutError) as error:
            logger.warning("records=%s not closed: %s", self._store.name, error)

    async def publish(self, model: ModelRef, workers: Sequence[ModelWorker]) -> None:
        """See `Records`; in the store when it returns."""
        await self._visit(lambda: self._store.publish(model, workers))

    async def withdraw(self, model: ModelRef, ranks: Collection[int]) -> None:
        """See `Records`; out of the store when it returns."""
        await self._visit(lambda: self._store.withdraw(model, ranks))

    async def get(self, model: ModelRef) -> ModelRecord | None:
        return await self._visit(lambda: self._store.get(model))

    async def models(self) -> list[ModelRef]:
        return await self._visit(self._store.models)

    async def show_ready(self, model: ModelRef, ranks: Collection[int]) -> None:
        """See `Records`; in the store when it returns."""
        store = self._store
        if isinstance(store, ReadyMirror):
            signals = {rank: self._flags.of(model, rank) for rank in ranks}
            await self._visit(lambda: store.mirror_ready(model, signals))

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
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                async with self._connecting:
                    if not self._is_connected:
                        await self._store.connect()
                        self._is_connected = True
                    attempt = self._attempt
                result = await work()
        except TimeoutError:
            raise self._failed(_late(), attempt) from None
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
        wait_s = min(_LAST_RETRY_S, _FIRST_RETRY_S * 2.0 ** min(self._failures - 1, 16))
        self._retry_at = self._clock.monotonic() + wait_s
        return error


def _late() -> StoreUnavailable:
    return StoreUnavailable(
        f"the store did not answer within {_CALL_TIMEOUT_S:g} s.",
        fix="Look at its log, or choose another coordination.store.",
    )
