"""Whose turn it is: a line in which no owner delays another by more than one of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping


class FairLine:
    """Ids by owner; owners take turns, each owner's ids keep their order."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[str]] = {}
        self._owner_of: dict[str, Hashable] = {}
        self._positions: dict[str, int] | None = None
        """None since the line has changed."""

    def __len__(self) -> int:
        return len(self._owner_of)

    @property
    def next_owner(self) -> Hashable:
        """Whose turn it is; None without anybody."""
        return next(iter(self._waiting), None)

    def has_place(self, owner: Hashable, places: int) -> bool:
        """Whether one more of this owner's may wait where `places` are, half of them for one owner
        at most."""
        mine = len(self._waiting.get(owner, ()))
        return len(self) < places and mine < max(1, places // 2)

    def put(self, owner: Hashable, id_: str) -> None:
        """Add an id at the end of its owner's; an owner who had none is last in turn."""
        self._waiting.setdefault(owner, deque()).append(id_)
        self._owner_of[id_] = owner
        self._positions = None

    def put_back(self, owner: Hashable, id_: str) -> None:
        """Return what was taken: it is next again."""
        waiting = self._waiting.pop(owner, deque())
        waiting.appendleft(id_)
        self._waiting = {owner: waiting, **self._waiting}
        self._owner_of[id_] = owner
        self._positions = None

    def take(self) -> str | None:
        """The next id; its owner goes to the end of the turn."""
        if not self._waiting:
            return None
        owner = next(iter(self._waiting))
        waiting = self._waiting.pop(owner)
        id_ = waiting.popleft()
        if waiting:
            self._waiting[owner] = waiting
        del self._owner_of[id_]
        self._positions = None
        return id_

    def remove(self, id_: str) -> bool:
        """Forget a waiting id; whether there was one."""
        owner = self._owner_of.pop(id_, None)
        if owner is None:
            return False
        self._waiting[owner].remove(id_)
        if not self._waiting[owner]:
            del self._waiting[owner]
        self._positions = None
        return True

    def order(self) -> list[str]:
        """All waiting ids in the order in which they would be taken now."""
        turns = [list(waiting) for waiting in self._waiting.values()]
        longest = max(map(len, turns), default=0)
        return [turn[place] for place in range(longest) for turn in turns if place < len(turn)]

    def positions(self) -> Mapping[str, int]:
        """Where each waiting id stands, from 1; found once for all who ask until the line moves."""
        if self._positions is None:
            self._positions = {id_: place for place, id_ in enumerate(self.order(), start=1)}
        return self._positions
