"""Whose job is next: one line of a model's jobs, round robin between their owners. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable


class FairLine:
    """Job ids by owner; owners take turns, each owner's jobs keep their order."""

    def __init__(self) -> None:
        self._jobs: dict[Hashable, deque[str]] = {}
        self._owner_of: dict[str, Hashable] = {}

    def __len__(self) -> int:
        return len(self._owner_of)

    def put(self, owner: Hashable, job_id: str) -> None:
        """Add a job at the end of its owner's; an owner who had none is last in turn."""
        self._jobs.setdefault(owner, deque()).append(job_id)
        self._owner_of[job_id] = owner

    def put_back(self, owner: Hashable, job_id: str) -> None:
        """Return what was taken: it is next again."""
        waiting = self._jobs.pop(owner, deque())
        waiting.appendleft(job_id)
        self._jobs = {owner: waiting, **self._jobs}
        self._owner_of[job_id] = owner

    def take(self) -> str | None:
        """The next job; its owner goes to the end of the turn."""
        if not self._jobs:
            return None
        owner = next(iter(self._jobs))
        waiting = self._jobs.pop(owner)
        job_id = waiting.popleft()
        if waiting:
            self._jobs[owner] = waiting
        del self._owner_of[job_id]
        return job_id

    def remove(self, job_id: str) -> bool:
        """Forget a waiting job; whether there was one."""
        owner = self._owner_of.pop(job_id, None)
        if owner is None:
            return False
        self._jobs[owner].remove(job_id)
        if not self._jobs[owner]:
            del self._jobs[owner]
        return True

    def order(self) -> list[str]:
        """All waiting jobs in the order in which they would be taken now."""
        turns = [list(waiting) for waiting in self._jobs.values()]
        longest = max(map(len, turns), default=0)
        return [turn[place] for place in range(longest) for turn in turns if place < len(turn)]
