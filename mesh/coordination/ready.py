"""Which workers are ready: in memory only, and for four hours at the most.

A worker is ready after a test inference on it has succeeded. The flag belongs to a running process
(the session), so it is never written down: after a restart nobody is ready until he says so again.
Knows nothing of records or stores. The fields and the limit are those of ModelExpress'
``mx:nixl_ready`` keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

from mesh.clock import Clock
from mesh.coordination.records import MAX_MODELS, MAX_WORKERS, ModelRef
from mesh.errors import RecordsFull

READY_LIMIT_S = 4 * 3600.0
MAX_FLAGS = MAX_MODELS * MAX_WORKERS // 16


@dataclass(frozen=True, slots=True)
class ReadySignal:
    """What a worker says of itself: which run of it, whether it serves, and whether a test
    inference on it has succeeded. Others may connect when both are so."""

    session_id: str
    ready: bool
    stability_verified: bool

    @property
    def counts(self) -> bool:
        """Whether others may connect."""
        return self.ready and self.stability_verified


NOT_READY = ReadySignal("", ready=False, stability_verified=False)


def new_session() -> str:
    """An id for one run of a worker."""
    return str(uuid4())


class ReadyFlags:
    """The signals of workers, each for `READY_LIMIT_S` after it came."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._flags: dict[tuple[str, int], tuple[ReadySignal, float]] = {}
        self._waiting: set[asyncio.Event] = set()

    def set(self, model: ModelRef, rank: int, signal: ReadySignal) -> None:
        """Take a worker's signal. Raises RecordsFull."""
        place = (model.key, rank)
        if place not in self._flags and len(self._flags) >= MAX_FLAGS:
            self._forget_old()
            if len(self._flags) >= MAX_FLAGS:
                raise RecordsFull(
                    f"{MAX_FLAGS} workers have said whether they are ready, which is the most.",
                    fix="Withdraw workers that are gone.",
                )
        self._flags[place] = (signal, self._clock.monotonic())
        self.stir()

    def clear(self, model: ModelRef, rank: int) -> None:
        """The worker is gone, or another run of it begins."""
        self._flags.pop((model.key, rank), None)

    def of(self, model: ModelRef, rank: int) -> ReadySignal:
        """What the worker said last; `NOT_READY` when that is too long ago."""
        signal, since = self._flags.get((model.key, rank), (NOT_READY, 0.0))
        if signal is not NOT_READY and self._is_old(since):
            return NOT_READY
        return signal

    def stir(self) -> None:
        """Something has changed: whoever waits looks again."""
        for event in self._waiting:
            event.set()

    @contextmanager
    def watching(self) -> Iterator[asyncio.Event]:
        """An event that is set at every change; the reader clears it."""
        news = asyncio.Event()
        self._waiting.add(news)
        try:
            yield news
        finally:
            self._waiting.discard(news)

    def _is_old(self, since: float) -> bool:
        return self._clock.monotonic() - since >= READY_LIMIT_S

    def _forget_old(self) -> None:
        old = [place for place, (_, since) in self._flags.items() if self._is_old(since)]
        for place in old:
            del self._flags[place]
