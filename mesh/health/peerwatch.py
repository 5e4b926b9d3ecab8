"""Keeps the failure detector fed from the control links and tells of every change of a verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from mesh.clock import tick
from mesh.health.detector import FailureDetector, NodeHealth, Verdict
from mesh.types import NodeId

TICK_S = 0.5

Silences = Callable[[], Iterable[tuple[NodeId, float]]]
"""Every linked peer and for how many seconds nothing came from it."""


class PeerWatch:
    """Owns the verdicts on all linked peers; `on_change` is called with each new one.

    A peer whose link is gone is forgotten: the directory knows that it is offline.
    """

    def __init__(
        self,
        detector: FailureDetector,
        silences: Silences,
        on_change: Callable[[NodeId, NodeHealth], None],
    ) -> None:
        self._detector = detector
        self._silences = silences
        self._on_change = on_change
        self._known: dict[NodeId, Verdict] = {}

    def verdict(self, node_id: NodeId) -> Verdict:
        """What to think of a peer now; one that was not judged yet is healthy."""
        return self._known.get(node_id, Verdict.HEALTHY)

    async def run(self) -> None:
        """Look every `TICK_S` seconds, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            due = await tick(TICK_S)
            self.look(max(0.0, loop.time() - due))

    def look(self, late_s: float) -> None:
        """Take in what was heard and judge; `late_s` is how late we are ourselves."""
        self._detector.ticked(late_s)
        linked: set[NodeId] = set()
        for node_id, silent_s in self._silences():
            linked.add(node_id)
            self._detector.heard(node_id, ago_s=silent_s)
            health = self._detector.health(node_id)
            if health.verdict is not self.verdict(node_id):
                self._known[node_id] = health.verdict
                self._on_change(node_id, health)
        for gone in self._known.keys() - linked:
            del self._known[gone]
        self._detector.keep_only(linked)
