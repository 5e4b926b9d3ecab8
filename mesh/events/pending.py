"""Events that came before what they need: an earlier one of their chain, or their author's key.

A bounded waiting room with an age limit. Nothing in it is verified, and nothing is lost when it
overflows: gossip fetches again what is still missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mesh.accounts.ledger import Hold, Resource, ResourceLedger, of_peer
from mesh.clock import Clock
from mesh.errors import Busy
from mesh.events.types import MAX_INT63, Event, EventId
from mesh.types import NodeId, Principal, PrincipalKind

PER_AUTHOR = 256
MAX_AUTHORS = 64
HELD_S = 600.0

_OURS = Principal(PrincipalKind.LOCAL, "log")
"""Who sent what no peer did: a repair of this node's own file."""


@dataclass(frozen=True, slots=True)
class WaitingEvent:
    """One waiting event, who sent it, the monotonic second at which it is given up, its bytes."""

    event: Event
    source: NodeId | None
    until: float
    room: Hold


class PendingEvents:
    """Waiting events by author; of an author's events the nearest to its chain are kept.

    Whoever sent them has so many bytes of them on its account, and no more.
    """

    def __init__(self, clock: Clock, accounts: ResourceLedger) -> None:
        self._clock = clock
        self._accounts = accounts
        self._held: dict[NodeId, dict[EventId, WaitingEvent]] = {}

    def __len__(self) -> int:
        return sum(len(held) for held in self._held.values())

    @property
    def size_bytes(self) -> int:
        """The bodies' bytes together."""
        return sum(len(h.event.body) for held in self._held.values() for h in held.values())

    def authors(self) -> list[NodeId]:
        """Whose events wait."""
        return list(self._held)

    def hold(self, event: Event, source: NodeId | None, until: float | None = None) -> bool:
        """Keep an event if there is room, or if it is nearer than one that then has to go.

        `until` is the end of its patience if it waited before.
        """
        self._expire()
        held = self._held.get(event.author, {})
        if event.id in held:
            return True
        if not held and len(self._held) >= MAX_AUTHORS:
            return False
        if len(held) >= PER_AUTHOR:
            furthest = max(held.values(), key=lambda entry: entry.event.seq)
            if furthest.event.seq <= event.seq:
                return False
            self._drop(furthest.event)
        sender = _OURS if source is None else of_peer(source)
        try:
            room = self._accounts.hold(sender, Resource.EVENT_BYTES_WAITING, len(event.body))
        except Busy:
            return False
        entry = WaitingEvent(event, source, until or self._clock.monotonic() + HELD_S, room)
        self._held.setdefault(event.author, {})[event.id] = entry
        return True

    def take(self, author: NodeId, upto: int) -> Iterator[WaitingEvent]:
        """Remove and give an author's events up to a sequence number, in the chain's order."""
        held = self._held.get(author, {})
        ready = [entry for entry in held.values() if entry.event.seq <= upto]
        for entry in sorted(ready, key=lambda entry: entry.event.seq):
            self._drop(entry.event)
            yield entry

    def clear(self) -> None:
        """Give up everything that waits."""
        for author in self.authors():
            list(self.take(author, MAX_INT63))

    def _expire(self) -> None:
        now = self._clock.monotonic()
        for held in list(self._held.values()):
            # Kept about in the order of arrival: the first is (nearly) the oldest.
            while held and (oldest := next(iter(held.values()))).until <= now:
                self._drop(oldest.event)

    def _drop(self, event: Event) -> None:
        held = self._held[event.author]
        held.pop(event.id).room.close()
        if not held:
            del self._held[event.author]
