"""Events that came before what they need: an earlier one of their chain, or their author's key.

A bounded waiting room with an age limit. Nothing in it is verified, and nothing is lost when it
overflows: gossip fetches again what is still missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mesh.clock import Clock
from mesh.events.types import Event, EventId
from mesh.types import NodeId

PER_AUTHOR = 256
MAX_AUTHORS = 64
TOTAL_BYTES = 8 << 20
HELD_S = 600.0


@dataclass(frozen=True, slots=True)
class Held:
    """One waiting event, who sent it, and the monotonic second at which it is given up."""

    event: Event
    source: NodeId | None
    until: float


class Pending:
    """Waiting events by author; of an author's events the nearest to its chain are kept."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[NodeId, dict[EventId, Held]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return sum(len(held) for held in self._held.values())

    @property
    def size_bytes(self) -> int:
        """The bodies' bytes together."""
        return self._bytes

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
        if self._bytes + len(event.body) > TOTAL_BYTES:
            return False
        entry = Held(event, source, until or self._clock.monotonic() + HELD_S)
        self._held.setdefault(event.author, {})[event.id] = entry
        self._bytes += len(event.body)
        return True

    def take(self, author: NodeId, upto: int) -> Iterator[Held]:
        """Remove and give an author's events up to a sequence number, in the chain's order."""
        held = self._held.get(author, {})
        ready = [entry for entry in held.values() if entry.event.seq <= upto]
        for entry in sorted(ready, key=lambda entry: entry.event.seq):
            self._drop(entry.event)
            yield entry

    def _expire(self) -> None:
        now = self._clock.monotonic()
        for held in list(self._held.values()):
            # Kept about in the order of arrival: the first is (nearly) the oldest.
            while held and (oldest := next(iter(held.values()))).until <= now:
                self._drop(oldest.event)

    def _drop(self, event: Event) -> None:
        held = self._held[event.author]
        del held[event.id]
        self._bytes -= len(event.body)
        if not held:
            del self._held[event.author]
