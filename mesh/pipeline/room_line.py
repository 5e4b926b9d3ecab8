"""The line in front of full shards: whoever finds no room waits here, a while, in fair turns.

Hosts do not queue: they say that they are full. So of all that wait at one asker only the first in
line asks again, at once when a session ended here, else with a growing pause, since what ends
elsewhere is not heard of. Knows no shards: what asks is given in.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from mesh.accounts.fair_line import FairLine
from mesh.clock import set_by
from mesh.pipeline.refusal import RouteRefused
from mesh.types import Principal, Queued

WAIT_S = 60.0
PLACES = 256
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.8
JITTER = 0.25
"""Askers of several nodes that were refused together do not ask again together."""

T = TypeVar("T")
Ask = Callable[[], Awaitable[T]]
"""Asks for room once. Raises RouteRefused."""


class RoomLine:
    """Who waits for room in front of one model's shards, for `wait_s` at most; 0: nobody does.

    There are `places`, half of them for one principal at most.
    """

    def __init__(self, wait_s: float = WAIT_S, places: int = PLACES) -> None:
        self._wait_s = wait_s
        self._places = places
        self._line = FairLine()
        self._waiting: dict[str, _Place] = {}
        self._said: RouteRefused | None = None
        self._random = random.Random()  # noqa: S311 - spreads load, keeps no secret

    async def in_turn(
        self, request_id: str, principal: Principal, ask: Ask[T]
    ) -> AsyncGenerator[Queued | T, None]:
        """Yields where the request stands, whenever that is better than before, and at last what
        asking gave. Leaving the iterator leaves the line.

        Raises what `ask` raises. RouteRefused of shards that all are full is raised at once without
        a place, else behind the limit.
        """
        full = self._said if self._waiting else None
        if full is None:
            try:
                begun = await ask()
            except RouteRefused as refused:
                if not refused.all_full:
                    raise
                full = refused
            else:
                yield begun
                return
        with self._place(request_id, principal.account, full) as place:
            told = self._places + 1
            while True:
                position = self.positions()[request_id]
                if position < told:
                    yield Queued(position)
                    told = position
                elif position > 1 or not place.may_ask:
                    await place.changes()
                elif (room := await self._asked(ask, place)) is not None:
                    break
        yield room

    def freed(self) -> None:
        """A session of this asker ended, or rests: there may be room."""
        if first := next(iter(self._line.order()), None):
            self._waiting[first].ask_now()

    def positions(self) -> Mapping[str, int]:
        """Where each request that waits stands, from 1."""
        return self._line.positions()

    async def _asked(self, ask: Ask[T], place: _Place) -> T | None:
        """What asking gave; None where all are still full, and `place` pauses then."""
        try:
            return await ask()
        except RouteRefused as refused:
            if not refused.all_full:
                raise
            place.refused(refused, self._random.uniform(1 - JITTER, 1 + JITTER))
            self._said = refused
            return None

    @contextmanager
    def _place(self, request_id: str, owner: Principal, full: RouteRefused) -> Iterator[_Place]:
        """A place in line, as long as this is open. Raises `full` where there is none."""
        if not (self._line.has_place(owner, self._places) and self._wait_s > 0):
            raise full.with_traceback(None)
        self._said = full
        place = self._waiting[request_id] = _Place(full, self._wait_s)
        self._line.put(owner, request_id)
        try:
            yield place
        finally:
            if self._line.order()[0] == request_id:
                self._line.take()  # its owner had a turn
            else:
                self._line.remove(request_id)
            del self._waiting[request_id]
            for other in self._waiting.values():
                other.changed.set()


class _Place:
    """One request in line: until when it waits, when it may ask again, what it was told."""

    def __init__(self, full: RouteRefused, wait_s: float) -> None:
        self.changed = asyncio.Event()
        self._full = full
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + wait_s
        self._pause_s = FIRST_PAUSE_S
        self._asks_at = 0.0

    @property
    def may_ask(self) -> bool:
        """Whether its pause is over."""
        return self._loop.time() >= self._asks_at

    def ask_now(self) -> None:
        """The pause is over, and the next one short."""
        self._asks_at, self._pause_s = 0.0, FIRST_PAUSE_S
        self.changed.set()

    def refused(self, full: RouteRefused, jitter: float) -> None:
        """Pause, `jitter` times as long as usual, longer each time."""
        self._full = full
        self._asks_at = self._loop.time() + self._pause_s * jitter
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    async def changes(self) -> None:
        """Wait for the end of the pause or for the line to move. Raises RouteRefused behind the
        limit."""
        now = self._loop.time()
        if now >= self._until:
            raise self._full.with_traceback(None)
        wakes_at = min(self._until, self._asks_at) if self._asks_at > now else self._until
        if await set_by(self.changed, wakes_at):
            self.changed.clear()
