"""Which nodes are there: healthy, suspect or lost, from when they were last heard.

A phi accrual detector (Hayashibara et al., 2004): suspicion grows with how unusual a silence is for
this very node, so that a lively wired one is doubted sooner than a laptop on Wi-Fi. SWIM's indirect
probes were left out: every node of a household talks to every other directly, and what matters to
an asker is whether *it* reaches a node. From SWIM's Lifeguard comes local health: when our own loop
was late, silences are our fault first; they are shortened by the pause and all limits are stretched
for a while. Knows nothing of links or routes; time is injected.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from mesh.clock import Clock
from mesh.types import NodeId

WINDOW = 64
"""Intervals remembered per node."""

PHI_SUSPECT = 8.0
"""One wrong suspicion in 10^8 silences, were they normally distributed."""

PHI_LOST = 12.0
MAX_NODES = 256
_LEAST_DEVIATION = 0.25
"""Of the mean: measured deviations of a quiet network are too good to be true."""

_LATE_S = 0.2
_SAME_S = 0.05
"""Two ways to tell the time of one arrival differ by less."""

_MOST_STRETCH = 4.0


class Verdict(StrEnum):
    """What to think of a node; a suspect one gets no new work while others can do it."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """A node's verdict and what it rests on. `phi` is the improbability of `silent_s`, in tens."""

    verdict: Verdict
    phi: float
    silent_s: float


class _Arrivals:
    """One node's heartbeats."""

    def __init__(self, now: float) -> None:
        self.last = now
        self.intervals: deque[float] = deque(maxlen=WINDOW)


class FailureDetector:
    """Judges nodes by their heartbeats.

    `expected_s` is how often a node promises to be heard, `ceiling_s` after what silence it counts
    as lost whatever its habits are. Until a node's habits are known, `expected_s` stands for them.
    """

    def __init__(self, clock: Clock, *, expected_s: float, ceiling_s: float) -> None:
        self._clock = clock
        self._expected_s = expected_s
        self._ceiling_s = ceiling_s
        self._nodes: dict[NodeId, _Arrivals] = {}
        self._stretch = 1.0

    def heard(self, node_id: NodeId, *, ago_s: float = 0.0) -> None:
        """Something of the node arrived `ago_s` before now; an older word than the last is none."""
        at = self._clock.monotonic() - ago_s
        arrivals = self._nodes.get(node_id)
        if arrivals is None:
            if len(self._nodes) < MAX_NODES:
                self._nodes[node_id] = _Arrivals(at)
        elif at > arrivals.last + _SAME_S:
            # A burst of news does not promise that the next one comes as soon.
            arrivals.intervals.append(max(self._expected_s, at - arrivals.last))
            arrivals.last = at

    def keep_only(self, linked: Collection[NodeId]) -> None:
        """Forget all other nodes: a closed link is known to others, and no silence."""
        for gone in self._nodes.keys() - set(linked):
            del self._nodes[gone]

    def ticked(self, late_s: float) -> None:
        """Our own loop ran `late_s` later than it wanted to; call it regularly.

        What arrived meanwhile may not have been read yet, so that time counts for nobody's silence.
        """
        if late_s < _LATE_S:
            self._stretch = max(1.0, self._stretch * 0.8)
            return
        self._stretch = min(_MOST_STRETCH, self._stretch + late_s)
        for arrivals in self._nodes.values():
            arrivals.last += late_s

    def health(self, node_id: NodeId) -> NodeHealth:
        """The present verdict; a node never heard of is lost."""
        arrivals = self._nodes.get(node_id)
        if arrivals is None:
            return NodeHealth(Verdict.LOST, math.inf, math.inf)
        silent_s = max(0.0, self._clock.monotonic() - arrivals.last)
        effective_s = silent_s / self._stretch
        phi = self._phi(arrivals, effective_s)
        if phi >= PHI_LOST or effective_s >= self._ceiling_s:
            return NodeHealth(Verdict.LOST, phi, silent_s)
        if phi >= PHI_SUSPECT or effective_s >= self._ceiling_s * 2 / 3:
            return NodeHealth(Verdict.SUSPECT, phi, silent_s)
        return NodeHealth(Verdict.HEALTHY, phi, silent_s)

    def _phi(self, arrivals: _Arrivals, silent_s: float) -> float:
        """-log10 of how probable a silence at least as long is."""
        # The promise weighs like two measured intervals: one odd sample decides nothing.
        seen = [self._expected_s, self._expected_s, *arrivals.intervals]
        mean = sum(seen) / len(seen)
        variance = sum((value - mean) ** 2 for value in seen) / len(seen)
        deviation = max(math.sqrt(variance), _LEAST_DEVIATION * mean)
        tail = 0.5 * math.erfc((silent_s - mean) / (deviation * math.sqrt(2)))
        return math.inf if tail <= 0.0 else -math.log10(tail)
