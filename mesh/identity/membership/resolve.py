"""The resolver: the rulings that hold together in a set of decisions, and so the anchors there.

A ruling holds if its votes hold, and there were enough of them for what its voters had seen. A vote
holds if its author was an anchor in what it had seen, by rulings that hold, and if no ruling that
ends its author had been made without having seen it. So a ruling can undo one made at the same
time, which may have undone it: `_Reading` reads all of them granting that a given set of rulings
holds, and what it finds from too few is too much, from too many too little. Alternating the two
closes in from both sides (the well-founded semantics of Van Gelder, 1993); what stays between them
is what cannot be ranked.

Everything here is about a set that has, with each act, all that came before it: the whole log, or
what one author had seen. How many votes a ruling needs is read off a smaller such set, what its
voters had seen, so the definition is recursive and ends at the founding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mesh.identity.decisions import Added, Founded, Recovered, Revoked
from mesh.identity.membership.acts import Act, Acts
from mesh.identity.membership.rulings import Matter, Ruling, RulingKind, Votes, subject_of
from mesh.types import NodeId

_MAX_ROUNDS = 64
"""Rounds after which what is still moving counts as unrankable; honest logs settle in two."""

_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Era:
    """A beginning: the founding, or the newest recoveries and all before them.

    `roots` make anchors by themselves. Where the recovery code was used, `recoveries` are those
    decisions, `boundary` has them and all that they had seen, and `before` is what held then: acts
    beside the boundary that do not know of a recovery are void.
    """

    roots: tuple[Ruling, ...]
    recoveries: int = 0
    boundary: int = 0
    before: RulingsInForce | None = None

    def is_current(self, act: Act) -> bool:
        """Whether an act outside of the boundary was signed in this era."""
        return not self.recoveries or bool(act.past & self.recoveries)

    def banished(self, rulings: Iterable[Ruling]) -> tuple[Ruling, ...]:
        """Revocations from before that last: all but those of who is an anchor again."""
        again = {root.subject for root in self.roots}
        return tuple(
            ruling
            for ruling in rulings
            if ruling.matter.kind is RulingKind.REVOKE and ruling.subject not in again
        )


@dataclass(frozen=True, slots=True)
class RulingsInForce:
    """The rulings and anchors that hold in a set of decisions.

    `anchors` decide. `counted` are those and the frozen and forked ones: all that count when votes
    are. `forked` signed two histories that nobody has settled. `ended` were anchors. `decided`
    rulings hold, `possible` ones may hold: those among them that are not decided cannot be ranked.
    """

    anchors: frozenset[NodeId]
    counted: frozenset[NodeId]
    forked: frozenset[NodeId]
    ended: frozenset[NodeId]
    decided: tuple[Ruling, ...]
    possible: tuple[Ruling, ...]
    reading: Reading = field(repr=False, compare=False)
    lenient: Reading = field(repr=False, compare=False)
    """Without what only rulings undo that cannot be ranked."""


class Reading:
    """One reading of a set of acts, granting that exactly the `assumed` rulings hold."""

    def __init__(self, acts: Acts, mask: int, era: Era, assumed: Iterable[Ruling]) -> None:
        self._acts = acts
        self._mask = mask
        self._era = era
        self.grants: dict[NodeId, list[Ruling]] = {}
        self.ends: dict[NodeId, list[Ruling]] = {}
        self.found: list[Ruling] = []
        self.against: dict[NodeId, list[Ruling]] = {}
        self.promoting: dict[NodeId, list[Ruling]] = {}
        for root in era.roots:
            self.grants.setdefault(root.subject, []).append(root)
        for ruling in assumed:
            if ruling.matter.promotes:
                self.promoting.setdefault(ruling.subject, []).append(ruling)
            else:
                self.against.setdefault(ruling.subject, []).append(ruling)

    def find(self, ruling: Ruling) -> None:
        """Note that a ruling holds in this reading."""
        self.found.append(ruling)
        if ruling.matter.promotes:
            self.grants.setdefault(ruling.subject, []).append(ruling)
        elif ruling.ends:
            self.ends.setdefault(ruling.subject, []).append(ruling)

    def stands(self, act: Act) -> bool:
        """Whether an act counts on this node: it holds, or came before its rivals.

        Of two histories that nobody has decided after, the one that was here first goes on until
        the matter is settled. That differs between nodes, so who decides never hangs on it.
        """
        return self.holds(act, self._was_here_first(act))

    def holds(self, act: Act, is_first: bool = False) -> bool:
        """Whether an act of the set counts, on every node."""
        if isinstance(act.decision, Founded | Recovered):
            return True
        if act.bit & self._era.boundary and self._era.before is not None:
            # Whoever used the code has acknowledged what it had seen.
            return self._era.before.reading.holds(act, is_first=True)
        if not self._era.is_current(act):
            return False
        if isinstance(act.decision, Revoked) and act.decision.subject == act.author:
            return True  # whoever has the key may say that it is to be used no more
        known = is_first or self._was_acknowledged(act)
        return known and self._is_entitled(act) and not self._is_void(act)

    def lets_in(self, subject: NodeId) -> bool:
        """Whether the node was let in by an act that counts."""
        return any(
            act.bit & self._mask and self.holds(act)
            for act in self._acts.letting_in.get(subject, ())
        )

    def _was_acknowledged(self, act: Act) -> bool:
        """Whether an act is the only history of its author, or somebody else has decided after it.

        What only a forked author itself has seen waits, on either side of the fork.
        """
        twin = self._acts.twins.get(act.bit)
        return (
            twin is None or not twin.rivals & self._mask or bool(twin.acknowledged_by & self._mask)
        )

    def _was_here_first(self, act: Act) -> bool:
        twin = self._acts.twins.get(act.bit)
        rivals = twin.rivals & self._mask if twin is not None else 0
        return act.bit < rivals & -rivals

    def _is_entitled(self, act: Act) -> bool:
        """Whether the author was an anchor in what it had seen."""
        ends = [end for end in self.ends.get(act.author, ()) if end.is_known_to(act.past)]
        return any(
            grant.is_known_to(act.past) and _is_alive(grant, ends)
            for grant in self.grants.get(act.author, ())
        )

    def _is_void(self, act: Act) -> bool:
        """Whether a ruling against the author was made without having seen this act.

        An author's own leave says nothing about what it signed elsewhere: whoever has an old copy
        of its key and log could undo everything by it. Such acts are rivals of the leave.
        """
        return any(
            not act.bit & ruling.mask
            and not ruling.is_own
            and (
                not ruling.is_known_to(act.past)
                if ruling.matter.kind is RulingKind.READMIT
                else not self._is_reinstated(act, ruling)
            )
            for ruling in self.against.get(act.author, ())
        )

    def _is_reinstated(self, act: Act, end: Ruling) -> bool:
        """Whether the author was made an anchor again after `end`, before it acted."""
        return any(
            end.is_known_to(grant.mask) and grant.is_known_to(act.past)
            for grant in self.grants.get(act.author, ())
        )


class Resolver:
    """Finds what holds in sets of the acts so far. Remembers: the same set is asked for often."""

    def __init__(self, acts: Acts, votes: Votes) -> None:
        self.two_signatures = True
        self._acts = acts
        self._votes = votes
        self._known: dict[tuple[int, int], RulingsInForce] = {}
        self._relevant = 0
        self._candidates: set[NodeId] = set()

    def truncate(self, length: int) -> None:
        """Acts from this position on were taken back."""
        kept = (1 << length) - 1
        self._relevant &= kept
        if self._candidates != self._votes.candidates:
            self._candidates.clear()  # what is relevant is found anew with the next act
            self._known.clear()
        self._known = {key: held for key, held in self._known.items() if not key[0] & ~kept}

    def holding(self, mask: int) -> RulingsInForce:
        """What holds in a set that has with each act all before it, and the founding."""
        key = self._key(mask)
        found = self._known.get(key)
        if found is None:
            found = self._resolve(mask)
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[key] = found
        return found

    def note(self, act: Act) -> None:
        """An act was added."""
        if self._candidates != self._votes.candidates:
            self._candidates = set(self._votes.candidates)
            self._known.clear()
            self._relevant = 0
            for each in self._acts.all:
                self._note_relevance(each)
        else:
            self._note_relevance(act)

    def votes_needed(self, ruling: Ruling, mask: int, others: Iterable[Ruling] = ()) -> int:
        """How many anchors it takes, for what the voters had seen.

        `mask` is the set that the ruling is part of, and `others` are promotions of its subject
        there which the voters may not have seen.
        """
        if not self.two_signatures or ruling.is_own:
            return 1
        before = self.holding(ruling.prior)
        seen = set(before.counted)
        if not ruling.matter.promotes:
            for voter in ruling.voters:
                # A vote given counts as carried: its voter gains nothing by not having seen that it
                # was. Who was put out or demoted in what the voter had seen is no anchor any more.
                seen |= self._votes.bound_by(voter, ruling, mask) - before.ended
        if not ruling.ends:
            return 2 if len(seen - {ruling.subject}) >= 2 else 1
        for other in others:
            if not ruling.is_known_to(other.mask):
                seen |= self.holding(other.prior).counted | {other.subject}
        return 2 if ruling.subject in seen and len(seen) >= 3 else 1

    def _key(self, mask: int) -> tuple[int, int]:
        """Two sets with the same key have the same anchors."""
        twins = acknowledged = 0
        for bit, twin in self._acts.twins.items():
            twins |= bit
            if twin.acknowledged_by & mask:
                acknowledged |= bit
        return mask & (self._relevant | twins), acknowledged & mask

    def _note_relevance(self, act: Act) -> None:
        match act.decision:
            case Founded() | Recovered():
                is_relevant = True
            case Added():
                is_relevant = act.member is not None and act.member.node_id in self._candidates
            case _:
                is_relevant = subject_of(act) in self._candidates
        if is_relevant:
            self._relevant |= act.bit

    def _resolve(self, mask: int) -> RulingsInForce:
        era = self._era(mask)
        rulings = sorted(
            (ruling for ruling in self._votes.about_candidates() if self._is_of(ruling, mask, era)),
            key=lambda ruling: (ruling.order, [vote.order for vote in ruling.votes]),
        )
        few: list[Ruling] = []
        many = self._read(mask, era, rulings, few).found
        for _ in range(_MAX_ROUNDS):
            fewer = self._read(mask, era, rulings, many).found
            if fewer == few:
                break
            few = fewer
            many = self._read(mask, era, rulings, few).found
        decided = [ruling for ruling in few if ruling in many]
        possible = many + [ruling for ruling in few if ruling not in many]
        return self._holding(mask, era, decided, possible)

    def _era(self, mask: int) -> Era:
        recoveries = self._acts.newest_recoveries(mask)
        if not recoveries:
            founding = self._acts.all[0]
            return Era((_root(founding),))
        bits = past = 0
        for act in recoveries:
            bits |= act.bit
            past |= act.past
        return Era(tuple(map(_root, recoveries)), bits, past | bits, self.holding(past))

    def _is_of(self, ruling: Ruling, mask: int, era: Era) -> bool:
        """Whether a ruling is one of this set and was made in its era."""
        return ruling.is_known_to(mask) and all(
            not vote.bit & era.boundary and era.is_current(vote) for vote in ruling.votes
        )

    def _read(
        self, mask: int, era: Era, rulings: Sequence[Ruling], assumed: Iterable[Ruling]
    ) -> Reading:
        reading = Reading(self._acts, mask, era, assumed)
        for ruling in rulings:
            if self._is_carried(ruling, mask, reading):
                reading.find(ruling)
        return reading

    def _is_carried(self, ruling: Ruling, mask: int, reading: Reading) -> bool:
        if not all(reading.holds(vote) for vote in ruling.votes):
            return False
        if ruling.matter.promotes and not reading.lets_in(ruling.subject):
            return False
        others = reading.promoting.get(ruling.subject, ())
        return len(ruling.voters) >= self.votes_needed(ruling, mask, others)

    def _holding(
        self, mask: int, era: Era, decided: Sequence[Ruling], possible: Sequence[Ruling]
    ) -> RulingsInForce:
        reading = Reading(self._acts, mask, era, possible)
        for ruling in decided:
            reading.find(ruling)
        loose = Reading(self._acts, mask, era, decided)
        for ruling in possible:
            loose.find(ruling)
        alive = {
            node
            for node, grants in reading.grants.items()
            if any(_is_alive(grant, loose.ends.get(node, ())) for grant in grants)
        }
        counted = {
            node
            for node, grants in loose.grants.items()
            if any(_is_alive(grant, reading.ends.get(node, ())) for grant in grants)
        }
        forked = frozenset(node for node in counted if self._is_forked(node, mask, era, decided))
        earlier = era.before
        return RulingsInForce(
            frozenset(alive) - forked,
            frozenset(counted),
            forked,
            frozenset(reading.ends) - counted,
            (*era.banished(earlier.decided if earlier else ()), *decided),
            (*era.banished(earlier.possible if earlier else ()), *possible),
            reading,
            loose,
        )

    def _is_forked(self, node: NodeId, mask: int, era: Era, decided: Sequence[Ruling]) -> bool:
        """Whether the node signed two histories that neither a vote nor a recovery has settled."""
        settled = [era.boundary] if era.recoveries else []
        settled += [
            ruling.mask
            for ruling in decided
            if ruling.matter.kind is RulingKind.READMIT and ruling.subject == node
        ]
        # Void is what knows nothing of what settled the matter, and was not seen by it.
        void = 0
        for act in self._acts.by_author.get(node, ()):
            if any(not act.bit & inside and inside & ~act.past for inside in settled):
                void |= act.bit
        for act, rivals in self._acts.forked(node, mask & ~void):
            left = rivals
            for inside in settled:
                left &= ~inside if act.bit & inside else left
            if left:
                return True
        return False


def _root(act: Act) -> Ruling:
    return Ruling.of(Matter(RulingKind.PROMOTE, act.author), (act,))


def _is_alive(grant: Ruling, ends: Iterable[Ruling]) -> bool:
    """Whether an anchor's grant came after each of these rulings that end it."""
    return all(end.is_known_to(grant.mask) for end in ends)
