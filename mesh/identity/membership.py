"""What the membership events together mean: who is in. A pure function of the set of events.

Gives the log its `Rules` (see `mesh.events.rules`): whatever order the events came in, every node
gets the same roster. The rules:

- The founding event's author is an anchor. Anchors let nodes in, change levels, put nodes out.
- Becoming an anchor takes two anchors' votes once there are two; an anchor is put out or demoted by
  two once there are three (`Founded.two_signatures`). A vote is an event in the voter's own chain.
- A revocation names the last event of the node that counts. Later ones are void whatever time they
  claim, so a revoked anchor gains nothing by dating its events back. Removal beats adding, and a
  revoked key never comes back.
- Decisions that void each other, such as two anchors revoking each other, cannot be ranked: events
  carry no trustworthy time. Everybody they would put out is frozen, and what only a frozen anchor
  decided is void.

How it is computed: revocations void events that may be revocations themselves. `_judge` reads all
events as if a given set of rulings held; what it finds from too few rulings is too much, and from
too many too little. Alternating the two closes in from both sides (the well-founded semantics of
Van Gelder, 1993); what stays between them is what cannot be ranked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from mesh.errors import BadEvent
from mesh.identity import decisions
from mesh.identity.certificates import check_certificate
from mesh.identity.decisions import Added, Decision, Founded, LevelChanged, Revoked
from mesh.identity.keys import node_id
from mesh.identity.roster import Cut, Member, Pending, Roster, SignedFact, TrustLevel
from mesh.types import NodeId

_Order = tuple[int, NodeId, int]
_MAX_ROUNDS = 64
"""Rounds after which what is still moving counts as unrankable; honest logs settle in two."""


class SignedEvent(SignedFact, Protocol):
    """An event together with its signature."""

    @property
    def signature(self) -> bytes:
        """64 bytes by the author's key."""

    @property
    def signed_bytes(self) -> bytes:
        """What the signature covers."""


class HearthRules:
    """The log's `Rules` for one hearth."""

    version = "hearthnet/membership/v1"

    def __init__(self, hearth_id: str) -> None:
        self.hearth_id = hearth_id

    def concerns(self, event_type: str) -> bool:
        """Whether events of this type are membership events."""
        return event_type in decisions.MEMBERSHIP_TYPES

    def derive(self, events: Sequence[SignedFact]) -> Roster:
        """The roster after these membership events, which are all there are, in any order.

        Events with an unusable payload or without the right to what they say change nothing.
        """
        acts = sorted(_read(events), key=lambda act: act.order)
        few: frozenset[_Ruling] = frozenset()
        lenient = _judge(self.hearth_id, acts, few)
        many = lenient.rulings()
        for _ in range(_MAX_ROUNDS):
            fewer = _judge(self.hearth_id, acts, many).rulings()
            if fewer == few:
                break
            few = fewer
            many = _judge(self.hearth_id, acts, few).rulings()
        judged = _judge(self.hearth_id, acts, many | few)
        roster = _roster(judged, decided=few & many, possible=few | many)
        keys = {member.node_id: member.public_key for member in lenient.members.values()}
        return replace(roster, keys=keys, deciders=lenient.deciders)


def verify(event: SignedEvent, membership: object) -> bool | None:
    """The log's `Verify`: whether the author signed the event; None when its key is unknown.

    `membership` is the `Roster` that `HearthRules.derive` made. The founding event brings its
    author's key along: the hearth id is made from it.
    """
    assert isinstance(membership, Roster)  # noqa: S101 - the log hands back what we made
    key = membership.keys.get(event.author)
    if key is None and event.type == decisions.FOUNDED:
        key = _founder_key(event, membership.hearth_id)
    if key is None:
        return None
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(event.signature, event.signed_bytes)
    except InvalidSignature:
        return False
    return True


def _founder_key(event: SignedFact, hearth_id: str) -> bytes | None:
    try:
        decision = decisions.decode(event.type, event.payload)
    except BadEvent:
        return None
    if not isinstance(decision, Founded):
        return None
    key = check_certificate(decision.certificate)
    made_by = node_id(key) == event.author
    return key if made_by and decisions.hearth_id(key, decision.nonce) == hearth_id else None


@dataclass(frozen=True, slots=True)
class _Act:
    """An event with its payload read."""

    order: _Order
    author: NodeId
    seq: int
    id: bytes
    decision: Decision


@dataclass(frozen=True, slots=True)
class _Ruling:
    """A revocation or demotion with all the votes it needs."""

    target: NodeId
    cut: Cut
    order: _Order
    ousts: bool


@dataclass(frozen=True, slots=True)
class _Vote:
    order: _Order
    cut: Cut
    wish: str


def _read(events: Sequence[SignedFact]) -> list[_Act]:
    acts = []
    for event in events:
        try:
            decision = decisions.decode(event.type, event.payload)
        except BadEvent:
            continue  # the log keeps it, for versions that can read it; here it says nothing
        order = (event.lamport, event.author, event.seq)
        acts.append(_Act(order, event.author, event.seq, event.id, decision))
    return acts


def _judge(hearth_id: str, acts: Sequence[_Act], assumed: frozenset[_Ruling]) -> _Judgement:
    """Read all events, granting that exactly the `assumed` rulings hold."""
    judgement = _Judgement(hearth_id, assumed)
    for act in acts:
        judgement.let_in(act)
    # Only now, when all anchors are known: nobody can evade the second vote against an anchor by
    # dating a revocation to before its promotion.
    for act in acts:
        judgement.put_out(act)
    return judgement


class _Judgement:
    """One reading of all events, in canonical order."""

    def __init__(self, hearth_id: str, assumed: frozenset[_Ruling]) -> None:
        self.hearth_id = hearth_id
        self.founding: Founded | None = None
        self.members: dict[NodeId, Member] = {}
        self.found: list[_Ruling] = []
        self.votes: dict[NodeId, dict[NodeId, _Vote]] = {}
        self.ousting: dict[NodeId, dict[NodeId, _Vote]] = {}
        self._grants: dict[NodeId, list[_Order]] = {}
        self._against: dict[NodeId, list[_Ruling]] = {}
        for ruling in assumed:
            self._against.setdefault(ruling.target, []).append(ruling)

    def rulings(self) -> frozenset[_Ruling]:
        """What this reading finds decided."""
        return frozenset(self.found)

    @property
    def deciders(self) -> frozenset[NodeId]:
        """Who ever was an anchor."""
        return frozenset(self._grants)

    def let_in(self, act: _Act) -> None:
        """Founding, adding, changing levels."""
        match act.decision:
            case Founded():
                self._found(act, act.decision)
            case Added():
                self._add(act, act.decision)
            case LevelChanged():
                self._change_level(act, act.decision)

    def put_out(self, act: _Act) -> None:
        """Revoking."""
        if not isinstance(act.decision, Revoked):
            return
        subject = act.decision.subject
        if subject == act.author:
            if subject in self.members and not self._voided(act):
                self.found.append(_Ruling(subject, Cut(act.seq, act.id), act.order, ousts=True))
        elif self._decides(act):
            votes = self.ousting.setdefault(subject, {})
            votes[act.author] = _Vote(act.order, act.decision.cut, "revoke")
            if self._carried(votes, "revoke", act.order, self.votes_needed(subject, act.order)):
                self._rule(subject, votes, act.order, ousts=True)

    def votes_needed(self, subject: NodeId, at: _Order | None = None) -> int:
        """How many anchors it takes to put `subject` out, or to demote it if it is an anchor."""
        return self._needed(3, at) if self._grants.get(subject) else 1

    def votes_to_promote(self, at: _Order | None = None) -> int:
        """How many anchors it takes to make another one."""
        return self._needed(2, at)

    def _found(self, act: _Act, decision: Founded) -> None:
        key = check_certificate(decision.certificate)
        is_ours = decisions.hearth_id(key, decision.nonce) == self.hearth_id
        if self.founding is not None or not is_ours or node_id(key) != act.author:
            return
        self.founding = decision
        self._grants[act.author] = [act.order]
        self.members[act.author] = Member(
            act.author, key, decision.founder_name, TrustLevel.ANCHOR, act.author,
            decision.certificate,
        )  # fmt: skip

    def _add(self, act: _Act, decision: Added) -> None:
        if decision.subject in self.members or not self._decides(act):
            return
        key = check_certificate(decision.certificate)
        self.members[decision.subject] = Member(
            decision.subject, key, decision.name, decision.level, act.author, decision.certificate
        )

    def _change_level(self, act: _Act, decision: LevelChanged) -> None:
        member = self.members.get(decision.subject)
        steps_down = act.author == decision.subject and decision.level < TrustLevel.ANCHOR
        if member is None or not self._decides(act):
            return
        votes = self.votes.setdefault(member.node_id, {})
        votes.pop(act.author, None)  # whoever wishes something else takes its vote back
        if TrustLevel.ANCHOR not in (member.level, decision.level):
            self.members[member.node_id] = replace(member, level=decision.level)
            return
        if member.level is decision.level:
            return
        cut = Cut(act.seq, act.id) if steps_down else decision.cut
        votes[act.author] = _Vote(act.order, cut, decision.level.label)
        promotes = decision.level is TrustLevel.ANCHOR
        needed = self._needed(2 if promotes else 3, act.order)
        carried = self._carried(votes, decision.level.label, act.order, needed)
        if not steps_down and not carried:
            return
        if promotes:
            self._grants.setdefault(member.node_id, []).append(act.order)
        else:
            wish = decision.level.label
            agreed = {n: v for n, v in votes.items() if v.wish == wish}
            kept = {act.author: votes[act.author]} if steps_down else agreed
            self._rule(member.node_id, kept, act.order, ousts=False)
        self.members[member.node_id] = replace(member, level=decision.level)
        votes.clear()

    def _rule(
        self, subject: NodeId, votes: Mapping[NodeId, _Vote], order: _Order, *, ousts: bool
    ) -> None:
        cut = min((vote.cut for vote in votes.values()), key=lambda c: (c.last_seq, c.last_hash))
        self.found.append(_Ruling(subject, cut, order, ousts))

    def _carried(self, votes: Mapping[NodeId, _Vote], wish: str, at: _Order, needed: int) -> bool:
        """Whether enough anchors that still are anchors want the same."""
        return needed <= sum(
            vote.wish == wish and self._is_anchor(voter, at) for voter, vote in votes.items()
        )

    def _needed(self, from_anchors: int, at: _Order | None) -> int:
        if self.founding is None or not self.founding.two_signatures:
            return 1
        return 2 if sum(self._is_anchor(n, at) for n in self._grants) >= from_anchors else 1

    def _is_anchor(self, node: NodeId, at: _Order | None) -> bool:
        """Whether the node is an anchor in everybody's eyes at a point of the canonical order."""
        ended = [r for r in self._against.get(node, ()) if at is None or r.order < at]
        return any(
            (at is None or granted < at) and not any(r.ousts or granted < r.order for r in ended)
            for granted in self._grants.get(node, ())
        )

    def _decides(self, act: _Act) -> bool:
        """Whether the author may decide in this event: by its chain, not by the time it claims."""
        return any(
            granted[0] < act.order[0]
            and not any(
                (r.ousts or granted < r.order) and r.cut.voids(act.seq, act.id)
                for r in self._against.get(act.author, ())
            )
            for granted in self._grants.get(act.author, ())
        )

    def _voided(self, act: _Act) -> bool:
        return any(
            ruling.ousts and ruling.cut.voids(act.seq, act.id)
            for ruling in self._against.get(act.author, ())
        )


def _roster(
    judged: _Judgement, *, decided: frozenset[_Ruling], possible: frozenset[_Ruling]
) -> Roster:
    cuts: dict[NodeId, Cut] = {}
    for ruling in possible:
        if ruling.ousts:
            known = cuts.get(ruling.target)
            if known is None or _strictness(ruling.cut) < _strictness(known):
                cuts[ruling.target] = ruling.cut
    revoked = {ruling.target for ruling in decided if ruling.ousts}
    members = {n: member for n, member in judged.members.items() if n not in cuts}
    for ruling in possible - decided:
        member = members.get(ruling.target)
        if member is not None and member.level is TrustLevel.ANCHOR:
            members[ruling.target] = replace(member, level=TrustLevel.TRUSTED)
    founding = judged.founding
    return Roster(
        judged.hearth_id,
        founding.hearth_name if founding else "",
        founding.two_signatures if founding else True,
        members,
        {n: member for n, member in judged.members.items() if n in cuts},
        cuts,
        frozenset(cuts) - revoked,
        _pending(judged, members),
    )


def _strictness(cut: Cut) -> tuple[int, bytes]:
    return cut.last_seq, cut.last_hash


def _pending(judged: _Judgement, members: Mapping[NodeId, Member]) -> tuple[Pending, ...]:
    waiting = []
    for ballots in (judged.votes, judged.ousting):
        for subject, votes in ballots.items():
            if subject not in members:
                continue
            for wish in sorted({vote.wish for vote in votes.values()}):
                voters = tuple(sorted(voter for voter in votes if votes[voter].wish == wish))
                promotes = wish == TrustLevel.ANCHOR.label
                needed = judged.votes_to_promote() if promotes else judged.votes_needed(subject)
                waiting.append(Pending(subject, wish, voters, needed))
    return tuple(sorted(waiting, key=lambda p: (p.subject, p.action)))
