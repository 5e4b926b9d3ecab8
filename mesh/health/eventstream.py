"""What happened on this node lately, for people and dashboards: bounded, numbered, replayable.

Not the signed log: nothing here is agreed on with anybody, and it is gone with the process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from mesh.clock import Clock

HISTORY = 1000
"""Events kept for readers that come late or come back."""


class EventFeed:
    """Numbers events and lets any number of readers follow, each at its own pace.

    A reader that falls behind by more than `HISTORY` misses the oldest and sees a gap in the ids.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._last_id = 0
        self._readers: set[asyncio.Event] = set()

    def emit(self, kind: str, **fields: Any) -> None:
        """Record one event. `fields` are JSON-able."""
        self._last_id += 1
        event = {"id": self._last_id, "type": kind, "at": self._clock.now().isoformat(), **fields}
        self._events.append(event)
        for reader in self._readers:
            reader.set()

    def latest(self, count: int) -> list[dict[str, Any]]:
        """The newest `count` events, oldest first."""
        return list(self._events)[-count:]

    async def follow(self, after: int | None) -> AsyncGenerator[dict[str, Any], None]:
        """Events with an id above `after` (None: only new ones), then new ones for ever.

        An `after` that no event has yet is from before a restart, and counts as 0.
        """
        position = self._last_id if after is None else after
        if position > self._last_id:
            position = 0  # ids begin again with the process; readers come back by themselves
        news = asyncio.Event()
        self._readers.add(news)
        try:
            while True:
                news.clear()
                for event in [event for event in self._events if event["id"] > position]:
                    position = event["id"]
                    yield event
                await news.wait()
        finally:
            self._readers.discard(news)
