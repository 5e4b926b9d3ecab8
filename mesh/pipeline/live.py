"""How far each running generation is, counted in the daemon where its frames pass.

Knows the frames only: routes and the times of hops are what the asker reports.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mesh.clock import Clock
from mesh.types import (
    Done,
    GenerationRequest,
    ModelId,
    PromptPiece,
    StreamFrame,
    TokenDelta,
    shown_id,
)

if TYPE_CHECKING:
    from mesh.health.metrics import GenerationSeries

RATE_TOKENS = 64
"""The rate that is shown is that of so many of the latest tokens."""


@dataclass(slots=True)
class _Counts:
    """Of one generation; times are of the monotonic clock, in seconds."""

    begun_s: float
    prompt_tokens: int = 0
    tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    outcome: str = "error"
    latest: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATE_TOKENS))

    def take(self, delta: TokenDelta, now_s: float) -> float | None:
        """Seconds since the token before; None where none was."""
        if delta.prompt_tokens:
            self.prompt_tokens = delta.prompt_tokens
        if not delta.token_ids:
            return None
        gap_s = None if self.last_s is None else now_s - self.last_s
        self.last_s = now_s
        self.tokens += len(delta.token_ids)
        if self.first_s is None:
            self.first_s = now_s
        self.latest.append((now_s, self.tokens))
        return gap_s

    def row(self, now_s: float) -> dict[str, Any]:
        rate = None
        if len(self.latest) > 1:
            (then_s, before), (last_s, after) = self.latest[0], self.latest[-1]
            # A stream that stands still gets slower while it does.
            elapsed_s = max(last_s, now_s - 1.0) - then_s
            rate = round((after - before) / elapsed_s, 2) if elapsed_s > 0 else None
        first_s = self.first_s
        return {
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "tokens_per_second": rate,
            "first_token_ms": None if first_s is None else round((first_s - self.begun_s) * 1e3, 1),
            "age_s": round(now_s - self.begun_s, 1),
        }


class LiveCounts:
    """The counts of all running generations. `on_change` is called when one has moved; `series`
    are told what became of each."""

    def __init__(
        self,
        clock: Clock,
        on_change: Callable[[], None],
        series: GenerationSeries | None = None,
    ) -> None:
        self._clock = clock
        self._on_change = on_change
        self._series = series
        self._counts: dict[str, _Counts] = {}
        self._entering: list[ModelId] = []

    @contextmanager
    def entering(self, model: ModelId) -> Iterator[None]:
        """For as long as a request for this model waits to be let in."""
        self._entering.append(model)
        try:
            yield
        finally:
            self._entering.remove(model)

    def awaits(self, model: ModelId) -> bool:
        """Whether a request for this model waits to be let in."""
        return model in self._entering

    def states(self, queued: int) -> tuple[tuple[str, int], ...]:
        """How many are running and how many waiting; `queued` of those that were let in wait for
        room on the hops."""
        inside = len(self._counts)
        queued = min(queued, inside)
        return ("running", inside - queued), ("waiting", len(self._entering) + queued)

    @contextmanager
    def counting(self, request: GenerationRequest) -> Iterator[Callable[[StreamFrame], None]]:
        """For as long as a generation runs: what gets each of its frames."""
        name = shown_id(request.request_id)
        counts = self._counts[name] = _Counts(self._clock.monotonic())

        def seen(frame: StreamFrame) -> None:
            if isinstance(frame, TokenDelta):
                gap_s = counts.take(frame, self._clock.monotonic())
                if gap_s is not None and self._series is not None:
                    self._series.gap(gap_s)
            elif isinstance(frame, Done):
                counts.outcome = frame.finish_reason
            elif isinstance(frame, PromptPiece):
                counts.prompt_tokens += len(frame.token_ids)
            self._on_change()

        self._on_change()
        try:
            yield seen
        except (GeneratorExit, asyncio.CancelledError):
            if counts.outcome == "error":  # else it had its end
                counts.outcome = "cancelled"
            raise
        finally:
            if self._series is not None:
                self._series.end(counts.outcome)
            self._counts.pop(name, None)
            self._on_change()

    def row(self, name: str) -> dict[str, Any] | None:
        """``{"prompt_tokens", "tokens", "tokens_per_second", "first_token_ms", "age_s"}`` of the
        generation that is shown by this name; None once it has ended."""
        counts = self._counts.get(name)
        return None if counts is None else counts.row(self._clock.monotonic())
