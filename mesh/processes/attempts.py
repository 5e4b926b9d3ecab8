"""What could not be loaded, and when that is tried again.

A reason that may pass is given time, twice as much after each failure; where memory was short, no
longer than until clearly more of it is free. A load that cost the process
its life is not repeated before more memory is free than there was then, by all that it needs; after
a few lives not at all; nor are weights that keep changing in memory. An operator's word (`forget`)
takes everything back. Decides, and loads nothing; time and memory are told to it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import inf

from mesh.clock import backoff_s
from mesh.errors import (
    DeviceFailed,
    MeshError,
    NotEnoughMemory,
    WeightsCorrupted,
    WeightsDamaged,
)
from mesh.processes.lifecycle import ChildEnding, LoadNeed

FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 300.0
ROOMIER_MB = 64
"""By so much more has to be free for a load that found too little to be tried before its time."""
MAX_LIVES = 3
"""So many processes may die of one load."""
MAX_RELOADS = 2
"""So often weights that have changed are loaded again: what changes more often is the memory."""

LESS = (
    "Hold fewer layers (--layers), compute in another number format (--dtype), lower kv_tokens, or"
    " end something else on this machine; `hearthnet resume` has it tried again at once."
)


@dataclass(slots=True)
class _Failure:
    error: MeshError
    again_at: float
    count: int
    lives: int = 0
    enough_mb: int = 0
    """Main memory that has to be free before it is tried again."""
    sooner_at: float = inf
    sooner_mb: float = inf
    """From then on it is tried before its time once so much is free where it is to be."""


class Attempts:
    """The failures of one owner's loads, by name. Times are seconds of one monotonic clock."""

    def __init__(self, first_wait_s: float = FIRST_WAIT_S) -> None:
        """`first_wait_s` is the time that a reason gets to pass after the first failure."""
        self._first_wait_s = first_wait_s
        self._failures: dict[str, _Failure] = {}
        self._corrupted: Counter[str] = Counter()

    def failed(self, name: str, error: MeshError, now: float, room_mb: int | None = None) -> None:
        """It failed, and said why; `room_mb` were free where it was to be."""
        known = self._failures.get(name)
        count = 1 if known is None else known.count + 1
        wait_s = backoff_s(count, self._first_wait_s, LONGEST_WAIT_S)
        lives, enough_mb = (known.lives, known.enough_mb) if known is not None else (0, 0)
        failure = _Failure(error, now + wait_s, count, lives, enough_mb)
        if room_mb is not None and isinstance(error, NotEnoughMemory):
            failure.sooner_at = now + self._first_wait_s
            failure.sooner_mb = room_mb + ROOMIER_MB
        self._failures[name] = failure

    def died(self, loading: LoadNeed, ending: ChildEnding, now: float) -> MeshError:
        """The process ended while it loaded this. The error that says so."""
        error = _error(loading, ending)
        self.failed(loading.name, error, now)
        failure = self._failures[loading.name]
        failure.lives += 1
        if ending.was_killed:
            failure.enough_mb = loading.free_mb + loading.need_mb
        return error

    def corrupted(self, name: str, error: MeshError) -> MeshError:
        """Its weights have changed after they were loaded. The error that says what comes of it."""
        self._corrupted[name] += not isinstance(error, WeightsDamaged)  # no fault of the memory
        if self._corrupted[name] <= MAX_RELOADS:
            return error
        final = WeightsCorrupted(
            error.message,
            fix="It happened too often: test this machine's memory, then `hearthnet resume`.",
        )
        self._failures[name] = _Failure(final, inf, 1)
        return final

    def succeeded(self, name: str) -> None:
        """It is here."""
        self._failures.pop(name, None)

    def forget(self) -> None:
        """Somebody wants all of it tried again, whatever happened."""
        self._failures.clear()
        self._corrupted.clear()

    def forget_one(self, name: str) -> None:
        """This is to be loaded otherwise: how it failed before says nothing of that."""
        self._failures.pop(name, None)

    def why_not(self, name: str, now: float, free_mb: int, room_mb: int = 0) -> MeshError | None:
        """Why it is not to be tried now, with so much of main memory free and so much where it is
        to be; None when it may be."""
        failure = self._failures.get(name)
        if failure is None:
            return None
        is_roomier = now >= failure.sooner_at and room_mb >= failure.sooner_mb
        is_early = now < failure.again_at and not is_roomier
        waits = is_early or free_mb < failure.enough_mb
        if waits or failure.lives >= MAX_LIVES or not failure.error.retryable:
            return failure.error
        return None


def _error(loading: LoadNeed, ending: ChildEnding) -> MeshError:
    if not ending.was_killed:
        return DeviceFailed(
            f"The process that loaded {loading.name} is gone: {ending}.",
            fix="See its log; it is tried again, a few times and ever later.",
        )
    by = "by the kernel, which had no memory left" if ending.of_memory else "most likely for memory"
    return NotEnoughMemory(
        f"The process that loaded {loading.name} was killed, {by}: that needs about"
        f" {loading.need_mb} MiB, and {loading.free_mb} MiB were free. It is not tried again before"
        f" {loading.free_mb + loading.need_mb} MiB are.",
        fix=LESS,
    )
