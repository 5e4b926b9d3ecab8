"""The state depends on which events there are, and on nothing else."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.events import apply as applying
from mesh.events.snapshot import dump, load
from mesh.events.state import MOST_SUBJECTS, State
from mesh.events.types import TOKEN_REVOKED
from mesh.events.verdict import EventVerdict
from mesh.hearth.revocations import Revocations
from mesh.identity.roster import TrustLevel
from tests.events.support import (
    Author,
    MemoryReplica,
    Record,
    facts,
    household,
    meaning,
    reference,
)


def story(seed: int) -> tuple[list[Author], list[Record]]:
    """A household's log in which somebody may be put out, at a point in its past."""
    rng = random.Random(seed)
    house, authors, events = household(4)
    events += facts(authors, rng.randrange(1, 25), rng)
    if rng.random() < 0.7:
        out = rng.choice(authors[1:])
        events.append(house.revoke(out, rng.randrange(out.seq + 1)))
    if rng.random() < 0.3:
        authors[0].begin_again()
        events += facts(authors, 5, rng)
    return authors, events


@settings(max_examples=60)
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
    assert replica.chains.heads() == complete.chains.heads()


@settings(max_examples=40)
@given(st.integers(0, 10**9))
def test_every_prefix_folds_to_what_its_events_mean(seed: int) -> None:
    _, events = story(seed)
    replica = MemoryReplica()
    taken = []
    for event in events:
        if replica.take([event]).verdicts[EventVerdict.ACCEPTED]:
            taken.append(event)
        assert meaning(replica.state) == meaning(reference(taken))


@settings(max_examples=30)
@given(st.integers(0, 10**9))
def test_a_snapshot_is_the_state(seed: int) -> None:
    _, events = story(seed)
    state = reference(events)
    bare = State(state.membership)
    saved = dump(state, "rules")
    assert saved is not None
    assert load(saved, bare, "rules") == state
    assert load(saved[:-1] + bytes([saved[-1] ^ 1]), bare, "rules") == bare
    # Who forked since is folded anew, the others are not.
    author = Author(1).id
    forked = replace(bare, frozen={author: (1, 0)})
    same = forked.limit(author) == state.limit(author)
    gone = set() if same else {author}
    assert load(saved, forked, "rules").authors.keys() == state.authors.keys() - gone


def test_a_snapshot_of_other_rules_is_not_used() -> None:
    _, (founder,), events = household(1)
    state = reference([*events, founder.publish("m")])
    saved = dump(state, "other rules")
    assert saved is not None
    assert load(saved, State(state.membership), "rules").authors == {}


def test_who_was_put_out_since_a_snapshot_is_folded_anew() -> None:
    house, (_, other), events = household(2)
    said = [other.publish("kept"), other.publish("void")]
    saved = dump(reference([*events, *said]), "rules")
    assert saved is not None
    after = reference([*events, *said, house.revoke(other, 1)])
    assert load(saved, State(after.membership), "rules").authors == {}
    assert set(after.models()) == {"kept"}


@pytest.mark.parametrize("newer_by", [0, 1])
def test_the_newest_wins_whoever_comes_last(newer_by: int) -> None:
    _, authors, events = household(2)
    older = authors[1 - newer_by].publish("m", 50)
    newer = authors[newer_by].publish("m", 60)
    for order in ([older, newer], [newer, older]):
        replica = MemoryReplica()
        replica.take(events + order)
        assert replica.state.models()["m"].event_id == newer.id
        assert replica.state.models()["m"].author == newer.author


def test_what_its_author_may_not_say_is_kept_but_has_no_effect() -> None:
    house, (founder,), events = household(1)
    guest = Author(7)
    events.append(house.add(guest, TrustLevel.MEMBER))
    said = guest.publish("m")
    replica = MemoryReplica()
    replica.take([*events, said])
    assert replica.chains.height(guest.id) == said.seq
    assert replica.state.models() == {}
    replica.take([house.change(guest, TrustLevel.TRUSTED)])
    assert set(replica.state.models()) == {"m"}
    assert founder.seq == 0


def test_revocation_reaches_back_behind_a_back_dated_event() -> None:
    house, (_, other), events = household(2)
    kept = other.publish("kept", 40)
    revocation = house.revoke(other, kept.seq)
    back_dated = other.publish("void", 41)
    for order in ([kept, back_dated, revocation], [kept, revocation, back_dated]):
        replica = MemoryReplica()
        replica.take(events + order)
        assert set(replica.state.models()) == {"kept"}
        assert replica.chains.height(other.id) == kept.seq
        late = other.fork().publish("later still")
        assert replica.take([late]).verdicts == {EventVerdict.VOID: 1}


def test_unknown_types_and_malformed_payloads_are_kept_but_say_nothing() -> None:
    _, (founder,), events = household(1)
    events += [founder.sign("a.newer.type", {"model_id": "m"})]
    events += [founder.sign(TOKEN_REVOKED, {"model_id": "m"}), founder.sign(TOKEN_REVOKED, ["x"])]
    replica = MemoryReplica()
    replica.take(events)
    assert replica.chains.height(founder.id) == 3
    assert replica.state.authors[founder.id].facts == {}
    event = founder.sign(TOKEN_REVOKED, {"token_id": "t", "of a newer version": [1]})
    replica.take([event])
    fact = replica.state.authors[founder.id].facts[TOKEN_REVOKED, "t"]
    assert fact.payload["of a newer version"] == [1]


@pytest.mark.parametrize("at_once", [1, 7, 5000])
def test_of_an_authors_revoked_tokens_the_newest_count_however_they_came(at_once: int) -> None:
    most = MOST_SUBJECTS[TOKEN_REVOKED]
    _, (founder, other), events = household(2)
    first = [founder.sign(TOKEN_REVOKED, {"token_id": "real"}), other.publish("m")]
    junk = [other.sign(TOKEN_REVOKED, {"token_id": f"{n}"}, 100) for n in range(most + 9)]
    junk.append(other.sign(TOKEN_REVOKED, {"token_id": "2"}))
    state = reference([*events, *first])
    for start in range(0, len(junk), at_once):
        state = applying.apply(state, junk[start : start + at_once])
    assert meaning(state) == meaning(reference([*events, *first, *junk]))
    assert Revocations(state).tokens == {"real", "2", *(f"{n}" for n in range(10, most + 9))}
    assert set(state.models()) == {"m"}


def test_who_may_use_no_shards_revokes_no_tokens() -> None:
    house, (founder,), events = household(1)
    guest = Author(7)
    events.append(house.add(guest, TrustLevel.MEMBER))
    said = [
        founder.sign(TOKEN_REVOKED, {"token_id": "anchor's"}),
        guest.sign(TOKEN_REVOKED, {"token_id": "guest's"}),
    ]
    assert Revocations(reference([*events, *said])).tokens == {"anchor's"}
    events.append(house.change(guest, TrustLevel.TRUSTED))
    assert Revocations(reference([*events, *said])).tokens == {"anchor's", "guest's"}


@pytest.mark.parametrize("stranger_first", [False, True])
def test_events_wait_for_their_author_to_be_let_in(stranger_first: bool) -> None:
    house, _, events = household(1)
    guest = Author(7)
    said = [guest.publish("m", 20), guest.publish("n", 21)]
    welcome = [house.add(guest)]
    replica = MemoryReplica()
    replica.take(events)
    parts = [said, welcome] if stranger_first else [welcome, said]
    for part in parts:
        replica.take(part)
    assert set(replica.state.models()) == {"m", "n"}


def test_a_new_generation_replaces_what_its_author_said_before() -> None:
    _, (founder, other), events = household(2)
    before = [founder.publish("old", 20), founder.publish("older", 21), other.publish("its", 22)]
    founder.begin_again()
    after = [founder.publish("new", 30)]
    for order in ([*before, *after], [*after, *before], [*before[:1], *after, *before[1:]]):
        replica = MemoryReplica()
        replica.take([*events, *order])
        assert set(replica.state.models()) == {"new", "its"}
        assert replica.chains.heads()[founder.id][:2] == (2, 1)
        assert meaning(replica.state) == meaning(reference([*events, before[2], *after]))
