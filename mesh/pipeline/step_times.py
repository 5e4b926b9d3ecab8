"""How long one hop takes over the steps of a session: for percentiles, and for whoever counts.

Knows neither what the steps are about nor what is slow.
"""

from __future__ import annotations

from collections import deque

from mesh.health.percentiles import percentile
from mesh.health.series import StepTimes
from mesh.types import HopTiming, RouteHop
from mesh.wire.messages import Result

TIMED_STEPS = 512
"""How many of the latest steps are kept."""

_LARGE_BYTES = 128 << 10
"""There and back: by what such a step takes longer than others, the way's speed is known."""


class TimedSteps:
    """What is known of the steps that were answered in one session.

    `count` of them were, the last one at the loop's time `last_at`; 0 before the first.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last_at = 0.0
        self._alone: deque[tuple[float, float]] = deque(maxlen=TIMED_STEPS)
        self._large: deque[tuple[int, float]] = deque(maxlen=TIMED_STEPS)
        self._unreported: deque[StepTimes] = deque(maxlen=TIMED_STEPS)

    def answered(
        self, result: Result, sent_at: float, now: float, *, nbytes: int, is_behind: bool
    ) -> None:
        """A step of `nbytes` was answered `now`; it `is_behind` where it had to wait for others of
        the session, and tells nothing of the way then."""
        self.count += 1
        self.last_at = now
        total_ms = (now - sent_at) * 1e3
        compute_ms = result.compute_us / 1e3
        if not is_behind:
            self._alone.append((total_ms, compute_ms))
            moved = nbytes + len(result.tensor.data)
            if nbytes and moved >= _LARGE_BYTES:
                self._large.append((moved, total_ms - compute_ms))
        self._unreported.append((total_ms, compute_ms, result.queue_us / 1e3))

    def of(self, hop: RouteHop) -> HopTiming:
        """Percentiles over the latest steps that waited for no other, in milliseconds; all are of
        that `hop`."""
        totals = sorted(total for total, _ in self._alone)
        computes = sorted(compute for _, compute in self._alone)
        way_ms = percentile(totals, 0.50) - percentile(computes, 0.50)
        rates = sorted(size / 1e3 / (ms - way_ms) for size, ms in self._large if ms > way_ms)
        return HopTiming(
            shard_id=hop.shard.shard_id,
            node=hop.shard.node_name,
            layers=str(hop.layers),
            steps=self.count,
            p50_ms=percentile(totals, 0.50),
            p95_ms=percentile(totals, 0.95),
            compute_p50_ms=percentile(computes, 0.50),
            mb_s=percentile(rates, 0.50),
        )

    def take(self) -> list[StepTimes]:
        """Those since the last call, at most `TIMED_STEPS` of them."""
        steps = list(self._unreported)
        self._unreported.clear()
        return steps
