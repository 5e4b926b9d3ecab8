"""Which workers are ready: in memory only, and for four hours at the most.

A worker is ready after a test inference on it has succeeded. That is so of a running process and so
never written down: after a restart nobody is ready until he says so again. Knows nothing of records
or stores. The fields and the limit are those of ModelExpress' ``mx:nixl_ready`` keys.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from mesh.clock import Clock
from mesh.coordination.records import ModelRef

READY_LIMIT_S = 4 * 3600.0


@dataclass(frozen=True, slots=True)
class ReadySignal:
    """What a worker says of itself: whether it serves, and whether a test inference on it has
    succeeded."""

    ready: bool
    stability_verified: bool

    @property
    def counts(self) -> bool:
        """Whether others may connect."""
        return self.ready and self.stability_verified


READY = ReadySignal(ready=True, stability_verified=True)
NOT_READY = ReadySignal(ready=False, stability_verified=False)


class ReadyFlags:
    """The signals of workers, each for `READY_LIMIT_S` after it came. Who sets one clears it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._flags: dict[tuple[ModelRef, int], tuple[ReadySignal, float]] = {}
        self.changed = asyncio.Event()
        """Set at the next change; then there is another one in its place."""

    def set(self, model: ModelRef, rank: int, signal: ReadySignal) -> None:
        """Take a worker's signal."""
        self._flags[model, rank] = (signal, self._clock.monotonic())
        self.stir()

    def clear(self, model: ModelRef, rank: int) -> None:
        """The worker is gone, or another run of it begins."""
        self._flags.pop((model, rank), None)

    def of(self, model: ModelRef, rank: int) -> ReadySignal:
        """What the worker said last; `NOT_READY` when that is too long ago."""
        signal, since = self._flags.get((model, rank), (NOT_READY, 0.0))
        is_old = self._clock.monotonic() - since >= READY_LIMIT_S
        return NOT_READY if is_old else signal

    def stir(self) -> None:
        """Something has changed: whoever waits looks again."""
        self.changed.set()
        self.changed = asyncio.Event()
