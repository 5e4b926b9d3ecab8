"""How long single rows wait for others to be computed with.

A pass over the weights costs nearly the same for one row as for four. Sessions that go round over
several hops come back in groups, and a device that starts with the first of a group splits it, so
that all hops read their weights for one or two rows each time. Knows no tasks and no clock.
"""

from __future__ import annotations

from collections.abc import Callable

PATIENCE = 2.0
"""How often the time of a row alone a row waits at most for half of the others."""

LONGEST_WAIT_S = 0.15
"""Beyond that nobody is waited for, however slow the machine is."""

ENOUGH_ROWS = 4
"""More are not waited for unless they are known to come cheap: the weights are then the smaller
part of what a row costs."""

MOST_ROWS = 32

_CHEAP = 1.5
"""Twice the rows are worth waiting for when they take no more than this times as long."""

_MOST_SKIPPED = 256


def enough_rows(took_ms: Callable[[int], float | None]) -> int:
    """How many rows are worth waiting for where so many at once take `took_ms`, None: not known."""
    rows = ENOUGH_ROWS
    while rows < MOST_ROWS:
        alone, doubled = took_ms(rows), took_ms(2 * rows)
        if alone is None or doubled is None or doubled > _CHEAP * alone:
            break
        rows *= 2
    return rows


class Gathering:
    """One device's. Half of the streams are waited for, at most: the others are meanwhile at
    another hop, or at their askers. Who has waited in vain waits less and less often."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._penalty = 1
        self._skipped = 0

    def wait_s(
        self,
        rows: int,
        streams: int,
        alone_s: float | None,
        now: float,
        enough: int = ENOUGH_ROWS,
    ) -> float:
        """For how long `rows` that wait, of so many `streams`, should go on waiting; 0: not at all.

        `alone_s` is what a row takes alone, None when that is not known; `enough` is what
        `enough_rows` says. When this is 0 they are taken to be computed.
        """
        if self._since is None:
            self._since = now
            if self._skipped:
                self._skipped -= 1
                return self._go()
        if alone_s is None or rows >= min(streams // 2, enough):
            if now > self._since:
                self._penalty = max(1, self._penalty // 2)  # it was worth the while
            return self._go()
        left = self._since + min(PATIENCE * alone_s, LONGEST_WAIT_S) - now
        if left > 0:
            return left
        self._skipped = self._penalty
        self._penalty = min(2 * self._penalty, _MOST_SKIPPED)
        return self._go()

    def _go(self) -> float:
        self._since = None
        return 0.0
