"""What this asker thinks of each shard on each host, from what it did to earlier requests.

A shard that failed is avoided for a while that doubles with every further failure and is forgiven
with good service. Avoided means ranked behind all others: when nobody else holds the layers it is
used as if nothing had been. One that lied is not used at all: no answer is better than a wrong one.
A host names its shards as it likes, so a lie or a doubt is held against the host, whatever it calls
what it serves by then. Time is injected.
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
class _Avoided:
    """By how much, until when and why."""

    penalty: int = 0
    until: float = 0.0
    reason: str = ""


_CLEAN = _Avoided()


@dataclass(slots=True)
class _Record:
    level: int = 0
    last_failure_at: float = 0.0
    good_steps: int = 0
    avoided: _Avoided = field(default_factory=_Avoided)
    checks: Counter[str] = field(default_factory=Counter)


class Reputations:
    """Every shard's reputation. Owned by the asker, shared by its generations."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: dict[Key, _Record] = {}
        self._hosts: dict[str, _Avoided] = {}

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
            return max(0.0, record.avoided.until - now)
        if now - record.last_failure_at > LONGEST_EXCLUSION_S + FIRST_EXCLUSION_S * 2**record.level:
            record.level = 0
        exclusion_s = min(LONGEST_EXCLUSION_S, FIRST_EXCLUSION_S * 2.0**record.level)
        record.level = min(record.level + 1, 16)
        record.last_failure_at, record.good_steps = now, 0
        self._avoid(record.avoided, EXCLUDED, exclusion_s, reason)
        return exclusion_s

    def doubted(self, key: Key, reason: str) -> None:
        """It or another one is wrong, and nobody could say which."""
        self._avoid(self._host_of(key), DOUBTED, DOUBT_S, reason)

    def lied(self, key: Key, reason: str) -> None:
        """It was outvoted, or contradicted by this machine's own computation."""
        self._avoid(self._host_of(key), LIED, LIE_S, reason)

    def checked(self, key: Key, outcome: str) -> None:
        """A spot check of it ended: ``agreed``, ``lied``, ``doubtful`` or ``unchecked``."""
        self._record(key).checks[outcome] += 1

    def penalty(self, key: Key) -> int:
        """0 for a shard of good repute; the higher, the later it is picked."""
        return self._standing(key).penalty

    def is_liar(self, key: Key) -> bool:
        """Whether its host was caught in a wrong answer not long ago."""
        return self.penalty(key) >= LIED

    def rows(self) -> list[dict[str, Any]]:
        """All reputations in JSON-able form."""
        now = self._clock.monotonic()
        return [
            {
                "host": key[0],
                "shard_id": key[1],
                "avoided_for_s": round(max(0.0, avoided.until - now)),
                "reason": avoided.reason,
                "failures": record.level,
                "checks": dict(record.checks),
            }
            for key, record in sorted(self._records.items())
            for avoided in [self._standing(key)]
        ]

    def _standing(self, key: Key) -> _Avoided:
        """What weighs most of what is held against a shard or its host now."""
        record, host = self._records.get(key), self._hosts.get(key[0])
        if record is None and host is None:  # as of most, whenever somebody is picked
            return _CLEAN
        now = self._clock.monotonic()
        held = (_CLEAN if record is None else record.avoided, host or _CLEAN)
        in_force = (each for each in held if now < each.until)
        return max(in_force, key=lambda each: each.penalty, default=_CLEAN)

    def _avoided_until(self, key: Key) -> float:
        own, host = self._records[key].avoided, self._hosts.get(key[0], _CLEAN)
        return max(own.until, host.until)

    def _host_of(self, key: Key) -> _Avoided:
        self._record(key)  # which is shown as the one that it was seen in
        now = self._clock.monotonic()
        self._hosts = {host: each for host, each in self._hosts.items() if now < each.until}
        return self._hosts.setdefault(key[0], _Avoided())

    def _record(self, key: Key) -> _Record:
        if key not in self._records and len(self._records) >= MAX_SHARDS:
            # The one that was avoided longest ago has least to say.
            del self._records[min(self._records, key=self._avoided_until)]
        return self._records.setdefault(key, _Record())

    def _avoid(self, avoided: _Avoided, penalty: int, for_s: float, reason: str) -> None:
        now = self._clock.monotonic()
        if now < avoided.until and avoided.penalty > penalty:
            return  # what is already held against it weighs more
        avoided.penalty, avoided.reason = penalty, reason
        avoided.until = max(avoided.until, now + for_s)
