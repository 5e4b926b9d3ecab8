"""Which spans were refused by their machines for want of memory, for as long as that is respected.

A machine says it while the span is planned there. Planned elsewhere it says nothing any more, and
whoever plans next would give it the same again. Time is told to it.
"""

from __future__ import annotations

from collections.abc import Iterable

from mesh.deployments.wishes import Span

RESPECTED_S = 300.0
MAX_REFUSALS = 256


class Refusals:
    """By deployment; of the newest `MAX_REFUSALS`."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, Span], float] = {}

    def put(self, deployment: str, spans: Iterable[Span], now: float) -> None:
        """These are refused now."""
        for span in spans:
            self._until.pop((deployment, span), None)
            self._until[deployment, span] = now + RESPECTED_S
        while len(self._until) > MAX_REFUSALS:
            del self._until[next(iter(self._until))]

    def of(self, deployment: str, now: float) -> list[Span]:
        """Those that are respected still."""
        self._until = {key: until for key, until in self._until.items() if now < until}
        return [span for name, span in self._until if name == deployment]
