"""Rulings: what anchors decide about anchors, with the votes that carry it.

A ruling is one vote, or two by different anchors, neither about itself: whoever leaves does so
alone. Every such combination is a ruling of its own,
judged by what its voters had seen; which of them hold together is `resolve`'s business. What is
decided about nodes that nobody ever voted to be an anchor takes one vote and is no ruling.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from enum import StrEnum

from mesh.identity.decisions import Founded, LevelChanged, Readmitted, Recovered, Revoked
from mesh.identity.membership.acts import Act, Order
from mesh.identity.roster import TrustLevel
from mesh.types import NodeId


class RulingKind(StrEnum):
    """The effect of a ruling on its subject."""

    PROMOTE = "promote"
    DEMOTE = "demote"
    REVOKE = "revoke"
    READMIT = "readmit"


@dataclass(frozen=True, slots=True)
class Matter:
    """The question of a vote. `level` is where a demotion leads."""

    kind: RulingKind
    subject: NodeId
    level: TrustLevel = TrustLevel.MEMBER

    @property
    def promotes(self) -> bool:
        """Whether it makes an anchor."""
        return self.kind is RulingKind.PROMOTE


@dataclass(frozen=True, slots=True)
class Ruling:
    """Votes for one thing. `mask` has them and all that their authors had seen."""

    matter: Matter
    votes: tuple[Act, ...]
    mask: int
    order: Order

    @classmethod
    def of(cls, matter: Matter, votes: tuple[Act, ...]) -> Ruling:
        """The ruling of these votes."""
        mask = 0
        for vote in votes:
            mask |= vote.reach
        return cls(matter, votes, mask, max(vote.order for vote in votes))

    @property
    def subject(self) -> NodeId:
        """The member that it is about."""
        return self.matter.subject

    @property
    def ends(self) -> bool:
        """Whether it takes an anchor's right to decide away."""
        return self.matter.kind in (RulingKind.DEMOTE, RulingKind.REVOKE)

    @property
    def voters(self) -> frozenset[NodeId]:
        """Whose votes they are; nobody makes or readmits itself."""
        voters = frozenset(vote.author for vote in self.votes)
        return voters if self.ends else voters - {self.subject}

    @property
    def is_own(self) -> bool:
        """Whether it is the subject's own leave or stepping down."""
        return self.ends and self.voters == {self.subject}

    @property
    def prior(self) -> int:
        """What its voters had seen of each other and of everything, before it was carried."""
        mask = 0
        for vote in self.votes:
            mask |= vote.past
        return mask

    def is_known_to(self, mask: int) -> bool:
        """Whether a set has all of its votes."""
        return not self.mask & ~mask


class Votes:
    """All votes so far by what they are for, and the rulings they make."""

    def __init__(self) -> None:
        self.rulings: dict[NodeId, list[Ruling]] = {}
        """By subject."""
        self.candidates: set[NodeId] = set()
        """Nodes that are anchors by themselves, or that somebody ever voted to be one."""
        self._rooted: list[Act] = []
        self._cast: dict[Matter, list[Act]] = {}
        self._about: dict[tuple[NodeId, NodeId], list[Act]] = {}
        self._votes: set[int] = set()

    def add(self, act: Act, matter: Matter | None) -> None:
        """Take in an act; a matter of None says that it is no vote."""
        if isinstance(act.decision, Founded | Recovered):
            self._rooted.append(act)
            self.candidates.add(act.author)
        subject = subject_of(act)
        if subject is not None:
            self._about.setdefault((act.author, subject), []).append(act)
        if matter is None:
            return
        if matter.promotes:
            self.candidates.add(matter.subject)
        made = [Ruling.of(matter, (act,))]
        made += [
            Ruling.of(matter, (vote, act))
            for vote in self._cast.get(matter, ())
            if len({vote.author, act.author, matter.subject}) == 3 and self._stand(vote, act)
        ]
        self.rulings.setdefault(matter.subject, []).extend(made)
        self._cast.setdefault(matter, []).append(act)
        self._votes.add(act.bit)

    def is_vote(self, act: Act) -> bool:
        """Whether an act is a vote, rather than a decision by one alone."""
        return act.bit in self._votes

    def truncate(self, mask: int) -> None:
        """Forget every act outside of this set."""
        self.rulings = {
            subject: [ruling for ruling in rulings if ruling.is_known_to(mask)]
            for subject, rulings in self.rulings.items()
        }
        self._cast = {m: [v for v in cast if v.bit & mask] for m, cast in self._cast.items()}
        self._about = {k: [a for a in acts if a.bit & mask] for k, acts in self._about.items()}
        self._rooted = [act for act in self._rooted if act.bit & mask]
        self._votes = {bit for bit in self._votes if bit & mask}
        self.candidates = {act.author for act in self._rooted}
        self.candidates |= {m.subject for m, cast in self._cast.items() if cast and m.promotes}

    def about_candidates(self) -> Iterator[Ruling]:
        """Every ruling that matters for who decides."""
        for subject in self.candidates:
            yield from self.rulings.get(subject, ())

    def bound_by(self, voter: NodeId, ruling: Ruling, mask: int) -> frozenset[NodeId]:
        """The anchors that the voter has voted for, carried or not, other than after the ruling."""
        made = 0
        for vote in ruling.votes:
            made |= vote.bit
        return frozenset(
            matter.subject
            for matter, cast in self._cast.items()
            if matter.promotes
            and any(v.author == voter and v.bit & mask and made & ~v.past for v in cast)
        )

    def standing(self, mask: int) -> dict[Matter, list[Act]]:
        """The votes in a set that their authors have not replaced by another word there."""
        found: dict[Matter, list[Act]] = {}
        for matter, cast in self._cast.items():
            live = [v for v in cast if v.bit & mask and not self._is_replaced(v, mask)]
            if live:
                found[matter] = live
        return found

    def _stand(self, *votes: Act) -> bool:
        """Whether no voter had taken back its vote in what the voters together had seen."""
        together = 0
        for vote in votes:
            together |= vote.reach
        return not any(self._is_replaced(vote, together) for vote in votes)

    def _is_replaced(self, vote: Act, mask: int) -> bool:
        subject = subject_of(vote)
        if subject is None:
            return False
        return any(
            later.bit & mask and later.past & vote.bit
            for later in self._about.get((vote.author, subject), ())
        )


def matter_of(act: Act, counted: Container[NodeId], forked: Container[NodeId]) -> Matter | None:
    """What an act is a vote for; None when it is none.

    `counted` are the anchors that the act's author had seen, `forked` those of them that it knew to
    have signed two histories: lowering another node's level takes no votes, and who did nothing
    wrong is not readmitted.
    """
    match act.decision:
        case LevelChanged(subject, TrustLevel.ANCHOR):
            return Matter(RulingKind.PROMOTE, subject)
        case LevelChanged(subject, level) if subject in counted:
            return Matter(RulingKind.DEMOTE, subject, level)
        case Revoked(subject):
            return Matter(RulingKind.REVOKE, subject)
        case Readmitted(subject) if subject in forked:
            return Matter(RulingKind.READMIT, subject)
    return None


def subject_of(act: Act) -> NodeId | None:
    """The member whose level or stay an act is about."""
    match act.decision:
        case LevelChanged(subject) | Revoked(subject) | Readmitted(subject):
            return subject
    return None
