"""What happened on this node lately, for people and dashboards: bounded, numbered, replayable.

Not the signed log: nothing here is agreed on with anybody, and it is gone with the process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from typing import Any

from mesh.clock import Clock, set_within

HISTORY = 4096
"""Events kept for readers that come late or come back."""
WARNINGS = 256


class EventFeed:
    """Numbers events and lets any number of readers follow, each at its own pace.

    A reader that falls behind by more than `HISTORY` misses the oldest and sees a gap in the ids.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._events: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        # Apart, so that jobs and peers that come and go push none out that still holds.
        self._warnings: deque[dict[str, Any]] = deque(maxlen=WARNINGS)
        self._last_id = 0
        self._readers: set[asyncio.Event] = set()

    def emit(self, kind: str, **fields: Any) -> None:
        """Record one event. `fields` are JSON-able."""
        self._last_id += 1
        event = {"id": self._last_id, "type": kind, "at": self.clock.now().isoformat(), **fields}
        self._events.append(event)
        if kind == "warning":
            self._warnings.append(event)
        self.stir()

    def over(self, code: str) -> None:
        """What was warned of by this code is so no longer; see `warnings`."""
        now = self.clock.now().isoformat()
        for event in self._warnings:
            if event["code"] == code:
                event["until"] = now

    def stir(self) -> None:
        """Something else has changed, which readers of `batches` may want to look at."""
        for reader in self._readers:
            reader.set()

    def warnings(self, count: int) -> list[dict[str, Any]]:
        """The newest `count` warnings, oldest first. What was so ``until`` a time that has come is
        none of them."""
        now = self.clock.now()
        found = (
            event
            for event in reversed(self._warnings)
            if (until := event.get("until")) is None or datetime.fromisoformat(until) > now
        )
        return list(islice(found, count))[::-1]

    async def batches(
        self, after: int | None, *, pace_s: float, idle_s: float
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Events with an id above `after` (None: only new ones), then new ones for ever, in lists
        that come at least `pace_s` apart.

        An `after` that no event has yet is from before a restart, and counts as 0. The first list
        comes at once. One comes, if only an empty one, whenever somebody stirs, and `idle_s` after
        the last.
        """
        position = self._position(after)
        with self._reading() as news:
            while True:
                news.clear()
                found = self._since(position)
                if found:
                    position = found[-1]["id"]
                yield found
                await asyncio.sleep(pace_s)
                await set_within(news, max(0.0, idle_s - pace_s))

    # Private

    def _position(self, after: int | None) -> int:
        """The id after which a reader goes on; ids begin again with the process."""
        if after is None:
            return self._last_id
        return after if after <= self._last_id else 0

    @contextmanager
    def _reading(self) -> Iterator[asyncio.Event]:
        news = asyncio.Event()
        self._readers.add(news)
        try:
            yield news
        finally:
            self._readers.discard(news)

    def _since(self, position: int) -> list[dict[str, Any]]:
        """The kept events after that one, oldest first."""
        count = min(len(self._events), self._last_id - position)
        return list(islice(reversed(self._events), count))[::-1]
