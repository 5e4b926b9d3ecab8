"""The state depends on which events there are, and on nothing else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.events.ledger import Verdict
from mesh.events.snapshot import dump, load
from mesh.events.types import PLACEMENT_WISHED, TOKEN_REVOKED, Event
from tests.events.support import (
    Author,
    HouseRules,
    MemoryReplica,
    facts,
    household,
    meaning,
    reference,
)


def story(seed: int) -> tuple[list[Author], list[Event]]:
    """A household's log in which somebody may be put out, at a point in its past."""
    rng = random.Random(seed)
    authors, events = household(4)
    events += facts(authors, rng.randrange(1, 25), rng)
    if rng.random() < 0.7:
        out = rng.choice(authors[1:])
        events.append(authors[0].revoke(out.id, rng.randrange(out.seq + 1), rng.choice([0, 99])))
        events += facts(authors, 5, rng)
    return authors, events


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**9), st.randoms(use_true_random=False))
def test_order_duplicates_and_loss_do_not_matter(seed: int, rng: random.Random) -> None:
    _, events = story(seed)
    arrivals = rng.choices(events, k=len(events)) + events
    rng.shuffle(arrivals)
    lost = set(rng.sample(range(len(arrivals)), k=len(arrivals) // 3))
    replica = MemoryReplica()
    left = [event for number, event in enumerate(arrivals) if number not in lost]
    while left:
        size = rng.randrange(1, 9)
        replica.take(left[:size])
        left = left[size:]
    # Gossip brings what was lost, as it comes from somebody who has everything.
    complete = MemoryReplica()
    complete.take(events)
    replica.catch_up(complete)
    assert meaning(replica.state) == meaning(complete.state) == meaning(reference(events))
    assert replica.ledger.heads() == complete.ledger.heads()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**9))
def test_every_prefix_folds_to_what_its_events_mean(seed: int) -> None:
    _, events = story(seed)
    replica = MemoryReplica()
    taken = []
    for event in events:
        if replica.take([event]).verdicts[Verdict.ACCEPTED]:
            taken.append(event)
        assert meaning(replica.state) == meaning(reference(taken))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**9))
def test_a_snapshot_is_the_state(seed: int) -> None:
    _, events = story(seed)
    rules = HouseRules()
    state = reference(events)
    saved = dump(state, rules.version)
    assert saved is not None
    assert load(saved, rules, {}) == state
    assert load(saved[:-1] + bytes([saved[-1] ^ 1]), rules, {}) is None
    assert load(saved, rules, {Author(1).id: 1}) is None


def test_a_snapshot_of_other_rules_is_not_used() -> None:
    saved = dump(reference([]), "other rules")
    assert saved is not None
    assert load(saved, HouseRules(), {}) is None


@pytest.mark.parametrize("newer_by", [0, 1])
def test_the_newest_wins_whoever_comes_last(newer_by: int) -> None:
    authors, events = household(2)
    older = authors[1 - newer_by].publish("m", 50)
    newer = authors[newer_by].publish("m", 60)
    for order in ([older, newer], [newer, older]):
        replica = MemoryReplica()
        replica.take(events + order)
        assert replica.state.models()["m"].event_id == newer.id
        assert replica.state.models()["m"].author == newer.author


def test_what_its_author_may_not_say_is_kept_but_has_no_effect() -> None:
    (founder, other), events = household(2)
    wish = other.sign(PLACEMENT_WISHED, {"model_id": "m"})
    replica = MemoryReplica()
    replica.take([*events, wish])
    assert replica.ledger.height(other.id) == wish.seq
    assert replica.state.placements() == {}
    replica.take([founder.sign(PLACEMENT_WISHED, {"model_id": "m"})])
    assert set(replica.state.placements()) == {"m"}


def test_revocation_reaches_back_behind_a_back_dated_event() -> None:
    (founder, other), events = household(2)
    kept = other.publish("kept", 40)
    founder.lamport = 100
    revocation = founder.revoke(other.id, kept.seq)
    back_dated = other.publish("void", 41)
    for order in ([kept, back_dated, revocation], [kept, revocation, back_dated]):
        replica = MemoryReplica()
        replica.take(events + order)
        assert set(replica.state.models()) == {"kept"}
        assert replica.ledger.height(other.id) == kept.seq
        late = other.fork().publish("later still")
        assert replica.take([late]).verdicts == {Verdict.VOID: 1}


def test_unknown_types_and_malformed_payloads_are_kept_but_say_nothing() -> None:
    (founder,), events = household(1)
    events += [founder.sign("a.newer.type", {"model_id": "m"})]
    events += [founder.sign(TOKEN_REVOKED, {"model_id": "m"}), founder.sign(TOKEN_REVOKED, ["x"])]
    replica = MemoryReplica()
    replica.take(events)
    assert replica.ledger.height(founder.id) == 4
    assert replica.state.revoked_tokens() == {}
    event = founder.sign(TOKEN_REVOKED, {"token_id": "t", "of a newer version": [1]})
    replica.take([event])
    assert replica.state.revoked_tokens()["t"].payload["of a newer version"] == [1]


@pytest.mark.parametrize("stranger_first", [False, True])
def test_events_wait_for_their_author_to_be_let_in(stranger_first: bool) -> None:
    (founder,), events = household(1)
    guest = Author(7)
    said = [guest.publish("m", 20), guest.publish("n", 21)]
    welcome = [founder.add(guest)]
    replica = MemoryReplica()
    replica.take(events)
    parts = [said, welcome] if stranger_first else [welcome, said]
    for part in parts:
        replica.take(part)
    assert set(replica.state.models()) == {"m", "n"}
