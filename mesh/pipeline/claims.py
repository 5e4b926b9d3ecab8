"""What this asker itself has under way on each shard, counted the moment a route is picked.

What hosts advertise of their load is up to ten seconds old: without this, all that an asker begins
meanwhile would go to the same one of several replicas, and what it had there when a host counted
would keep it away from where its prompts' beginnings lie. Knows no links and decides nothing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from datetime import datetime

from mesh.routing.cover import ShardKey


class Claim:
    """One session of this asker on a shard, from the pick to its end; `steps` it owes answers to.

    A parked one is released, and renewed when it goes on.
    """

    __slots__ = ("_claims", "_held", "_key", "_steps")

    def __init__(self, claims: Claims, key: ShardKey) -> None:
        self._claims = claims
        self._key = key
        self._held = False
        self._steps = 0
        self.renew()

    def renew(self) -> None:
        """The session needs its stream (again)."""
        if not self._held:
            self._held = True
            self._claims.add(self._key, sessions=1)

    def owes(self, steps: int) -> None:
        """So many of its steps are unanswered now."""
        if self._held and steps != self._steps:
            self._claims.add(self._key, steps=steps - self._steps)
            self._steps = steps

    def release(self) -> None:
        """The session needs nothing of the shard for now, or for ever; twice does no harm."""
        if self._held:
            self._claims.add(self._key, sessions=-1, steps=-self._steps)
            self._held, self._steps = False, 0


class Claims:
    """All claims of one asker."""

    def __init__(self, asker: str = "") -> None:
        """`asker` is any name that other askers do not have: see `lot`."""
        self._asker = asker
        self._sessions: Counter[ShardKey] = Counter()
        self._steps: Counter[ShardKey] = Counter()
        self._most: dict[ShardKey, int] = {}  # steps owed at once since the host's last word
        self._heard: dict[ShardKey, tuple[datetime, int]] = {}
        self._turns: dict[ShardKey, int] = {}
        self._turn = 0

    def claim(self, key: ShardKey) -> Claim:
        """A route over this shard was picked; to be released when its session ends."""
        self._turn += 1
        self._turns.pop(key, None)
        self._turns[key] = self._turn
        if len(self._turns) > _MAX_REMEMBERED:
            del self._turns[next(iter(self._turns))]
        return Claim(self, key)

    def sessions(self, key: ShardKey) -> int:
        """How many sessions this asker has open there, or is opening."""
        return self._sessions[key]

    def depth(self, key: ShardKey) -> int:
        """What they add to the shard's queue: one each, and each unanswered step."""
        return self._sessions[key] + self._steps[key]

    def heard(self, words: Mapping[ShardKey, datetime]) -> None:
        """These are the shards there are, each with when its host counted what it last said."""
        for key, at in words.items():
            if key not in self._heard or self._heard[key][0] != at:
                self._heard[key] = (at, self._most.get(key, 0))
                self._most[key] = self._steps[key]
        self._heard = {key: self._heard[key] for key in words}
        self._most = {key: self._most[key] for key in words}

    def within(self, key: ShardKey, told: int) -> int:
        """How many of the `told` steps that wait there may be ours: they are counted as claims, or
        were answered since."""
        return min(told, self._heard[key][1]) if key in self._heard else 0

    def lot(self, key: ShardKey) -> float:
        """Which of several equals is next: the one that this asker used longest ago, or never.

        Of those never used every asker prefers another (highest random weight, Thaler and
        Ravishankar 1998), so that they do not all begin with the same.
        """
        turn = self._turns.get(key)
        if turn is not None:
            return float(turn)
        digest = hashlib.sha256("\0".join((self._asker, *key)).encode()).digest()
        return int.from_bytes(digest[:4], "big") / 2**32

    def add(self, key: ShardKey, *, sessions: int = 0, steps: int = 0) -> None:
        """A claim counts for so much more."""
        for counter, change in ((self._sessions, sessions), (self._steps, steps)):
            counter[key] += change
            if not counter[key]:
                del counter[key]
        self._most[key] = max(self._most.get(key, 0), self._steps[key])


_MAX_REMEMBERED = 1024
"""Shards whose turn is remembered; the one that was used longest ago is forgotten."""
