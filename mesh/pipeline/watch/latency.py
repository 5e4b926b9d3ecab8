"""How long the steps of a hop take, and after how long one is taken as stalled.

Learned per shard and number of rows, over all generations of this asker. Progress is what counts: a
limit runs from the last answer, not from the last byte, so that a stopped process, a connection
that is open at one end only, and one that trickles are the same thing. Time comes in as numbers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from mesh.errors import PipelineStalled
from mesh.health.percentiles import percentile

FLOOR_S = 1.0
"""No step is given up sooner: what another process on the machine, a garbage collection or a Wi-Fi
retry may take, and much more than a replay of a short answer costs."""

SAMPLES = 3
"""Steps of a size that must be known before its limit adapts."""

_WINDOW = 512
_GAIN = 1 / 8
"""Of a new sample, as in TCP's retransmission timer (RFC 6298)."""

_MULTIPLE = 6.0
"""Of the mean. Four deviations, as there, are less: no step of half a limit becomes a sample."""

_TOGETHER = 64
"""Answers that are looked at to see which steps were computed at the same time."""

_PATIENCE = 3.0
"""Limits' worth of time that may be lost to slow answers in a row."""


class StepOverdue(PipelineStalled):
    """A hop has owed an answer since `since` for longer than its limit, or answers too slowly."""

    def __init__(self, message: str, *, fix: str, since: float) -> None:
        super().__init__(message, fix=fix)
        self.since = since


@dataclass(slots=True)
class _Usual:
    """Running mean, in seconds."""

    count: int = 0
    mean_s: float = 0.0

    def add(self, value_s: float) -> None:
        self.count += 1
        self.mean_s += (_GAIN if self.count > 1 else 1.0) * (value_s - self.mean_s)

    @property
    def limit_s(self) -> float:
        return _MULTIPLE * self.mean_s


@dataclass(frozen=True, slots=True)
class _AnsweredStep:
    """A step of a size, waited for from `since` until `at`."""

    size: int
    since: float
    at: float

    def waited_for(self, other: _AnsweredStep) -> bool:
        """Whether `other` is larger, and was computed meanwhile."""
        return other.size > self.size and other.since < self.at and self.since < other.at


@dataclass(slots=True)
class HopLatency:
    """One shard's steps. `ceiling_s` is the configured limit, and the one of unknown sizes.

    Every time the shard was given up for slowness its limits double: if it comes back because
    nobody else can do the work, it gets the time it needs. One silence takes down all that wait
    meanwhile and is one strike: what waits since before the last strike is judged without it.
    """

    ceiling_s: float
    strikes: int = 0
    answered_at: float = 0.0
    """When it last answered any generation of this asker."""
    _usual: dict[int, _Usual] = field(default_factory=dict)
    _recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _answers: deque[_AnsweredStep] = field(default_factory=lambda: deque(maxlen=_TOGETHER))
    _slow: deque[_AnsweredStep] = field(default_factory=lambda: deque(maxlen=_TOGETHER))
    """Of the latest answers, the slow ones in a row."""
    _in_time: int = 0
    _struck_at: float = -inf

    def limit_s(self, rows: int, since: float = inf) -> float:
        """How long a step of `rows` rows, waited for since then, may go without an answer."""
        usual = self._usual.get(_size(rows))
        if usual is None or usual.count < SAMPLES:
            return self.ceiling_s
        strikes = max(0, self.strikes - (since < self._struck_at))
        return float(min(self.ceiling_s, max(FLOOR_S, usual.limit_s) * 2**strikes))

    def answered(self, rows: int, elapsed_s: float) -> None:
        """A step took so long, until now. A slow one is counted, and not taken for the new
        normal."""
        self._recent_s.append(elapsed_s)
        answer = _AnsweredStep(_size(rows), self.answered_at - elapsed_s, self.answered_at)
        self._answers.append(answer)
        limit_s = self.limit_s(rows)
        if limit_s < self.ceiling_s and elapsed_s >= limit_s / 2:
            self._slow.append(answer)
            self._in_time = 0
            return
        self._slow.clear()
        self._usual.setdefault(_size(rows), _Usual()).add(elapsed_s)
        self._in_time += 1
        if self._in_time >= _WINDOW and self.strikes:
            self.strikes, self._in_time = self.strikes - 1, 0

    def is_slow(self, rows: int) -> bool:
        """Whether it answers, but has long stopped doing so at its usual pace. What waited for a
        larger step of another generation to be computed is not held against it."""
        lost_s = sum(
            slow.at - slow.since
            for slow in self._slow
            if not any(slow.waited_for(other) for other in self._answers)
        )
        return lost_s > _PATIENCE * self.limit_s(rows)

    def given_up(self, since: float, now: float) -> bool:
        """It was replaced for a step waited for since then; whether that is another strike."""
        if since < self._struck_at:
            return False
        self.strikes = min(self.strikes + 1, 10)
        self._struck_at = now
        self._slow.clear()
        return True

    def percentile_ms(self, share: float) -> float:
        """Of the latest steps, all sizes together; 0 when there are none."""
        return percentile(sorted(self._recent_s), share) * 1e3


def _size(rows: int) -> int:
    """Steps of about the same number of rows are judged together: powers of two."""
    return rows.bit_length()
