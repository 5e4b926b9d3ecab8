"""What this asker thinks of each shard on each host, from what it did to earlier requests.

A shard that failed is avoided for a while that doubles with every further failure and is forgiven
with good service. Avoided means ranked behind all others: when nobody else holds the layers it is
used as if nothing had been. One that lied is not used at all: no answer is better than a wrong one.
Time is injected.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from mesh.clock import Clock

FIRST_EXCLUSION_S = 15.0
LONGEST_EXCLUSION_S = 600.0
DOUBT_S = 600.0
LIE_S = 86_400.0
FORGIVING_STEPS = 256
"""Good steps that take one failure off the count."""

MAX_SHARDS = 1024
_ONE_EVENT_S = 1.0

Key = tuple[str, str]
"""(host, shard_id), as `mesh.routing.cover.ShardKey`."""

DOUBTED, EXCLUDED, LIED = 4, 8, 64
"""Penalties: added to what routing otherwise knows of a shard, so larger than any of that."""


@dataclass(slots=True)
class _Record:
    level: int = 0
    penalty: int = 0
    until: float = 0.0
    last_failure_at: float = 0.0
    reason: str = ""
    good_steps: int = 0
    checks: Counter[str] = field(default_factory=Counter)


class Reputations:
    """Every shard's reputation. Owned by the asker, shared by its generations."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: dict[Key, _Record] = {}

    def served(self, key: Key) -> None:
        """One step was answered well. Called for every step: does nothing for a clean record."""
        record = self._records.get(key)
        if record is not None and record.level:
            record.good_steps += 1
            if record.good_steps >= FORGIVING_STEPS:
                record.level, record.good_steps = record.level - 1, 0

    def failed(self, key: Key, reason: str) -> float:
        """It failed a request; the seconds for which it is avoided now.

        All requests that one event takes down are one failure.
        """
        record, now = self._record(key), self._clock.monotonic()
        if record.level and now - record.last_failure_at < _ONE_EVENT_S:
            return max(0.0, record.until - now)
        if now - record.last_failure_at > LONGEST_EXCLUSION_S + FIRST_EXCLUSION_S * 2**record.level:
            record.level = 0
        exclusion_s = min(LONGEST_EXCLUSION_S, FIRST_EXCLUSION_S * 2.0**record.level)
        record.level = min(record.level + 1, 16)
        record.last_failure_at, record.good_steps = now, 0
        self._avoid(record, EXCLUDED, exclusion_s, reason)
        return exclusion_s

    def doubted(self, key: Key, reason: str) -> None:
        """It or another one is wrong, and nobody could say which."""
        self._avoid(self._record(key), DOUBTED, DOUBT_S, reason)

    def lied(self, key: Key, reason: str) -> None:
        """It was outvoted, or contradicted by this machine's own computation."""
        self._avoid(self._record(key), LIED, LIE_S, reason)

    def checked(self, key: Key, outcome: str) -> None:
        """A spot check of it ended: ``agreed``, ``lied``, ``doubtful`` or ``unchecked``."""
        self._record(key).checks[outcome] += 1

    def penalty(self, key: Key) -> int:
        """0 for a shard of good repute; the higher, the later it is picked."""
        record = self._records.get(key)
        if record is None or self._clock.monotonic() >= record.until:
            return 0
        return record.penalty

    def is_liar(self, key: Key) -> bool:
        """Whether it was caught in a wrong answer not long ago."""
        return self.penalty(key) >= LIED

    def rows(self) -> list[dict[str, Any]]:
        """All reputations in JSON-able form."""
        now = self._clock.monotonic()
        return [
            {
                "host": host,
                "shard_id": shard,
                "avoided_for_s": round(max(0.0, record.until - now)),
                "reason": record.reason if now < record.until else "",
                "failures": record.level,
                "checks": dict(record.checks),
            }
            for (host, shard), record in sorted(self._records.items())
        ]

    def _record(self, key: Key) -> _Record:
        if key not in self._records and len(self._records) >= MAX_SHARDS:
            # The one that was avoided longest ago has least to say.
            del self._records[min(self._records, key=lambda k: self._records[k].until)]
        return self._records.setdefault(key, _Record())

    def _avoid(self, record: _Record, penalty: int, for_s: float, reason: str) -> None:
        now = self._clock.monotonic()
        if now < record.until and record.penalty > penalty:
            return  # what is already held against it weighs more
        record.penalty, record.reason = penalty, reason
        record.until = max(record.until, now + for_s)
