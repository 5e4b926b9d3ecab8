"""A small world of anchors, one malicious and one restored from a backup, and what must hold.

Whatever a node can have is a set of decisions that has with each all before it, so every order of
delivery is one of: which such set somebody acted on, and in which order a set came in. Honest nodes
act on any such set that has their own decisions; the restored one, once, on one that lacks some of
its own; the malicious one on any. `explore` tries every move of each, up to a depth.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from mesh.events.graph import positions
from mesh.identity.decisions import (
    ACKNOWLEDGED,
    Acknowledged,
    Added,
    Decision,
    LevelChanged,
    Readmitted,
    Revoked,
)
from mesh.identity.roster import Roster, TrustLevel
from tests.identity.deciding import ANCHOR, NOTHING, TRUSTED, Deciding, party


@dataclass(frozen=True)
class Cast:
    """Who plays what. `villain` is malicious, `restored` honest but once back from a backup."""

    anchors: tuple[str, ...]
    members: tuple[str, ...]
    villain: str
    restored: str | None = None

    @property
    def everybody(self) -> tuple[str, ...]:
        return self.anchors + self.members


@dataclass(frozen=True)
class Move:
    """A decision somebody makes, having seen the set with these newest decisions."""

    who: str
    decision: Decision
    seen: int


@dataclass
class Played:
    """One decision that was let in beyond the opening."""

    who: str
    decision: Decision


@dataclass
class Game:
    """A hearth in which moves are made and taken back."""

    cast: Cast
    house: Deciding = field(init=False)
    played: list[Played] = field(default_factory=list)

    def __post_init__(self) -> None:
        first, *others = self.cast.anchors
        self.house = Deciding(founder=first).anchors(*others)
        for member in self.cast.members:
            self.house.add(first, member, TRUSTED)
        for anchor in self.cast.anchors:
            self.house.acknowledge(anchor)
        self.opening = len(self.house.graph)

    @cached_property
    def names(self) -> dict[str, str]:
        return {party(name).id: name for name in (*self.cast.everybody, "x")}

    # Moves

    def own(self, who: str) -> int:
        """The mask of what somebody has signed."""
        graph = self.house.graph
        return sum(1 << at for at in range(len(graph)) if graph[at].author == party(who).id)

    def views(self, who: str) -> Iterator[int]:
        """The sets that somebody may act on: an old copy of the log, and any of the moves since."""
        graph = self.house.graph
        own, since = self.own(who), range(self.opening, len(graph))
        old = {self.opening, *self.backups(who)}
        seen = set()
        for start, count in itertools.product(old, range(len(since) + 1)):
            for chosen in itertools.combinations(since, count):
                mask = (1 << start) - 1
                for at in chosen:
                    mask |= graph.past(at) | 1 << at
                if mask not in seen and self.may_act_on(who, mask, own):
                    seen.add(mask)
                    yield mask

    def backups(self, who: str) -> list[int]:
        """How much of the opening an old copy may have: an early and a middle one."""
        if who not in (self.cast.villain, self.cast.restored):
            return []
        return [2, self.opening // 2]

    def may_act_on(self, who: str, mask: int, own: int) -> bool:
        if who == self.cast.villain:
            return True
        if own & ~mask and who != self.cast.restored:
            return False
        return not self.has_second_history(who, mask)

    def has_second_history(self, who: str, mask: int) -> bool:
        """Whether a set has one of two histories that came later and nobody has acknowledged.

        An honest node does not decide after that.
        """
        graph = self.house.graph
        for at in positions(mask):
            author = graph[at].author
            if author == party(who).id or graph[at].type == ACKNOWLEDGED:
                continue
            earlier = any(
                graph[first].author == author
                and graph[first].type != ACKNOWLEDGED
                and not graph.past(at) >> first & 1
                for first in positions(mask & ((1 << at) - 1))
            )
            acknowledged = any(
                graph.past(later) >> at & 1 and graph[later].author != author
                for later in positions(mask)
            )
            if earlier and not acknowledged:
                return True
        return False

    def moves(self) -> Iterator[Move]:
        for who in self.cast.anchors:
            for seen in self.views(who):
                for decision in self.wishes(who):
                    yield Move(who, decision, seen)

    def wishes(self, who: str) -> Iterator[Decision]:
        for subject in self.cast.everybody:
            node = party(subject).id
            yield Revoked(node, NOTHING)
            yield LevelChanged(node, ANCHOR)
            if subject in self.cast.anchors:
                yield LevelChanged(node, TRUSTED)
            if subject == self.cast.restored and who != subject:
                yield Readmitted(node)
        yield Added(party("x").certificate, "x", TRUSTED)
        if who == self.cast.villain:
            yield Acknowledged()

    def play(self, move: Move) -> bool:
        graph = self.house.graph
        seen = [graph[at].id for at in positions(move.seen)]
        signed = self.house.signed(move.who, move.decision, seen)
        if not self.house.offer(signed):
            return False
        self.played.append(Played(move.who, move.decision))
        return True

    def take_back(self) -> None:
        self.played.pop()
        length = self.opening + len(self.played)
        self.house.graph.truncate(length)
        self.house.judge.truncate(length)

    # What must hold

    def check(self) -> None:
        roster = self.house.roster
        self.no_coup(roster)
        self.no_upstart(roster)
        self.recovery(roster)

    def honest_votes(self, kind: type, subject: str, below: TrustLevel = ANCHOR) -> set[str]:
        """Who of the honest wished that for somebody, in this game."""
        node = party(subject).id
        return {
            move.who
            for move in self.played
            if move.who != self.cast.villain
            and isinstance(move.decision, kind)
            and getattr(move.decision, "subject", None) == node
            and (kind is not LevelChanged or move.decision.level <= below)  # type: ignore[attr-defined]
        }

    def wished_away(self, name: str) -> set[str]:
        """Who of the honest wished an anchor away."""
        return self.honest_votes(Revoked, name) | self.honest_votes(LevelChanged, name, TRUSTED)

    def no_coup(self, roster: Roster) -> None:
        """No honest anchor is undone that no honest node wished away.

        Of two anchors that are left each may put out the other: that takes one vote by design.
        """
        left = [name for name in self.cast.anchors if not self.wished_away(name)]
        if len(left) < 3:
            return
        for name in self.cast.anchors:
            if name == self.cast.villain:
                continue
            node = party(name).id
            if name in left:
                assert node in roster.anchors or node in roster.forked, (name, self.story())
                assert node not in roster.forked or name == self.cast.restored, self.story()

    def no_upstart(self, roster: Roster) -> None:
        """Nobody becomes an anchor whom no honest node voted for."""
        if sum(not self.wished_away(name) for name in self.cast.anchors) < 3:
            return
        for node in roster.anchors:
            name = self.names[node]
            if name not in self.cast.anchors:
                assert self.honest_votes(LevelChanged, name), (name, self.story())

    def recovery(self, roster: Roster) -> None:
        """The code makes its user the one who decides, whatever has happened."""
        graph, judge = self.house.graph, self.house.judge
        length = len(graph)
        who = next(name for name in self.cast.anchors if name != self.cast.villain)
        self.house.recover(who)
        assert len(graph) == length + 1, self.story()
        self.house.add(who, "y")
        after = self.house.roster
        assert after.anchors == (party(who).id,), self.story()
        assert party("y").id in after.members, self.story()
        # What the villain signs beside it changes nothing.
        for decision in (
            Revoked(party(who).id, NOTHING), LevelChanged(party(self.cast.villain).id, ANCHOR),
        ):  # fmt: skip
            self.house.say(self.cast.villain, decision, after=[graph[self.opening - 1].id])
            assert self.house.roster.anchors == after.anchors, self.story()
        graph.truncate(length)
        judge.truncate(length)

    def story(self) -> str:
        return "; ".join(f"{m.who}: {_told(m.decision, self.names)}" for m in self.played)


def explore(game: Game, depth: int, check: Callable[[], None]) -> int:
    """Every sequence of moves up to a depth, checked after each; how many were let in."""
    count = 0
    for move in list(game.moves()):
        if not game.play(move):
            continue
        check()
        count += 1
        if depth > 1:
            count += explore(game, depth - 1, check)
        game.take_back()
    return count


def wander(game: Game, rng: random.Random, length: int) -> None:
    """A random game, checked after each move."""
    while len(game.played) < length:
        who = rng.choice(game.cast.anchors)
        view = rng.choice(list(game.views(who)))
        wish = rng.choice(list(game.wishes(who)))
        if game.play(Move(who, wish, view)):
            game.check()


def _told(decision: Decision, names: dict[str, str]) -> str:
    subject = names.get(getattr(decision, "subject", ""), "?")
    level = getattr(decision, "level", None)
    return f"{type(decision).__name__} {subject}" + (f" {level.label}" if level else "")
