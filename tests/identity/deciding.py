"""Decisions of a hearth for tests: signed for real, each seeing what a test says its author saw."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mesh.events.decision import DecisionDraft, DecisionId, SignedDecision, seal
from mesh.events.graph import Graph
from mesh.identity import decisions
from mesh.identity.decisions import (
    Acknowledged,
    Added,
    Decision,
    Founded,
    LevelChanged,
    Readmitted,
    Recovered,
    Revoked,
    hearth_id,
    recovery_statement,
)
from mesh.identity.keys import NodeKey
from mesh.identity.membership import HearthRules
from mesh.identity.membership.rules import Judge
from mesh.identity.recovery import recovery_key
from mesh.identity.roster import Cut, Roster, TrustLevel
from mesh.types import NodeId
from tests.identity.support import Party

MEMBER, TRUSTED, ANCHOR = TrustLevel.MEMBER, TrustLevel.TRUSTED, TrustLevel.ANCHOR
NONCE = bytes(16)
CODE = "0000-0000-0000-0000-0000-0000-02MC"
NOTHING = Cut(0, 0, b"")


@functools.cache
def party(name: str) -> Party:
    """The same key for the same name, in every process."""
    seed = hashlib.sha256(name.encode()).digest()
    return Party(name, NodeKey(Ed25519PrivateKey.from_private_bytes(seed)))


def ids(*names: str) -> frozenset[NodeId]:
    return frozenset(party(name).id for name in names)


@functools.cache
def founding(founder: str, two_signatures: bool) -> Founded:
    key = recovery_key(CODE).public_key().public_bytes_raw()
    return Founded("Home", NONCE, party(founder).certificate, founder, key, 1_000, two_signatures)


@dataclass
class Deciding:
    """A graph of decisions with its judge. Whoever decides has seen all there is, by default."""

    founder: str = "a"
    two_signatures: bool = True
    refused: list[SignedDecision] = field(default_factory=list)

    def __post_init__(self) -> None:
        said = founding(self.founder, self.two_signatures)
        self.hearth = hearth_id(said)
        self.rules = HearthRules(self.hearth)
        self.graph = Graph()
        self.judge: Judge = self.rules.judge(self.graph)
        self.root = self.say(self.founder, said, after=(), wall_ms=said.founded_ms)

    def signed(
        self,
        who: str,
        decision: Decision,
        after: Iterable[DecisionId] | None = None,
        wall_ms: int = 0,
    ) -> SignedDecision:
        """A decision by somebody who has seen these decisions and all before them."""
        parents = self._parents(after, isinstance(decision, Readmitted | Recovered))
        return self._sealed(who, *decisions.encode(decision), parents, wall_ms)

    def _parents(
        self, after: Iterable[DecisionId] | None, everything: bool
    ) -> tuple[DecisionId, ...]:
        """By default what an honest node names that has everything."""
        if after is not None:
            return self.graph.newest(self.graph.reach(tuple(after)))
        return self.graph.newest(self.graph.everything if everything else self.judge.acknowledged())

    def raw(self, who: str, kind: str, payload: dict[str, Any]) -> SignedDecision:
        """A decision of any content, offered."""
        decision = self._sealed(who, kind, payload, self.graph.tips, 0)
        self.offer(decision)
        return decision

    def _sealed(
        self,
        who: str,
        kind: str,
        payload: dict[str, Any],
        parents: tuple[DecisionId, ...],
        wall_ms: int,
    ) -> SignedDecision:
        draft = DecisionDraft(
            self.hearth, party(who).id, self.graph.depth_after(parents), wall_ms, kind, payload,
            parents,
        )  # fmt: skip
        return seal(draft, party(who).key.sign)

    def offer(self, decision: SignedDecision) -> bool:
        """Whether the door lets a decision in."""
        if decision.id in self.graph:
            return False
        if (
            self.graph.missing(decision)
            or not self.judge.permits(decision)
            or self.judge.rewrites(decision)
        ):
            self.refused.append(decision)
            return False
        self.graph.add(decision)
        self.judge.note(decision)
        return True

    def say(
        self,
        who: str,
        decision: Decision,
        *,
        after: Iterable[DecisionId] | None = None,
        wall_ms: int = 0,
    ) -> DecisionId:
        signed = self.signed(who, decision, after, wall_ms)
        self.offer(signed)
        return signed.id

    def add(
        self,
        who: str,
        subject: str,
        level: TrustLevel = MEMBER,
        after: Iterable[DecisionId] | None = None,
    ) -> DecisionId:
        return self.say(who, Added(party(subject).certificate, subject, level), after=after)

    def change(
        self,
        who: str,
        subject: str,
        level: TrustLevel,
        after: Iterable[DecisionId] | None = None,
    ) -> DecisionId:
        return self.say(who, LevelChanged(party(subject).id, level), after=after)

    def revoke(
        self,
        who: str,
        subject: str,
        after: Iterable[DecisionId] | None = None,
        cut: Cut = NOTHING,
    ) -> DecisionId:
        return self.say(who, Revoked(party(subject).id, cut), after=after)

    def readmit(
        self, who: str, subject: str, after: Iterable[DecisionId] | None = None
    ) -> DecisionId:
        return self.say(who, Readmitted(party(subject).id), after=after)

    def acknowledge(self, who: str, after: Iterable[DecisionId] | None = None) -> DecisionId:
        return self.say(who, Acknowledged(), after=after)

    def recover(
        self, who: str, after: Iterable[DecisionId] | None = None, code: str = CODE
    ) -> DecisionId:
        return self.say(who, self.recovered(who, after, code), after=after)

    def recovered(
        self, who: str, after: Iterable[DecisionId] | None = None, code: str = CODE
    ) -> Recovered:
        parents = self._parents(after, everything=True)
        bare = Recovered(party(who).certificate, who, b"")
        statement = recovery_statement(self.hearth, bare, parents, 0)
        return Recovered(bare.certificate, who, recovery_key(code).sign(statement))

    def anchors(self, *names: str) -> Deciding:
        """Make these anchors, by everybody who is needed."""
        makers = [self.founder]
        for name in names:
            self.add(self.founder, name, TRUSTED)
            for maker in makers[:2]:
                self.change(maker, name, ANCHOR)
            makers.append(name)
        return self

    @property
    def now(self) -> tuple[DecisionId, ...]:
        """What has been decided so far, to sign beside it later."""
        return self.graph.tips

    @property
    def has_second_history(self) -> bool:
        """Whether of some author's histories nobody else has acknowledged each."""
        decided = [self.graph[at] for at in range(len(self.graph))]
        return any(self.judge.second_histories(one.author) for one in decided)

    @property
    def roster(self) -> Roster:
        return self.judge.membership()

    def who(self) -> dict[str, str]:
        """Names and levels of who is in."""
        return {m.name: m.level.label for m in self.roster.members.values()}


def delivered(log: Deciding, rng: random.Random, at_first: int = 0) -> Roster | None:
    """The roster where the same decisions came in another order; None if not all were let in.

    The first `at_first` of them had come before, in their order.
    """
    graph = Graph()
    judge = log.rules.judge(graph)
    waiting = [log.graph[at] for at in range(len(log.graph))]
    while waiting:
        ready = [decision for decision in waiting if not graph.missing(decision)]
        chosen = waiting[0] if len(graph) < at_first else rng.choice(ready)
        assert judge.permits(chosen)
        if judge.rewrites(chosen):
            return None
        graph.add(chosen)
        judge.note(chosen)
        waiting.remove(chosen)
    return judge.membership()
