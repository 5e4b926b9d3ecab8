"""Decisions at the door: what waits, what is refused, that every replica ends up with the same."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from mesh.errors import BadEvent
from mesh.events import docket as docket_module
from mesh.events.decision import (
    MAX_PARENTS,
    DecisionDraft,
    DecisionId,
    SignedDecision,
    decode,
    seal,
)
from mesh.events.docket import Docket
from mesh.events.intake import Received
from mesh.events.verdict import EventVerdict
from mesh.identity import decisions
from mesh.identity.certificates import make_certificate
from mesh.identity.decisions import (
    Acknowledged,
    Added,
    Decision,
    LevelChanged,
    Recovered,
    Revoked,
)
from mesh.identity.membership import HearthRules
from mesh.identity.recovery import recovery_key
from mesh.identity.roster import Roster, TrustLevel
from tests.events.support import CODE, HEARTH, NOTHING, Author, MemoryReplica, household, signed

ANCHOR, TRUSTED = TrustLevel.ANCHOR, TrustLevel.TRUSTED


def docket(**limits: int) -> Docket:
    return Docket(HEARTH, HearthRules(HEARTH), **limits)


def offer(to: Docket, *given: SignedDecision) -> list[EventVerdict]:
    to.begin()
    verdicts = to.take([signed(decision) for decision in given])
    to.commit(to.derive())
    return verdicts


def said(
    by: Author,
    decision: Decision,
    parents: tuple[DecisionId, ...],
    depth: int,
    wall_ms: int = 0,
) -> SignedDecision:
    kind, payload = decisions.encode(decision)
    draft = DecisionDraft(HEARTH, by.id, depth, wall_ms, kind, payload, tuple(sorted(parents)))
    return seal(draft, by.key.sign)


def added(number: int) -> Added:
    return Added(make_certificate(Author(number).key), str(number), TRUSTED)


def anchors() -> tuple[Any, list[Author], list[SignedDecision]]:
    """A founder, a second anchor, and the decisions so far."""
    house, authors, events = household(2)
    return house, authors, [*events, house.change(authors[1], ANCHOR)]  # type: ignore[list-item]


def roster(of: Docket) -> Roster:
    assert isinstance(of.membership, Roster)
    return of.membership


def test_each_refusal_has_its_name() -> None:
    house, (founder, other), events = anchors()
    to = docket()
    assert offer(to, *events) == [EventVerdict.ACCEPTED] * 3
    tip, depth = house.graph.tips, 4
    good = said(founder, added(5), tip, depth)
    cases = {
        EventVerdict.KNOWN: events[1],
        EventVerdict.FORGED: structs.replace(good, signature=bytes(64)),
        EventVerdict.BROKEN: said(founder, added(6), tip, depth + 1),
        EventVerdict.UNLAWFUL: said(Author(9), added(6), tip, depth),
        EventVerdict.HELD: said(other, added(6), (DecisionId(b"x" * 32),), depth),
        EventVerdict.ACCEPTED: good,
    }
    for verdict, decision in cases.items():
        assert offer(to, decision) == [verdict], verdict
    elsewhere = seal(replace_draft(good, hearth_id="another"), founder.key.sign)
    assert offer(to, elsewhere) == [EventVerdict.FOREIGN]
    assert to.take([(b"\xc1", bytes(64))]) == [EventVerdict.MALFORMED]
    unreadable = seal(replace_draft(good, payload={}, parents=to.tips, depth=5), founder.key.sign)
    assert offer(to, unreadable) == [EventVerdict.UNLAWFUL]


def test_a_log_begins_with_the_one_founding_of_its_hearth() -> None:
    """Whoever comes in has an empty log, and who lets it in may send anything first."""
    _, (founder, _), (root, *_) = anchors()
    stranger, to = Author(9), docket()
    own = {"certificate": make_certificate(stranger.key)}
    for changes, by in (
        ({"wall_ms": root.wall_ms + 1}, founder),
        ({"author": stranger.id}, stranger),
        ({"author": stranger.id, "payload": {**root.payload, **own}}, stranger),
        ({"payload": {**root.payload, "hearth_name": "Another"}}, founder),
    ):
        other = seal(replace_draft(root, **changes), by.key.sign)
        assert offer(to, other) == [EventVerdict.UNLAWFUL], changes
    assert offer(to, root) == [EventVerdict.ACCEPTED]


def replace_draft(decision: SignedDecision, **changes: Any) -> DecisionDraft:
    names = ("hearth_id", "author", "depth", "wall_ms", "type", "payload", "parents")
    return DecisionDraft(**{**{name: getattr(decision, name) for name in names}, **changes})


@settings(max_examples=40)
@given(st.integers(0, 10**9))
def test_replicas_that_exchange_end_up_with_the_same_decisions(seed: int) -> None:
    rng = random.Random(seed)
    _, (founder, other), events = anchors()
    replicas = [MemoryReplica() for _ in range(3)]
    for replica in replicas:
        replica.take(events)
    for number in range(12):
        home = rng.choice(replicas)
        by = rng.choice([founder, other])
        own = {founder.id: replicas[0], other.id: replicas[1]}[by.id]
        home = own if rng.random() < 0.8 else home  # else it may fork itself
        parents = home.docket.parents(everything=False)
        depth = home.docket.graph.depth_after(parents)
        wish: Decision = rng.choice([added(20 + number), Acknowledged()])
        home.take([said(by, wish, parents, depth, number)])
        if rng.random() < 0.3:
            one, two = rng.sample(replicas, 2)
            one.catch_up(two)
    for _ in range(3):
        for one in replicas:
            for two in replicas:
                if one is not two:
                    assert one.catch_up(two) is False
    assert len({tuple(sorted(r.roster.anchors)) for r in replicas}) == 1
    # Where both anchors have forked, each replica may have refused another history. The code
    # settles that: what its user had seen, all come to see.
    home = rng.choice(replicas)
    home.take([recovered(Author(60), home.docket)])
    for one in replicas:
        assert one.catch_up(home) is False
        assert one.roster.anchors == (Author(60).id,)
        assert {d.id for d in decided(home.docket)} <= {d.id for d in decided(one.docket)}


def decided(of: Docket) -> list[SignedDecision]:
    return [of.graph[at] for at in range(len(of.graph))]


def recovered(by: Author, seen: Docket) -> SignedDecision:
    parents = seen.parents(everything=True)
    bare = Recovered(make_certificate(by.key), "saviour", b"")
    proof = recovery_key(CODE).sign(decisions.recovery_statement(HEARTH, bare, parents, 0))
    depth = seen.graph.depth_after(parents)
    return said(by, replace(bare, proof=proof), parents, depth)


def test_a_newcomer_gets_all_decisions_in_pages() -> None:
    house, authors, events = household(1)
    events += [house.add(Author(number)) for number in range(50, 650)]
    full, fresh = MemoryReplica(), MemoryReplica()
    full.take(events)
    assert fresh.catch_up(full) is False
    assert len(fresh.docket.graph) == 601
    assert fresh.roster == full.roster
    assert authors


def test_what_waits_for_its_parents_is_taken_in_with_them_and_asked_for() -> None:
    house, (_, other), events = anchors()
    to = docket()
    offer(to, *events)
    first = house.add(Author(5))
    second = house.say(added(6), other)
    third = house.say(Acknowledged())
    assert offer(to, third, second) == [EventVerdict.HELD, EventVerdict.HELD]
    assert to.wanted == (first.id,)
    assert offer(to, first) == [EventVerdict.ACCEPTED]
    assert to.wanted == ()
    assert len(to.graph) == 6


def test_what_waits_is_bounded_and_signed_by_somebody_known() -> None:
    _, (founder, _), events = anchors()
    to = docket()
    offer(to, *events)
    nowhere = (DecisionId(b"x" * 32),)
    strange = [said(Author(99), added(6), nowhere, 9, n) for n in range(20)]
    assert set(offer(to, *strange)) == {EventVerdict.HELD}
    assert to.wanted == ()
    # What waits of an anchor is relied on, so it has to be the anchor's.
    forged = structs.replace(said(founder, added(6), nowhere, 9), signature=bytes(64))
    assert offer(to, forged) == [EventVerdict.HELD]
    assert to.wanted == ()
    for number in range(docket_module.MAX_WAITING + 50):
        offer(to, said(founder, added(6), (DecisionId(b"%032d" % number),), 9))
    assert len(to.wanted) == docket_module.MAX_WAITING
    most = docket_module.MAX_WAITING_BYTES
    for number in range(most // 15_000 + 10):
        large = {"said": bytes(15_000), "number": number}
        draft = DecisionDraft(HEARTH, founder.id, 9, 0, "new.kind", large, nowhere)
        offer(to, seal(draft, founder.key.sign))
    assert most - 16_000 < to.waiting_bytes <= most


def test_a_failed_write_leaves_memory_as_it_was() -> None:
    house, (_, other), events = anchors()
    to = docket()
    offer(to, *events)
    before, tips, length = to.membership, to.tips, len(to.graph)
    more = [house.add(Author(5)), house.say(Revoked(house.founder.id, NOTHING), other)]
    to.begin()
    to.take([signed(decision) for decision in more])
    assert to.derive() != before
    to.rollback()
    assert (to.derive(), len(to.graph), set(to.graph.tips)) == (before, length, set(tips))
    assert offer(to, *more) == [EventVerdict.ACCEPTED] * 2
    assert roster(to).anchors == (other.id,)


def test_one_author_cannot_fill_the_log() -> None:
    """An anchor gone mad signs without end; others' decisions are taken in all the same."""
    _, (founder, mad), events = anchors()
    to = docket(max_per_author=60)
    offer(to, *events)
    flood, parents = [], to.tips
    for number in range(100):
        one = said(mad, added(10), parents, 4 + number, number)
        flood.append(one)
        parents = (one.id,)
    verdicts = offer(to, *flood)
    assert verdicts.count(EventVerdict.ACCEPTED) == 60
    assert len(to.graph) == 63
    fine = said(founder, added(5), to.parents(everything=False), to.graph.depth_after(to.tips))
    assert offer(to, fine) == [EventVerdict.ACCEPTED]


def test_of_a_forked_author_only_so_much_is_kept_as_evidence() -> None:
    _, (founder, mad), events = anchors()
    to = docket()
    offer(to, *events)
    tip = to.tips
    many = [said(mad, added(10), tip, 4, number) for number in range(40)]
    verdicts = offer(to, *many)
    assert verdicts.count(EventVerdict.ACCEPTED) == 1 + docket_module.MAX_SECOND_HISTORIES
    assert roster(to).forked == {mad.id}
    # What was refused is not asked for again.
    assert to.lacks([decision.id for decision in many]) == []
    # But what an anchor has come to rely on is taken in whatever it is.
    relied_on = many[-1]
    later = said(founder, added(5), (relied_on.id,), 5)
    assert offer(to, later) == [EventVerdict.HELD]
    assert to.wanted == (relied_on.id,)
    assert offer(to, relied_on) == [EventVerdict.ACCEPTED]
    assert later.id in to.graph


def test_a_broken_recovery_by_a_member_is_refused_and_harms_nothing() -> None:
    _, (founder, other), events = anchors()
    to = docket()
    offer(to, *events)
    kind = decisions.RECOVERED
    for parents in (to.tips, (DecisionId(b"x" * 32),)):
        draft = DecisionDraft(HEARTH, other.id, 4, 0, kind, {"certificate": b"?"}, parents)
        offer(to, seal(draft, other.key.sign))
    assert offer(to, said(founder, added(5), to.tips, 4)) == [EventVerdict.ACCEPTED]


def test_a_decision_names_as_many_others_as_it_can() -> None:
    _, (founder, other), events = anchors()
    to = docket()
    offer(to, *events)
    tip = to.tips
    wide = [said(other, Acknowledged(), tip, 4, number) for number in range(50)]
    deep = said(other, Acknowledged(), (wide[0].id,), 5)
    assert set(offer(to, *wide, deep)) == {EventVerdict.ACCEPTED}
    for everything in (False, True):
        parents = to.parents(everything=everything)
        assert len(parents) == MAX_PARENTS
        assert deep.id in parents
        later = said(founder, added(5), parents, to.graph.depth_after(parents), 9)
        assert decode(later.body, later.signature) == later


def test_a_history_that_only_its_own_anchors_acknowledge_is_no_history() -> None:
    """A founder's key makes up another past: it looks as true as the real one, and comes later."""
    house, (founder, other), events = anchors()
    to = docket()
    offer(to, *events, house.say(Acknowledged(), other))
    root = events[0].id
    puppet = Author(77)
    made = said(founder, Added(make_certificate(puppet.key), "p", TRUSTED), (root,), 2)
    crowned = said(founder, LevelChanged(puppet.id, ANCHOR), (made.id,), 3)
    nod = said(puppet, Acknowledged(), (crowned.id,), 4)
    coup = said(puppet, Revoked(other.id, NOTHING), (nod.id,), 5)
    assert offer(to, made, crowned, nod, coup) == [
        EventVerdict.ACCEPTED, EventVerdict.ACCEPTED, EventVerdict.VOID, EventVerdict.HELD,
    ]  # fmt: skip
    assert set(roster(to).anchors) == {other.id}
    assert roster(to).forked == {founder.id}
    assert puppet.id not in roster(to).members


def test_forged_decisions_mute_whoever_sends_them() -> None:
    _, (founder, _), events = anchors()
    replica = MemoryReplica()
    replica.take(events)
    good = said(founder, added(5), replica.docket.tips, 4)
    forged = tuple((good.body, bytes([n]) * 64) for n in range(100))
    for start in range(0, 100, 10):
        replica.receive(Received(decisions=forged[start : start + 10]), "attacker")
    assert [report.kind for report in replica.reports] == ["peer_muted"]
    assert len(replica.docket.graph) == 3
    # A copy with a wrong signature, as whom it puts out may send ahead, keeps nobody from the true
    # one: they have the same id.
    honest = MemoryReplica()
    honest.take([*events, good])
    replica.catch_up(honest)
    assert good.id in replica.docket.graph


@given(st.binary(max_size=300))
def test_random_bytes_are_no_decision(data: bytes) -> None:
    with pytest.raises(BadEvent):
        decode(data, bytes(64))


def test_a_decision_has_one_form_only() -> None:
    house, _, events = anchors()
    decision = events[1]
    assert decode(decision.body, decision.signature) == decision
    for changes in (
        {"parents": ()},
        {"parents": decision.parents * 2},
        {"parents": tuple(DecisionId(bytes([n]) * 32) for n in range(MAX_PARENTS + 1))},
        {"depth": 1},
        {"depth": 0},
        {"wall_ms": -1},
        {"payload": []},
        {"type": ""},
        {"author": "a b"},
    ):
        with pytest.raises(BadEvent):
            seal(replace_draft(decision, **changes), house.founder.key.sign)
