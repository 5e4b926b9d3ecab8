"""The places to run that the jobs of all models share; owners take turns at them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager

Whose = Callable[[], Hashable]


class Places:
    """The next goes to whoever has the fewest, and of those to whoever got one least lately."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: dict[asyncio.Future[Hashable], Whose] = {}
        self._held: Counter[Hashable] = Counter()
        self._turns: dict[Hashable, int] = {}
        self._turn = 0

    @asynccontextmanager
    async def taken(self, whose: Whose) -> AsyncIterator[None]:
        """One of them, for the owner that `whose` says when it is given."""
        given: asyncio.Future[Hashable] = asyncio.get_running_loop().create_future()
        self._waiting[given] = whose
        self._give()
        try:
            await given
            yield
        finally:
            self._waiting.pop(given, None)
            if not given.cancelled():
                self._held[given.result()] -= 1
                self._free += 1
                self._give()

    def _give(self) -> None:
        while self._free and (asked := {each: whose() for each, whose in self._waiting.items()}):
            # Whoever neither has one nor waits has no turn: he comes first when he comes again.
            self._held = +self._held
            there = self._held.keys() | set(asked.values())
            self._turns = {owner: turn for owner, turn in self._turns.items() if owner in there}
            given = min(asked, key=lambda each: self._rank(asked[each]))
            del self._waiting[given]
            if not given.done():
                self._free -= 1
                self._turn += 1
                self._held[asked[given]] += 1
                self._turns[asked[given]] = self._turn
                given.set_result(asked[given])

    def _rank(self, owner: Hashable) -> tuple[int, int]:
        return self._held[owner], self._turns.get(owner, 0)
