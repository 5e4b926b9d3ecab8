"""How many bad events a peer may send before nobody listens to it for a while.

Counts what peers did; knows nothing of what made an event bad.
"""

from __future__ import annotations

from dataclasses import dataclass

from mesh.clock import Clock
from mesh.types import NodeId

BAD_PER_MINUTE = 50
MUTED_S = 300.0
_WINDOW_S = 60.0
_MAX_PEERS = 1024


@dataclass(slots=True)
class _Record:
    since: float
    bad: int = 0
    muted_until: float = 0.0


class Budget:
    """Bad events per peer and minute, by the monotonic clock; bounded in peers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: dict[NodeId, _Record] = {}

    def muted(self, peer: NodeId) -> bool:
        """Whether the peer has used up its budget lately."""
        record = self._records.get(peer)
        return record is not None and self._clock.monotonic() < record.muted_until

    def charge(self, peer: NodeId) -> bool:
        """Count one bad event; True when this one mutes the peer."""
        now = self._clock.monotonic()
        record = self._records.get(peer)
        if record is None:
            record = self._admit(peer, now)
        if now - record.since >= _WINDOW_S:
            record.since, record.bad = now, 0
        record.bad += 1
        if record.bad < BAD_PER_MINUTE or now < record.muted_until:
            return False
        record.muted_until = now + MUTED_S
        return True

    def _admit(self, peer: NodeId, now: float) -> _Record:
        if len(self._records) >= _MAX_PEERS:
            del self._records[min(self._records, key=lambda name: self._records[name].since)]
        record = self._records[peer] = _Record(now)
        return record
