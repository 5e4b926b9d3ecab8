"""Replicas that talk, in any interleaving and over any partition, end up equal."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import BadFrame
from mesh.events.decision import DecisionId
from mesh.events.intake import Received
from mesh.events.messages import Ask, Heads, Page, Probe, Probed, Pull, from_dict, to_dict
from mesh.events.store import MAX_PAGE_EVENTS
from mesh.types import NodeId
from tests.events.support import Author, MemoryReplica, facts, household, meaning

A = NodeId("a" * 55)


def settle(replicas: list[MemoryReplica]) -> None:
    """Everybody asks everybody until nothing new comes."""
    for _ in range(len(replicas) + 1):
        for one in replicas:
            for other in replicas:
                if one is not other:
                    one.catch_up(other)


def assert_equal(replicas: list[MemoryReplica]) -> None:
    heads = [replica.chains.heads() for replica in replicas]
    states = [meaning(replica.state) for replica in replicas]
    assert all(head == heads[0] for head in heads)
    assert all(state == states[0] for state in states)


@settings(max_examples=40)
@given(st.integers(0, 10**9))
def test_any_interleaving_of_exchanges_converges(seed: int) -> None:
    rng = random.Random(seed)
    _, authors, events = household(4)
    replicas = [MemoryReplica() for _ in range(3)]
    replicas[rng.randrange(3)].take(events)
    running: list[Any] = []
    for _ in range(120):
        match rng.randrange(4):
            case 0:
                # Somebody writes, at the replica that knows all it wrote before.
                author = rng.choice(authors)
                home = replicas[authors.index(author) % 3]
                if home.chains.height(author.id) == author.seq and home.roster.members:
                    home.take(facts([author], 1, rng))
            case 1:
                one, other = rng.sample(replicas, 2)
                running.append(one.pull_from(other))
            case 2 if running:
                running.pop(rng.randrange(len(running)))  # a message was lost
            case 3 if running:
                step = rng.choice(running)
                if next(step, "over") == "over":
                    running.remove(step)
    settle(replicas)
    assert_equal(replicas)
    assert sum(replicas[0].chains.height(a.id) for a in authors) == sum(a.seq for a in authors)


@settings(max_examples=30)
@given(st.integers(0, 10**9))
def test_partitions_with_a_fork_and_a_revocation_heal(seed: int) -> None:
    rng = random.Random(seed)
    house, authors, events = household(4)
    replicas = [MemoryReplica() for _ in range(4)]
    for replica in replicas:
        replica.take(events)
    sides = [replicas[:2], replicas[2:]]
    copies = [list(authors), [*authors[:2], authors[2].fork(), authors[3]]]
    alone = [[authors[0], authors[2]], [authors[1], copies[1][2], authors[3]]]
    for side, writers in zip(sides, alone, strict=True):
        for event in facts(writers, 12, rng):
            rng.choice(side).take([event])
        settle(side)
    victim = authors[3]
    sides[0][0].take([house.revoke(victim, rng.randrange(victim.seq + 1))])
    settle(replicas)
    assert_equal(replicas)
    forked = authors[2].seq and copies[1][2].seq
    assert (authors[2].id in replicas[0].state.frozen) == bool(forked)


@pytest.mark.parametrize("length", [1, 2, 33, 34, 700])
@pytest.mark.parametrize("more", [0, 5])
def test_the_first_difference_of_two_chains_is_found(length: int, more: int) -> None:
    _, (founder, liar), events = household(2)
    del founder
    one, other = MemoryReplica(), MemoryReplica()
    common = [liar.publish(str(n), 20 + n) for n in range(length)]
    copy = liar.fork()
    for replica in (one, other):
        replica.take(events + common)
    one.take([liar.publish("one") for _ in range(3)])
    other.take([copy.publish("other") for _ in range(3 + more)])
    assert one.catch_up(other) is False
    assert one.state.frozen == {liar.id: (1, length)}
    other.catch_up(one)
    assert_equal([one, other])
    assert {event.seq for event in one.proofs[liar.id]} == {length + 1}


def test_forks_are_passed_on_to_those_who_saw_only_one_chain() -> None:
    _, (_, liar), events = household(2)
    copy = liar.fork()
    witness, bystander = MemoryReplica(), MemoryReplica()
    first = liar.publish("one", 20)
    witness.take([*events, first, copy.publish("two", 20)])
    bystander.take([*events, first])
    bystander.catch_up(witness)
    assert bystander.state.frozen == {liar.id: (1, 0)}
    assert bystander.state.models() == {}


def test_pages_are_bounded_and_come_in_canonical_order() -> None:
    _, authors, events = household(3)
    events += facts(authors, 1500, random.Random(4))
    full, fresh = MemoryReplica(), MemoryReplica()
    full.take(events)
    ranges = tuple((a.id, 1, 1, a.seq) for a in authors)
    page = full.answer(Pull(1, ranges))
    assert isinstance(page, Page)
    assert len(page.received.events) == MAX_PAGE_EVENTS
    fresh.catch_up(full)
    assert_equal([full, fresh])
    assert len(fresh.chains.pending) == 0


def test_a_peer_that_announces_what_it_cannot_show_is_noticed() -> None:
    _, authors, events = household(2)
    events.append(authors[0].publish("m"))
    honest, liar = MemoryReplica(), MemoryReplica()
    for replica in (honest, liar):
        replica.take(events)
    real = liar.answer

    def lie(request: Any) -> Any:
        answer = real(request)
        if isinstance(answer, Heads):
            author = authors[0].id
            place = answer.heads[author][:2]
            forged = {**answer.heads, author: (*place, b"x" * 8)}
            return Heads(answer.number, forged, tips=answer.tips)
        return answer

    liar.answer = lie  # type: ignore[method-assign]
    assert honest.catch_up(liar) is True
    assert honest.state.frozen == {}


messages = [
    Ask(1),
    Heads(2, {A: (1, 3, b"12345678")}, {A: (1, 4)}, (DecisionId(b"t" * 32),)),
    Pull(3, ((A, 1, 1, 9),), (A,), (DecisionId(b"w" * 32),), (DecisionId(b"h" * 32),)),
    Page.of(4, Received(((b"body", b"s" * 64),), (((b"a", b"b"), (b"c", b"d")),), ((b"e", b"f"),))),
    Probe(5, A, 1, (1, 2)),
    Probed(6, A, {1: b"12345678"}),
]


@pytest.mark.parametrize("message", messages)
def test_messages_survive_the_wire(message: Any) -> None:
    assert from_dict(to_dict(message)) == message


values = st.none() | st.integers() | st.text() | st.binary() | st.lists(st.integers(), max_size=3)


@given(st.sampled_from(messages), st.data())
def test_messages_of_the_wrong_form_are_refused(message: Any, data: st.DataObject) -> None:
    fields = to_dict(message)
    name = data.draw(st.sampled_from(sorted(fields)))
    value = data.draw(values)
    for broken in (
        {**fields, name: value},
        {key: kept for key, kept in fields.items() if key != name},
        {**fields, "more": value},
    ):
        if broken != fields:
            try:
                assert to_dict(from_dict(broken)) == broken
            except BadFrame:
                continue


def test_messages_with_too_much_in_them_are_refused() -> None:
    row = [b"x", b"y"]
    page, probe, pull = to_dict(Page(1)), to_dict(Probe(1, A, 1, ())), to_dict(Pull(1))
    for whole in (page, probe, pull):
        assert to_dict(from_dict(whole)) == whole
    for broken in (
        {**page, "events": [row] * 513},
        {**page, "decisions": [row] * 513},
        {**page, "events": [[bytes(16385), b"y"]]},
        {**probe, "seqs": list(range(1, 40))},
        {**probe, "seqs": [3, 3]},
        {**pull, "ranges": [[f"{n:03}", 1, 1, 2] for n in range(257)]},
        {**pull, "ranges": [[A, 1, 1, 2]] * 2},
        {**pull, "ranges": [["b", 1, 1, 2], ["a", 1, 1, 2]]},
        {**pull, "ranges": [[A, 1, 1, 2], [A, 2, 3, 4]]},
        {**pull, "ranges": [[A, 1, 2, 1]]},
        {**pull, "proofs": [A, A]},
        {**pull, "want": [b"w" * 32] * 2},
        {**pull, "have": [bytes([n]) * 32 for n in range(65)]},
        {"kind": "ask", "number": 1, "more": 1},
        [],
        {},
    ):
        with pytest.raises(BadFrame):
            from_dict(broken)
    assert Author(1).seq == 0


@pytest.mark.parametrize(
    ("hashes", "why"),
    [
        ([[1, b"12345678"], [1, b"87654321"]], "names something twice"),
        ([[]], "expected rows"),
        ([[1]], "expected rows"),
        (["ab"], "expected rows"),
        ([[[1], b"12345678"]], "has a key that cannot be one"),
    ],
)
def test_rows_that_are_no_dict_are_refused_with_the_reason(hashes: object, why: str) -> None:
    with pytest.raises(BadFrame, match=f"unusable: hashes: {why}"):
        from_dict({**to_dict(Probed(6, A, {})), "hashes": hashes})
