"""How far a fetch is, as it is told to people: counted bytes, and a rate of the last seconds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_WINDOW_S = 5.0


@dataclass(frozen=True, slots=True)
class SourceBytes:
    """What came from one source, and how fast it came lately."""

    source: str
    name: str
    bytes: int
    bytes_per_s: float


class _Rate:
    def __init__(self) -> None:
        self.total = 0
        self._recent: deque[tuple[float, int]] = deque()

    def add(self, count: int, now: float) -> None:
        self.total += count
        self._recent.append((now, count))

    def at(self, now: float) -> float:
        while self._recent and self._recent[0][0] < now - _WINDOW_S:
            self._recent.popleft()
        if not self._recent:
            return 0.0
        since = max(now - self._recent[0][0], 0.5)
        return sum(count for _, count in self._recent) / since


class Meter:
    """`done` of `total` wanted bytes are here; `done` falls when bytes turn out to be wrong."""

    def __init__(self) -> None:
        self.total = 0
        self.done = 0
        self._all = _Rate()
        self._sources: dict[str, tuple[str, _Rate]] = {}

    def arrived(self, source: str, name: str, count: int, now: float) -> None:
        """So many bytes came from there."""
        self._all.add(count, now)
        self._sources.setdefault(source, (name, _Rate()))[1].add(count, now)

    def rate(self, now: float) -> float:
        """Bytes per second, lately."""
        return self._all.at(now)

    def eta_s(self, now: float) -> float | None:
        """Seconds that the rest takes at the present rate; None while nothing comes."""
        rate = self.rate(now)
        return (self.total - self.done) / rate if rate > 0 else None

    def given_by(self, source: str) -> int:
        """Bytes that came from there."""
        return self._sources[source][1].total if source in self._sources else 0

    def sources(self, now: float) -> list[SourceBytes]:
        """What each gave."""
        return [
            SourceBytes(source, name, rate.total, rate.at(now))
            for source, (name, rate) in self._sources.items()
        ]
