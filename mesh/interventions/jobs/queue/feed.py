"""What a waiting client hears of its jobs: in order, and bounded when it reads too slowly.

Only printed lines are dropped, and it is said how many; nothing else is ever lost.
"""

from __future__ import annotations

import asyncio
from collections import deque

from mesh.interventions.jobs.queue.types import Status, Update

MAX_WAITING = 512
"""Updates kept for a reader that is slow; lines beyond are dropped."""

_PASSING = frozenset({Status.QUEUED, Status.PROVISIONING})


class Feed:
    """One reader's updates. `put` never waits; `get` waits for the next."""

    def __init__(self) -> None:
        self._waiting: deque[Update] = deque()
        self._news = asyncio.Event()
        self._dropped = 0

    def put(self, update: Update) -> None:
        """Add one update."""
        if update.status is Status.LOG and len(self._waiting) >= MAX_WAITING:
            self._dropped += update.description.count("\n") + 1
            return
        if self._dropped:
            said = f"({self._dropped} lines were dropped: the client reads too slowly)"
            self._dropped = 0
            self._waiting.append(Update(update.job_id, Status.LOG, said))
        if self._waiting and _is_passed(self._waiting[-1], update):
            self._waiting.pop()  # where it stood a moment ago interests nobody
        self._waiting.append(update)
        self._news.set()

    async def get(self) -> Update:
        """The next update; cancelling loses none."""
        while not self._waiting:
            self._news.clear()
            await self._news.wait()
        return self._waiting.popleft()


def _is_passed(last: Update, update: Update) -> bool:
    """Whether an update says anew what the last said of the same job."""
    both = {last.status, update.status}
    return last.job_id == update.job_id and (both <= _PASSING or both == {Status.DEPLOYING})
