"""How long the steps of one session took, seen from the asker."""

from __future__ import annotations

from collections import deque

from mesh.percentiles import percentile
from mesh.types import HopTiming, RouteHop

TIMED_STEPS = 512
"""How many of the latest steps the percentiles are taken over."""


class StepTimings:
    """Milliseconds of the latest steps; `count` is of all."""

    def __init__(self) -> None:
        self.count = 0
        self._latest: deque[tuple[float, float]] = deque(maxlen=TIMED_STEPS)
        self._unreported: deque[float] = deque(maxlen=TIMED_STEPS)

    def add(self, total_ms: float, compute_ms: float) -> None:
        """One more step: how long it took in all, and how much of that was computing."""
        self.count += 1
        self._latest.append((total_ms, compute_ms))
        self._unreported.append(total_ms)

    def take(self) -> list[float]:
        """What steps took since the last call, at most `TIMED_STEPS` of them."""
        latencies = list(self._unreported)
        self._unreported.clear()
        return latencies

    def of(self, hop: RouteHop) -> HopTiming:
        """Percentiles, under the name of the hop."""
        totals = sorted(total for total, _ in self._latest)
        computes = sorted(compute for _, compute in self._latest)
        return HopTiming(
            shard_id=hop.shard.shard_id,
            node=hop.shard.node_name,
            layers=str(hop.layers),
            steps=self.count,
            p50_ms=percentile(totals, 0.50),
            p95_ms=percentile(totals, 0.95),
            compute_p50_ms=percentile(computes, 0.50),
        )
