"""At most so many generations of this node at a time; others wait a while, in fair turns.

Who has none among them does not wait for one to end while another has several: after a little
patience the youngest of those rests. Where each has but one it is the one that has run longest,
once it has had its turn. What rests is not read, so that it stops within some tokens and its hops
keep its caches for it; it goes on when a place is free, or has rested long enough.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Hashable

from mesh.accounts.fair_line import FairLine
from mesh.clock import set_by, set_within
from mesh.errors import Busy
from mesh.types import Principal, Queued

PATIENCE_S = 5.0
"""Answers that end by themselves meanwhile are the better way in."""
TURN_S = 60.0
"""What most answers end within, and who has only one goes on for at least."""
REST_S = 60.0
"""Far less than a generation may go unread."""


class Entrance:
    """Lets in `most` at a time. Of others, `places` wait, half of them for one principal at most,
    for `wait_s`. Who has none has another's rest after `patience_s`, for `rest_s` at most; one
    that is all somebody has goes on for `turn_s` first."""

    def __init__(
        self,
        most: int,
        wait_s: float,
        places: int,
        *,
        patience_s: float = PATIENCE_S,
        turn_s: float = TURN_S,
        rest_s: float = REST_S,
    ) -> None:
        self._most = most
        self._wait_s = wait_s
        self._places = places
        self._patience_s, self._turn_s, self._rest_s = patience_s, turn_s, rest_s
        self._owners: dict[str, Hashable] = {}
        """Of all requests that are inside, wait or rest."""
        self._inside: dict[str, float] = {}
        """The requests that are in, and since when: the oldest first."""
        self._resting: dict[str, asyncio.Event] = {}
        self._line = FairLine()
        self._moved = asyncio.Event()

    async def enter(self, request_id: str, principal: Principal) -> AsyncGenerator[Queued, None]:
        """Yields where the request stands, whenever that is better than before; it is in when this
        ends by itself, until `leave`. Raises Busy where no place is left, or after the wait."""
        owner = principal.account
        if len(self._inside) < self._most:
            self._owners[request_id] = owner
            self._let_in(request_id)
            return
        if not self._line.has_place(owner, self._places):
            raise self._busy()
        self._owners[request_id] = owner
        self._line.put(owner, request_id)
        loop = asyncio.get_running_loop()
        until, told = loop.time() + self._wait_s, self._places + 1
        impatient_at = loop.time() + self._patience_s
        try:
            while request_id not in self._inside:
                position = self._line.positions()[request_id]
                if position < told:
                    told = position
                    yield Queued(position)
                    continue
                now = loop.time()
                if now >= impatient_at and self._has_another_rest(owner):
                    self._let_in(request_id)
                    return
                later = (each for each in (impatient_at, self._turn_ends) if now < each < until)
                look_at = min(later, default=until)
                if not await set_by(self._moved, look_at) and look_at == until:
                    raise self._busy(f"; this request waited {self._wait_s:g} s")
        finally:
            self._line.remove(request_id)

    async def turn(self, request_id: str) -> None:
        """Until a request that is in may go on; at once unless it rests."""
        rested = self._resting.get(request_id)
        if rested is None or await set_within(rested, self._rest_s) or rested.is_set():
            return
        self._line.remove(request_id)
        del self._resting[request_id]
        self._has_another_rest(self._owners[request_id])
        self._let_in(request_id)  # beside the others where none of them rests

    def leave(self, request_id: str) -> None:
        """The request is out, or was never in; the next comes in."""
        self._owners.pop(request_id, None)
        self._inside.pop(request_id, None)
        if self._resting.pop(request_id, None) is not None:
            self._line.remove(request_id)
        while len(self._inside) < self._most and (next_id := self._line.take()) is not None:
            self._let_in(next_id)
        self._moved.set()
        self._moved = asyncio.Event()

    def _let_in(self, request_id: str) -> None:
        self._inside[request_id] = asyncio.get_running_loop().time()
        if (rested := self._resting.pop(request_id, None)) is not None:
            rested.set()

    def _has_another_rest(self, owner: Hashable) -> bool:
        """Whether one of those inside rests now, for who has none there, nor one that rests."""
        if any(self._owners[each] == owner for each in (*self._inside, *self._resting)):
            return False
        whose, count = Counter(self._owners[each] for each in self._inside).most_common(1)[0]
        if count > 1:
            rests = next(each for each in reversed(self._inside) if self._owners[each] == whose)
        elif asyncio.get_running_loop().time() >= self._turn_ends:
            rests = next(iter(self._inside))
        else:
            return False
        del self._inside[rests]
        self._resting[rests] = asyncio.Event()
        self._line.put(self._owners[rests], rests)
        return True

    @property
    def _turn_ends(self) -> float:
        """When the oldest of those inside has had its turn."""
        return next(iter(self._inside.values())) + self._turn_s

    def _busy(self, waited: str = "") -> Busy:
        return Busy(
            f"{len(self._inside)} generations run here already, the limit, and"
            f" {len(self._line)} wait{waited}.",
            fix="Wait for one to end, or raise max_concurrent_pipelines, or max_queued.",
        )
