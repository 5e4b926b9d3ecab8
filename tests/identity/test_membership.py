"""Who is in: the rules, the attacks on them, and that only the set of events matters."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import BadEvent, UntrustedPeer
from mesh.identity import decisions
from mesh.identity.decisions import Added, Decision, Founded, LevelChanged, Revoked, hearth_id
from mesh.identity.membership import HearthRules, verify
from mesh.identity.roster import Cut, Pending, Roster, TrustLevel, departed, freeze
from mesh.types import NodeId
from tests.identity.support import Party

MEMBER, TRUSTED, ANCHOR = TrustLevel.MEMBER, TrustLevel.TRUSTED, TrustLevel.ANCHOR
NONCE = bytes(16)
PARTIES = {name: Party(name) for name in "abcdefg"}


@dataclass(frozen=True)
class Event:
    """A log's event as the rules see it, signed for real."""

    author: NodeId
    seq: int
    lamport: int
    type: str
    payload: Any
    id: bytes
    signature: bytes = b""

    @property
    def signed_bytes(self) -> bytes:
        return b"hearthnet/event/v1\0" + self.id


@dataclass
class Log:
    """Chains of several authors; each event sees all that came before, unless told otherwise."""

    founder: str = "a"
    two_signatures: bool = True
    events: list[Event] = field(default_factory=list)
    heads: dict[str, Cut] = field(default_factory=dict)
    clock: int = 0

    def __post_init__(self) -> None:
        party = PARTIES[self.founder]
        self.rules = HearthRules(hearth_id(party.key.public_bytes, NONCE))
        founded = Founded("Home", NONCE, party.certificate, party.name, self.two_signatures)
        self.say(self.founder, founded)

    def say(self, who: str, decision: Decision, lamport: int | None = None) -> Event:
        self.clock = max(self.clock, lamport or 0) + (lamport is None)
        kind, payload = decisions.encode(decision)
        seq = self.head(who).last_seq + 1
        at = self.clock if lamport is None else lamport
        event_id = hashlib.sha256(repr((who, seq, at, kind, payload)).encode()).digest()
        key = PARTIES[who].key
        event = Event(key.node_id, seq, at, kind, payload, event_id)
        event = Event(
            *(getattr(event, name) for name in list(Event.__dataclass_fields__)[:-1]),
            signature=key.sign(event.signed_bytes),
        )
        self.events.append(event)
        self.heads[who] = Cut(seq, event_id)
        return event

    def head(self, who: str) -> Cut:
        return self.heads.get(who, Cut(0, b""))

    def add(self, who: str, subject: str, level: TrustLevel = MEMBER, **at: int) -> Event:
        return self.say(who, Added(PARTIES[subject].certificate, subject, level), **at)

    def change(self, who: str, subject: str, level: TrustLevel, **at: int) -> Event:
        return self.say(who, LevelChanged(PARTIES[subject].id, level, self.head(subject)), **at)

    def revoke(self, who: str, subject: str, cut: Cut | None = None, **at: int) -> Event:
        cut = self.head(subject) if cut is None else cut
        return self.say(who, Revoked(PARTIES[subject].id, cut), **at)

    def anchors(self, *names: str) -> Log:
        """Make these anchors, by everybody who is needed."""
        makers = [self.founder]
        for name in names:
            self.add(self.founder, name, TRUSTED)
            for maker in makers[:2]:
                self.change(maker, name, ANCHOR)
            makers.append(name)
        return self

    @property
    def roster(self) -> Roster:
        return self.rules.derive(self.events)

    def who(self) -> dict[str, str]:
        """Names and levels of who is in."""
        return {m.name: m.level.label for m in self.roster.members.values()}


def ids(*names: str) -> set[NodeId]:
    return {PARTIES[name].id for name in names}


# The ordinary course of things.


def test_founder_is_the_first_anchor() -> None:
    log = Log()
    assert log.who() == {"a": "anchor"}
    assert (log.roster.name, log.roster.hearth_id) == ("Home", log.rules.hearth_id)


def test_members_come_rise_and_go() -> None:
    log = Log()
    log.add("a", "b")
    log.add("a", "c", TRUSTED)
    assert log.who() == {"a": "anchor", "b": "member", "c": "trusted"}
    log.change("a", "b", TRUSTED)
    before = log.roster
    log.revoke("a", "c")
    assert log.who() == {"a": "anchor", "b": "trusted"}
    assert departed(before, log.roster) == ids("c")
    assert log.roster.revoked == ids("c")
    roster = log.roster
    assert roster.is_member(PARTIES["b"].id)
    assert not roster.is_member(PARTIES["c"].id)
    assert roster.at_least(PARTIES["b"].id, TRUSTED)
    assert not roster.at_least(PARTIES["b"].id, ANCHOR)
    assert roster.certificates == (PARTIES["a"].certificate, PARTIES["b"].certificate)
    with pytest.raises(UntrustedPeer, match="needs anchor"):
        roster.require(PARTIES["b"].id, ANCHOR)
    with pytest.raises(UntrustedPeer, match="not a member"):
        roster.require(PARTIES["c"].id)


@pytest.mark.parametrize("level", [MEMBER, TRUSTED])
def test_only_anchors_decide(level: TrustLevel) -> None:
    log = Log()
    log.add("a", "b", level)
    log.add("a", "c")
    before = log.roster
    log.add("b", "d")
    log.change("b", "b", ANCHOR)
    log.change("b", "c", TRUSTED)
    log.revoke("b", "a")
    assert log.roster.members == before.members
    assert log.roster.cuts == {}


def test_nobody_decides_before_becoming_an_anchor() -> None:
    log = Log()
    log.add("a", "b", TRUSTED)
    log.add("b", "c")  # before the promotion
    log.change("a", "b", ANCHOR)
    assert "c" not in log.who()
    log.add("b", "c")
    assert log.who()["c"] == "member"


def test_member_may_leave() -> None:
    log = Log()
    log.add("a", "b")
    log.revoke("b", "b")
    assert log.who() == {"a": "anchor"}


def test_revoked_key_never_comes_back() -> None:
    log = Log()
    log.add("a", "b")
    log.revoke("a", "b")
    log.add("a", "b")
    assert "b" not in log.who()


def test_somebody_elses_founding_is_nothing() -> None:
    log = Log()
    other = PARTIES["b"]
    log.say("b", Founded("Mine", NONCE, other.certificate, "b"))
    log.say("b", Founded("Mine", NONCE, PARTIES["a"].certificate, "a"))
    log.add("b", "c")
    assert log.who() == {"a": "anchor"}


# Two signatures.


def test_second_anchor_needs_one_vote_and_the_third_two() -> None:
    log = Log()
    log.add("a", "b", TRUSTED)
    log.add("a", "c", TRUSTED)
    log.change("a", "b", ANCHOR)
    assert log.who()["b"] == "anchor"
    log.change("a", "c", ANCHOR)
    log.change("a", "c", ANCHOR)  # the same anchor twice is one vote
    assert log.who()["c"] == "trusted"
    assert log.roster.pending == (Pending(PARTIES["c"].id, "anchor", (PARTIES["a"].id,), needed=2),)
    log.change("b", "c", ANCHOR)
    assert log.who()["c"] == "anchor"
    assert log.roster.pending == ()


def test_one_of_three_anchors_cannot_put_out_another() -> None:
    log = Log().anchors("b", "c")
    log.revoke("c", "a")
    assert log.who() == {"a": "anchor", "b": "anchor", "c": "anchor"}
    assert [p.action for p in log.roster.pending] == ["revoke"]
    log.revoke("b", "a")
    assert log.who() == {"b": "anchor", "c": "anchor"}


def test_one_of_three_anchors_cannot_demote_another() -> None:
    log = Log().anchors("b", "c")
    log.change("c", "a", MEMBER)
    assert log.who()["a"] == "anchor"
    log.change("b", "a", MEMBER)
    assert log.who()["a"] == "member"
    log.add("a", "d")
    assert "d" not in log.who()


def test_one_of_two_anchors_can_put_out_the_other() -> None:
    log = Log().anchors("b")
    log.revoke("b", "a")
    assert log.who() == {"b": "anchor"}


def test_policy_can_do_with_one_signature() -> None:
    log = Log(two_signatures=False)
    log.anchors("b", "c")
    log.revoke("c", "a")
    assert log.who() == {"b": "anchor", "c": "anchor"}


def test_anchor_may_step_down_by_itself() -> None:
    log = Log().anchors("b", "c")
    log.change("c", "c", TRUSTED)
    assert log.who()["c"] == "trusted"


def test_vote_can_be_taken_back() -> None:
    log = Log().anchors("b")
    log.add("a", "c", TRUSTED)
    log.change("a", "c", ANCHOR)
    log.change("a", "c", TRUSTED)
    log.change("b", "c", ANCHOR)
    assert log.who()["c"] == "trusted"


def test_demoted_anchor_can_be_promoted_again_and_decides_again() -> None:
    log = Log().anchors("b")
    log.change("a", "b", TRUSTED)
    log.add("b", "c")
    assert log.who() == {"a": "anchor", "b": "trusted"}
    log.change("a", "b", ANCHOR)
    log.add("b", "d")
    assert log.who() == {"a": "anchor", "b": "anchor", "d": "member"}


# Attacks.


def test_removal_beats_adding_at_the_same_time() -> None:
    log = Log().anchors("b")
    log.revoke("b", "c", lamport=20)
    log.add("a", "c", lamport=21)
    assert "c" not in log.who()


def test_back_dated_events_of_a_revoked_anchor_are_void() -> None:
    """Three anchors; the revoked one signs with times from before its revocation."""
    log = Log().anchors("b", "c")
    log.add("a", "d")
    head, then = log.head("c"), log.clock
    log.clock = 1000
    log.revoke("a", "c", head)
    log.revoke("b", "c", head)
    log.clock = then
    log.add("c", "e", lamport=then + 1)
    log.revoke("c", "d", lamport=then + 2)
    log.revoke("c", "a", lamport=then + 3)
    assert log.who() == {"a": "anchor", "b": "anchor", "d": "member"}
    assert log.roster.frozen == frozenset()


def test_single_revocation_of_a_silent_thief_by_one_of_two_holds() -> None:
    log = Log().anchors("b")
    head = log.head("b")
    log.add("a", "c")
    log.revoke("a", "b", head, lamport=1000)
    log.add("b", "d", lamport=20)
    log.revoke("b", "c", lamport=21)
    assert log.who() == {"a": "anchor", "c": "member"}


def test_dating_a_revocation_before_the_promotion_does_not_spare_the_second_vote() -> None:
    log = Log().anchors("b", "c")
    log.add("a", "d", TRUSTED)
    silent_since = log.clock
    log.change("a", "d", ANCHOR)
    log.change("b", "d", ANCHOR)
    assert log.who()["d"] == "anchor"
    log.revoke("c", "d", lamport=silent_since)
    assert log.who()["d"] == "anchor"


def test_two_anchors_revoking_each_other_freeze_both() -> None:
    log = Log().anchors("b")
    log.add("a", "c")
    heads = {name: log.head(name) for name in "ab"}
    log.revoke("a", "b", heads["b"])
    log.revoke("b", "a", heads["a"])
    assert log.who() == {"c": "member"}
    assert log.roster.frozen == ids("a", "b")
    assert log.roster.revoked == frozenset()


def test_frozen_anchor_lets_nobody_back_in() -> None:
    """Neither what it decided in the dispute, nor what its opponent took back."""
    log = Log().anchors("b")
    log.add("a", "c")
    heads = {name: log.head(name) for name in "ab"}
    log.revoke("a", "b", heads["b"])
    log.revoke("a", "c")
    log.revoke("b", "a", heads["a"])
    log.add("b", "d")
    assert log.who() == {}


def test_other_branch_of_a_fork_falls_to_the_cut() -> None:
    log = Log().anchors("b")
    first = log.head("b")
    log.add("b", "c")
    kept = log.head("b")
    log.heads["b"] = first
    log.add("b", "d")  # another event with the same number
    log.revoke("a", "b", kept)
    assert log.who() == {"a": "anchor", "c": "member"}


def test_fork_freezes_its_author() -> None:
    log = Log()
    log.add("a", "b")
    roster = freeze(log.roster, {PARTIES["b"].id: 3})
    assert not roster.is_member(PARTIES["b"].id)
    assert roster.frozen == ids("b")
    assert roster.cuts[PARTIES["b"].id] == Cut(3, b"")
    assert roster.keys[PARTIES["b"].id] == PARTIES["b"].key.public_bytes


# Only the set matters.

_NAMES = st.sampled_from("abcd")
_STEP = st.tuples(
    st.sampled_from(["add", "change", "revoke"]), _NAMES, _NAMES, st.sampled_from(TrustLevel),
    st.integers(0, 8), st.booleans(),
)  # fmt: skip


def _play(steps: list[Any]) -> Log:
    """A history in which authors lag behind, date back and cut where they like."""
    log = Log().anchors("b")
    for what, who, subject, level, lag, early in steps:
        lamport = max(1, log.clock + 1 - lag)
        if what == "add":
            log.add(who, subject, min(level, TRUSTED), lamport=lamport)
        elif what == "change":
            log.change(who, subject, level, lamport=lamport)
        else:
            log.revoke(who, subject, Cut(0, b"") if early else None, lamport=lamport)
    return log


@given(st.lists(_STEP, max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_order_of_arrival_does_not_matter(steps: list[Any], random: Any) -> None:
    log = _play(steps)
    expected = log.roster
    shuffled = list(log.events)
    random.shuffle(shuffled)
    assert log.rules.derive(shuffled) == expected
    assert not set(expected.members) & set(expected.cuts)


@given(st.lists(_STEP, max_size=10))
@settings(max_examples=50, deadline=None)
def test_strangers_words_change_nothing(steps: list[Any]) -> None:
    """Whatever somebody says who was never let in, with any dates."""
    log = _play(steps)
    expected = log.roster
    for lamport, subject in itertools.product((1, 5, 99), "abe"):
        log.add("g", "f", lamport=lamport)
        log.revoke("g", subject, Cut(0, b""), lamport=lamport)
        log.change("g", "g", ANCHOR, lamport=lamport)
    assert log.roster == expected


_LATER = st.tuples(
    st.sampled_from(["add", "change", "revoke"]), _NAMES, st.sampled_from(TrustLevel),
    st.integers(0, 30),
)  # fmt: skip


@given(st.lists(_LATER, max_size=8))
@settings(max_examples=50, deadline=None)
def test_whatever_a_revoked_anchor_signs_afterwards_changes_nothing(steps: list[Any]) -> None:
    """Of three anchors, two have put it out: it can neither act nor take anybody along."""
    log = Log().anchors("b", "c")
    log.add("a", "d", TRUSTED)
    thief, then = log.head("c"), log.clock
    log.revoke("a", "c", thief)
    log.revoke("b", "c", thief)
    expected = log.roster
    for what, subject, level, after in steps:
        lamport = then + 1 + after
        if what == "add":
            log.add("c", subject, min(level, TRUSTED), lamport=lamport)
        elif what == "change":
            log.change("c", subject, level, lamport=lamport)
        else:
            log.revoke("c", subject, Cut(0, b""), lamport=lamport)
    roster = log.roster
    assert (roster.members, roster.cuts) == (expected.members, expected.cuts)


# For the log.


def test_signatures_are_checked_with_the_keys_of_who_was_let_in() -> None:
    log = Log()
    added = log.add("a", "b")
    said = log.change("b", "b", TRUSTED)
    empty, roster = HearthRules(log.rules.hearth_id).derive(()), log.roster
    assert verify(log.events[0], empty) is True
    assert verify(added, empty) is None
    assert verify(added, roster) is True
    assert verify(said, roster) is True
    forged = Event(said.author, 9, 9, said.type, said.payload, said.id, added.signature)
    assert verify(forged, roster) is False
    other_hearth = HearthRules("hh1other").derive(())
    assert verify(log.events[0], other_hearth) is None


def test_limit_and_admission_follow_the_cut() -> None:
    log = Log()
    log.add("a", "b", TRUSTED)
    b = PARTIES["b"].id

    def said(seq: int, kind: str) -> Event:
        return Event(b, seq, 9, kind, {}, bytes(32))

    assert log.roster.limit(b) is None
    assert log.roster.admits(said(5, "model.published"))
    log.revoke("a", "b", Cut(3, bytes([1]) * 32))
    roster = log.roster
    assert roster.limit(b) == 3
    assert roster.admits(said(2, "model.published"))
    assert not roster.admits(said(3, "model.published"))  # another event than the one named
    assert not roster.admits(said(4, "token.revoked"))


def test_members_may_not_offer_shards() -> None:
    log = Log()
    log.add("a", "b", MEMBER)
    b = PARTIES["b"].id
    event = Event(b, 1, 9, "experimental.shard.advertised", {}, bytes(32))
    assert not log.roster.admits(event)
    log.change("a", "b", TRUSTED)
    assert log.roster.admits(event)


def test_log_keeps_what_a_revoked_anchor_says_later() -> None:
    """Or two nodes that saw two anchors revoke each other in either order would never agree."""
    log = Log().anchors("b")
    log.revoke("a", "b")
    assert log.roster.limit(PARTIES["b"].id) is None
    assert log.roster.cuts[PARTIES["b"].id].last_seq == 0
    assert not log.roster.admits(Event(PARTIES["b"].id, 1, 9, "token.revoked", {}, bytes(32)))


@pytest.mark.parametrize(
    "decision",
    [
        Founded("Home", NONCE, PARTIES["a"].certificate, "a", two_signatures=False),
        Added(PARTIES["b"].certificate, "b", TRUSTED),
        LevelChanged(PARTIES["b"].id, ANCHOR, Cut(2, bytes(32))),
        Revoked(PARTIES["b"].id, Cut(0, b""), "lost"),
    ],
)
def test_payloads_come_back_as_they_were(decision: Decision) -> None:
    kind, payload = decisions.encode(decision)
    assert decisions.decode(kind, payload) == decision
    assert decisions.decode(kind, {**payload, "newer": 1}) == decision
    for name in payload:
        for junk in (None, b"\xff", "\x1b[31m", -1, 2**70, ["x"]):
            if payload[name] == junk:
                continue
            with pytest.raises(BadEvent):
                decisions.decode(kind, {**payload, name: junk})
        with pytest.raises(BadEvent):
            decisions.decode(kind, {k: v for k, v in payload.items() if k != name})


def test_unreadable_events_say_nothing() -> None:
    log = Log()
    log.events.append(Event(PARTIES["a"].id, 9, 9, decisions.ADDED, ["junk"], bytes(32)))
    log.events.append(Event(PARTIES["a"].id, 10, 10, decisions.REVOKED, {}, bytes(32)))
    assert log.who() == {"a": "anchor"}
