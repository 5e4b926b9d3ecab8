"""Decisions with their payloads read, each with the mask of what its author had seen.

Also who signed two histories: an honest node has seen all that it signed before, so two acts of one
author of which neither came before the other show that its key was used in two places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mesh.identity.certificates import check_certificate
from mesh.identity.decisions import Acknowledged, Added, Decision, Founded, Recovered
from mesh.identity.roster import Member, TrustLevel
from mesh.types import NodeId

Order = tuple[int, NodeId, bytes]


@dataclass(frozen=True, slots=True)
class Act:
    """One decision of the log. `past` is the mask of all before it, `bit` its own.

    `order` sorts acts so that each comes after its past, the same everywhere. `decision` is None
    for a kind that this version does not know. `member` is whom it lets in. `settled` is the mask
    of the readmissions and recoveries that the act knows and goes on from, with all before them.
    """

    author: NodeId
    order: Order
    bit: int
    past: int
    decision: Decision | None
    member: Member | None = None
    settled: int = 0

    @property
    def reach(self) -> int:
        """The act and all before it."""
        return self.past | self.bit

    def leaves_behind(self, other: Act) -> bool:
        """Whether `other` is outside of what was settled, and was signed in ignorance of that."""
        return bool(self.settled & ~other.past) and not other.bit & self.settled


@dataclass(slots=True)
class Twin:
    """An act of an author that forked: the masks of its rivals and of others' acts after it."""

    act: Act
    rivals: int = 0
    acknowledged_by: int = 0


class Acts:
    """All acts in the order of their positions, each author's own, and who forked where."""

    def __init__(self) -> None:
        self.all: list[Act] = []
        self.by_author: dict[NodeId, list[Act]] = {}
        self.recoveries: list[Act] = []
        self.letting_in: dict[NodeId, list[Act]] = {}
        """By who is let in."""
        self.twins: dict[int, Twin] = {}
        """Acts with rivals, by their bit."""
        self._history: dict[NodeId, int] = {}

    @property
    def everything(self) -> int:
        """The mask of all acts."""
        return (1 << len(self.all)) - 1

    def __getitem__(self, position: int) -> Act:
        return self.all[position]

    def add(self, act: Act) -> None:
        """Take in the next act.

        An acknowledgement is no history: it rivals nothing, so a node back from a backup may give
        one. Neither do acts that one of the author's own has left behind.
        """
        if not isinstance(act.decision, Acknowledged):
            for bit in bits(self.unseen_by(act.author, act.past)):
                other = self.all[bit.bit_length() - 1]
                if not act.leaves_behind(other) and not other.leaves_behind(act):
                    self._twin(other).rivals |= act.bit
                    self._twin(act).rivals |= other.bit
            self._history[act.author] = self._history.get(act.author, 0) | act.bit
        for twin in self.twins.values():
            if twin.act.bit & act.past and twin.act.author != act.author:
                twin.acknowledged_by |= act.bit
        self.all.append(act)
        self.by_author.setdefault(act.author, []).append(act)
        if isinstance(act.decision, Recovered):
            self.recoveries.append(act)
        if act.member is not None:
            self.letting_in.setdefault(act.member.node_id, []).append(act)

    def unseen_by(self, author: NodeId, past: int) -> int:
        """The mask of what the author has signed, but for acknowledgements, outside of a set."""
        return self._history.get(author, 0) & ~past

    def truncate(self, length: int) -> None:
        """Forget everything from this position on."""
        if length >= len(self.all):
            return
        kept = (1 << length) - 1
        del self.all[length:]
        for index in (self.by_author, self.letting_in):
            for node, acts in list(index.items()):
                index[node] = [act for act in acts if act.bit & kept]
                if not index[node]:
                    del index[node]
        self._history = {node: signed & kept for node, signed in self._history.items()}
        self.recoveries = [act for act in self.recoveries if act.bit & kept]
        for bit, twin in list(self.twins.items()):
            twin.rivals &= kept
            twin.acknowledged_by &= kept
            if not bit & kept or not twin.rivals:
                del self.twins[bit]

    def forked(self, author: NodeId, mask: int) -> Iterator[tuple[Act, int]]:
        """The author's acts in a set that have rivals in it, with the rivals' mask."""
        for twin in self.twins.values():
            act = twin.act
            if act.author == author and act.bit & mask and twin.rivals & mask:
                yield act, twin.rivals & mask

    def newest_recoveries(self, mask: int) -> list[Act]:
        """The recoveries in a set that no other one in it comes after."""
        inside = [act for act in self.recoveries if act.bit & mask]
        return [act for act in inside if not any(act.bit & other.past for other in inside)]

    def _twin(self, act: Act) -> Twin:
        found = self.twins.get(act.bit)
        if found is None:
            later = (
                other.bit
                for other in self.all
                if other.past & act.bit and other.author != act.author
            )
            found = self.twins[act.bit] = Twin(act, 0, sum(later))
        return found


def bits(mask: int) -> Iterator[int]:
    """The single bits of a mask, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest
        mask ^= lowest


def let_in(author: NodeId, decision: Decision | None) -> Member | None:
    """The member that a decision lets in, and its level; a beginning as anchor is said apart."""
    match decision:
        case Added(certificate, name, level):
            subject = decision.subject
        case Founded(certificate=certificate, name=name) | Recovered(certificate, name):
            subject, level = author, TrustLevel.TRUSTED
        case _:
            return None
    return Member(subject, check_certificate(certificate), name, level, author, certificate)
