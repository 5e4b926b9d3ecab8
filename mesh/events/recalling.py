"""What this node has signed in another history than its own log's, of which only peers know.

Restored from a backup, it signed facts before it heard from anybody that holds those from before.
Neither counts behind the fork; both are news when it begins again (`mesh.events.authoring`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from mesh.accounts.ledger import Resource, of_peer
from mesh.errors import BadEvent
from mesh.events import apply as applying
from mesh.events.chains import Chains
from mesh.events.docket import Signed
from mesh.events.state import Fact, State, Subject
from mesh.events.store import Range
from mesh.events.types import GENESIS, MAX_INT63, Event, Place, decode
from mesh.types import NodeId

_EVENTS_PER_TURN = 16


class Recalled:
    """The facts of this node's other histories, as far as peers have given them back."""

    def __init__(self, own: NodeId, chains: Chains) -> None:
        self.own = own
        self.chains = chains
        self._behind: Place | None = None
        self._facts: Mapping[Subject, Fact] = {}

    @property
    def forked_behind(self) -> Place | None:
        """The last place before this node's fork; None without one."""
        return self.chains.state.frozen.get(self.own)

    def add(self, events: Sequence[Event]) -> None:
        """These, of one history and in its order, are of the present fork."""
        self._facts = applying.gathered(self.chains.state, self.own, self._known(), events)

    def added_to(self, state: State) -> State:
        """A state in which this node's own log counts whole, with what was recalled, too."""
        return applying.joined(state, self.own, self._known())

    def _known(self) -> Mapping[Subject, Fact]:
        if self._behind != self.forked_behind:  # what is of a fork before has been said again
            self._behind, self._facts = self.forked_behind, {}
        return self._facts


class PeersCopy:
    """What one peer has of this node's chain from the fork on: pull what is `wanted`, `take` it,
    while there is any."""

    def __init__(self, recalled: Recalled) -> None:
        self._recalled = recalled
        self._chains = recalled.chains
        self._behind = recalled.forked_behind
        self._generation, self._seq = self._behind or (0, 0)
        self._head = self._chains.id_at(recalled.own, self._seq) or GENESIS
        self._most = self._chains.accounts.limit(of_peer(recalled.own), Resource.EVENTS_STORED)
        self._goes_on = self._behind is not None

    @property
    def wanted(self) -> Range | None:
        """The range to pull next; None without a fork, at the end, and once that is mended."""
        is_there = self._goes_on and self._recalled.forked_behind == self._behind
        if not is_there or self._seq >= self._most:
            return None
        return self._recalled.own, self._generation, self._seq + 1, MAX_INT63

    async def take(self, page: Sequence[Signed]) -> None:
        """What the peer gave: so much of it as continues the chain, signed by this node."""
        found: list[Event] = []
        for body, signature in page:
            event = self._next(body, signature)
            if event is None:
                break
            found.append(event)
            self._seq, self._head = event.seq, event.id
            if len(found) % _EVENTS_PER_TURN == 0:
                await asyncio.sleep(0)
        self._goes_on = 0 < len(found) == len(page)
        if self._recalled.forked_behind == self._behind:
            self._recalled.add(found)

    def _next(self, body: bytes, signature: bytes) -> Event | None:
        try:
            event = decode(body, signature)
        except BadEvent:
            return None
        place = self._recalled.own, self._generation, self._seq + 1, self._head
        if (event.author, *event.place, event.prev) != place:
            return None
        return event if self._chains.is_signed(event) else None
