"""The roster that a set of decisions makes, once it is known which rulings hold in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mesh.identity.decisions import Founded, LevelChanged, Revoked
from mesh.identity.membership.acts import Acts
from mesh.identity.membership.resolve import Resolver, RulingsInForce
from mesh.identity.membership.rulings import Matter, Ruling, RulingKind, Votes
from mesh.identity.roster import Cut, Member, Pending, Roster, TrustLevel
from mesh.types import NodeId

_LABELS = {
    RulingKind.REVOKE: "revoke",
    RulingKind.READMIT: "readmit",
    RulingKind.PROMOTE: TrustLevel.ANCHOR.label,
}


@dataclass(frozen=True, slots=True)
class Court:
    """All that a roster is made from."""

    hearth_id: str
    acts: Acts
    votes: Votes
    resolver: Resolver

    def roster(self) -> Roster:
        """The roster by all acts so far."""
        if not self.acts.all:
            return Roster(self.hearth_id)
        mask = self.acts.everything
        holding = self.resolver.holding(mask)
        holds = {act.bit: holding.reading.stands(act) for act in self.acts.all}
        everybody = self._let_in(holds)
        cuts, frozen = self._put_out(holding, holds)
        levels = self._levels(holding, holds)
        members = {
            node: replace(member, level=_level(node, levels.get(node, member.level), holding))
            for node, member in everybody.items()
        }
        founding = self.acts[0].decision
        assert isinstance(founding, Founded)  # noqa: S101 - the door lets nothing else in first
        return Roster(
            self.hearth_id,
            founding.hearth_name,
            founding.two_signatures,
            {node: member for node, member in members.items() if node not in cuts},
            {node: member for node, member in members.items() if node in cuts},
            cuts,
            frozen,
            frozenset(holding.forked - cuts.keys()),
            self._pending(mask, holding, members.keys() - cuts.keys()),
            self._keys(),
        )

    def _let_in(self, holds: Mapping[int, bool]) -> dict[NodeId, Member]:
        firsts = []
        for acts in self.acts.letting_in.values():
            effective = [act for act in acts if holds[act.bit]]
            if effective:
                firsts.append(min(effective, key=lambda act: act.order))
        firsts.sort(key=lambda act: act.order)
        return {act.member.node_id: act.member for act in firsts if act.member is not None}

    def _put_out(
        self, holding: RulingsInForce, holds: Mapping[int, bool]
    ) -> tuple[dict[NodeId, Cut], frozenset[NodeId]]:
        """The ends of those who are out, and which of them are frozen."""
        cuts: dict[NodeId, Cut] = {}
        decided: set[NodeId] = set()
        rulings = [r for r in holding.possible if r.matter.kind is RulingKind.REVOKE]
        for act in self.acts.all:
            # Whoever never was a candidate is put out by a single vote, which is no ruling.
            if (
                isinstance(act.decision, Revoked)
                and act.decision.subject not in self.votes.candidates
                and holds[act.bit]
            ):
                rulings.append(Ruling.of(Matter(RulingKind.REVOKE, act.decision.subject), (act,)))
                decided.add(act.decision.subject)
        again = holding.anchors | holding.forked
        for ruling in rulings:
            if ruling.subject in again:
                continue
            for vote in ruling.votes:
                assert isinstance(vote.decision, Revoked)  # noqa: S101 - it votes to revoke
                known = cuts.get(ruling.subject)
                cuts[ruling.subject] = min(vote.decision.cut, known or vote.decision.cut)
            if ruling in holding.decided:
                decided.add(ruling.subject)
        return cuts, frozenset(cuts.keys() - decided)

    def _levels(
        self, holding: RulingsInForce, holds: Mapping[int, bool]
    ) -> dict[NodeId, TrustLevel]:
        """The levels below anchor, by the newest words about them; of several the lowest."""
        said: dict[NodeId, list[tuple[int, TrustLevel]]] = {}
        for node, acts in self.acts.letting_in.items():
            first = min((a for a in acts if holds[a.bit]), key=lambda a: a.order, default=None)
            if first is not None and first.member is not None:
                said[node] = [(first.reach, first.member.level)]
        for act in self.acts.all:
            decision = act.decision
            if (
                isinstance(decision, LevelChanged)
                and decision.level < TrustLevel.ANCHOR
                and decision.subject in said
                and holds[act.bit]
                and not self.votes.is_vote(act)
            ):
                said[decision.subject].append((act.reach, decision.level))
        for ruling in holding.decided:
            if ruling.matter.kind is RulingKind.DEMOTE and ruling.subject in said:
                said[ruling.subject].append((ruling.mask, ruling.matter.level))
        return {node: _newest(words) for node, words in said.items()}

    def _pending(
        self, mask: int, holding: RulingsInForce, members: Iterable[NodeId]
    ) -> tuple[Pending, ...]:
        waiting = []
        within = set(members)
        for matter, votes in self.votes.standing(mask).items():
            wish = _LABELS.get(matter.kind, matter.level.label)
            voters = {v.author for v in votes if v.author in holding.anchors}
            if matter.subject not in within or not voters or _is_done(matter, holding):
                continue
            one = Ruling.of(matter, tuple(votes))
            needed = self.resolver.votes_needed(one, mask)
            waiting.append(Pending(matter.subject, wish, tuple(sorted(voters)), needed))
        return tuple(sorted(waiting, key=lambda p: (p.subject, p.action)))

    def _keys(self) -> dict[NodeId, bytes]:
        """Also of those who were let in by somebody who could not."""
        return {
            node: acts[0].member.public_key
            for node, acts in self.acts.letting_in.items()
            if acts[0].member is not None
        }


def _is_done(matter: Matter, holding: RulingsInForce) -> bool:
    match matter.kind:
        case RulingKind.PROMOTE:
            return matter.subject in holding.counted
        case RulingKind.READMIT:
            return matter.subject not in holding.forked
        case RulingKind.DEMOTE:
            return matter.subject not in holding.counted
        case RulingKind.REVOKE:
            return False


def _level(node: NodeId, below: TrustLevel, holding: RulingsInForce) -> TrustLevel:
    if node in holding.anchors:
        return TrustLevel.ANCHOR
    return TrustLevel.MEMBER if node in holding.forked else below


def _newest(words: list[tuple[int, TrustLevel]]) -> TrustLevel:
    """The lowest of the levels that no other word about them comes after."""
    return min(
        level
        for number, (reach, level) in enumerate(words)
        if not any(
            not reach & ~other and (reach != other or number < later)
            for later, (other, _) in enumerate(words)
            if later != number
        )
    )
