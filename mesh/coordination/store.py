"""What a store of records does, whatever keeps them, and how long anybody waits for one.

Every method may raise CoordinationError: StoreUnavailable when the store does not answer,
StoreRefused when it will not, BadRecord when it holds something else than records.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from mesh.coordination.ready import ReadySignal
from mesh.coordination.records import ModelRecord, ModelRef, ModelWorker
from mesh.errors import CoordinationError, StoreClientMissing, StoreUnavailable

T = TypeVar("T")

logger = logging.getLogger(__name__)

Warn = Callable[[str], None]
"""Tells people, in a sentence, that something is not as it should be."""


class RecordStore(Protocol):
    """Keeps one record per model beyond this process. `connect` first, `close` last."""

    name: str

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
        """Wait until somebody else may have changed a record, `timeout_s` at the most; for ever
        where nobody else writes to it."""

    async def mirror_ready(self, model: ModelRef, signals: Mapping[int, ReadySignal]) -> None:
        """Show people of workers, by rank, whether they are ready, where the store shows it. It is
        never read back."""
        return

    async def close(self) -> None:
        """Let go of connections and files."""


async def in_time(work: Awaitable[T], limit_s: float) -> T:
    """What a store gives. Raises StoreUnavailable after `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            return await work
    except TimeoutError:
        raise StoreUnavailable(
            f"the store did not answer within {limit_s:g} s.",
            fix="Look at its log, or choose another coordination.store.",
        ) from None


async def at_the_end(work: Awaitable[None], limit_s: float, what: str) -> None:
    """Do the last that a store is asked for. Where that fails, only the log says that it is not
    `what`."""
    try:
        await in_time(work, limit_s)
    except CoordinationError as error:
        logger.warning("records=%s not %s", error, what)


def client_missing(package: str, extra: str) -> StoreClientMissing:
    """The error of a store whose Python package is not installed, or not whole."""
    return StoreClientMissing(
        f"The Python package {package!r}, which speaks to the configured store, is not installed.",
        fix=f"Run `pip install 'hearthnet[{extra}]'`, or set coordination.store to sqlite.",
        param="coordination.store",
    )
