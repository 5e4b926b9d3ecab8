"""What is taken in, and what each refusal is called."""

from __future__ import annotations

import random
import tracemalloc
from datetime import datetime, timedelta

import pytest
from msgspec import structs

from mesh.accounts import allowances
from mesh.accounts.ledger import Limit, Resource, ResourceLedger, of_peer
from mesh.events import chains, pending
from mesh.events.intake import Received
from mesh.events.types import MODEL_PUBLISHED, Event, decode, seal
from mesh.events.verdict import EventVerdict
from mesh.types import NodeId
from tests.events.support import (
    FOUNDED_MS,
    HEARTH,
    Author,
    FakeClock,
    MemoryReplica,
    Record,
    altered,
    facts,
    household,
    meaning,
    reference,
    signed,
)

BAD_PER_MINUTE = allowances.LOG[Resource.BAD_EVENTS_PER_MINUTE].each
WAITING = allowances.LOG[Resource.EVENT_BYTES_WAITING]


def room() -> pending.PendingEvents:
    clock = FakeClock()
    return pending.PendingEvents(clock, ResourceLedger(clock, allowances.LOG))


def verdict_of(replica: MemoryReplica, event: Record) -> EventVerdict:
    (found,) = replica.take([event]).verdicts
    return found


def test_each_refusal_has_its_name() -> None:
    _, (founder, other), events = household(2)
    replica = MemoryReplica()
    replica.take(events)
    good = other.fork().publish("m", 30)
    assert verdict_of(replica, altered(good, signature=bytes(64))) is EventVerdict.FORGED
    assert verdict_of(replica, altered(good, body=good.body[:-1])) is EventVerdict.MALFORMED
    foreign = altered(other.draft("model.published", {"model_id": "m"}), hearth_id="another")
    assert verdict_of(replica, seal(foreign, other.key.sign)) is EventVerdict.FOREIGN
    far = other.fork().publish("m", 2**63 - 1)
    assert verdict_of(replica, far) is EventVerdict.TOO_FAR
    ahead = other.fork()
    ahead.publish("skipped")
    assert verdict_of(replica, ahead.publish("m")) is EventVerdict.HELD
    known = founder.publish("known", 31)
    assert verdict_of(replica, known) is EventVerdict.ACCEPTED
    assert verdict_of(replica, known) is EventVerdict.KNOWN
    assert verdict_of(replica, events[1]) is EventVerdict.KNOWN
    behind = altered(founder.draft("model.published", {"model_id": "m"}), lamport=1)
    assert verdict_of(replica, seal(behind, founder.key.sign)) is EventVerdict.BROKEN
    elsewhere = altered(founder.draft("model.published", {"model_id": "m"}), prev=b"x" * 32)
    assert verdict_of(replica, seal(elsewhere, founder.key.sign)) is EventVerdict.DIVERGED
    stolen = seal(founder.draft("model.published", {"model_id": "m"}), other.key.sign)
    assert verdict_of(replica, stolen) is EventVerdict.FORGED
    assert verdict_of(replica, good) is EventVerdict.ACCEPTED


def test_lamport_poison_does_not_stop_the_log() -> None:
    _, (founder, other), events = household(2)
    replica = MemoryReplica()
    replica.take(events)
    limit = replica.chains.lamport + chains.MAX_LAMPORT_LEAP
    assert verdict_of(replica, other.fork().publish("m", limit + 1)) is EventVerdict.TOO_FAR
    assert replica.chains.lamport < limit
    assert verdict_of(replica, other.publish("m", limit)) is EventVerdict.ACCEPTED
    assert verdict_of(replica, founder.publish("n", limit + 1)) is EventVerdict.ACCEPTED


def test_a_fork_keeps_both_events_and_freezes_the_author_everywhere() -> None:
    _, (founder, liar), events = household(2)
    events.append(liar.publish("before", 20))
    other = liar.fork()
    ours, theirs = liar.publish("one", 30), other.publish("two", 30)
    after = liar.publish("after", 40)
    for order in ([ours, after, theirs], [theirs, ours, after], [theirs, after, ours]):
        replica = MemoryReplica()
        replica.take(events + order)
        assert {event.id for event in replica.proofs[liar.id]} == {ours.id, theirs.id}
        assert replica.chains.height(liar.id) == ours.seq - 1
        assert set(replica.state.models()) == {"before"}
        assert [report.kind for report in replica.reports] == ["facts_forked"]
        assert verdict_of(replica, founder.fork().publish("honest")) is EventVerdict.ACCEPTED
        again = meaning(reference([*events, ours, after], {liar.id: (1, ours.seq - 1)}))
        assert {a: f for a, f in again[1].items() if a == liar.id} == {
            a: f for a, f in meaning(replica.state)[1].items() if a == liar.id
        }


def test_a_forged_conflict_is_no_fork() -> None:
    _, (_, other), events = household(2)
    copy = other.fork()
    events.append(other.publish("m", 20))
    replica = MemoryReplica()
    replica.take(events)
    forged = altered(copy.publish("n", 20), signature=bytes(64))
    assert verdict_of(replica, forged) is EventVerdict.FORGED
    assert not replica.proofs
    assert replica.chains.height(other.id) == 1


def test_a_forged_proof_freezes_nobody() -> None:
    _, (_, other), events = household(2)
    copy = other.fork()
    real, invented = other.publish("m", 20), copy.publish("n", 20)
    replica = MemoryReplica()
    replica.take(events)
    forged = signed(altered(invented, signature=bytes(64)))
    # The author's own words, of two places in its chain, and of two hearths.
    later = signed(other.publish("later", 30))
    abroad = other.fork()
    abroad.ids.clear()
    elsewhere = seal(
        altered(abroad.draft(MODEL_PUBLISHED, {"model_id": "m"}), hearth_id="another"),
        other.key.sign,
    )
    for proof in (
        (signed(real), forged), (signed(real), signed(real)), (forged, (b"", b"")),
        (signed(real), later), (signed(real), signed(elsewhere)),
    ):  # fmt: skip
        outcome = replica.receive(Received((), (proof,)))
        assert all(verdict.is_bad for verdict in outcome.verdicts)
        assert replica.state.frozen == {}
    replica.receive(Received((), ((signed(real), signed(invented)),)))
    assert replica.state.frozen == {other.id: (1, 0)}


def test_forged_proofs_and_forged_events_ahead_of_their_turn_count_against_who_sent_them() -> None:
    _, (_, other), events = household(2)
    real, invented = other.publish("m", 20), other.fork().publish("n", 20)
    replica = MemoryReplica()
    replica.take(events)
    proofs = [(signed(real), signed(altered(real, signature=bytes([n]) * 64))) for n in range(9)]
    proofs += [(signed(real), signed(altered(invented, signature=bytes(64))))]
    replica.receive(Received((), tuple(proofs * 3)), "prover")
    ahead = other.fork()
    waiting = [altered(ahead.publish(f"{n}", 30 + n), signature=bytes(64)) for n in range(30)]
    for number in range(2):
        replica.take(waiting[number:], "forger")  # nobody can say yet what they are
    assert bad_events_of(replica) == {"prover": 30}
    replica.take([real], "honest")
    assert bad_events_of(replica) == {"prover": 30, "forger": 1}


def bad_events_of(replica: MemoryReplica) -> dict[str, float]:
    return {
        row["name"]: row["resources"]["bad_events_per_minute"]["used"]
        for row in replica.chains.accounts.snapshot()
        if "bad_events_per_minute" in row["resources"]
    }


def flood(authors: list[Author], count: int) -> list[Event]:
    """Forged, replayed and malformed events, in turn."""
    rng = random.Random(5)
    bad = []
    for number in range(count):
        event = rng.choice(authors).fork().publish(f"bad-{number}", 50)
        bad.append(
            altered(event, signature=rng.randbytes(64))
            if number % 2
            else altered(event, body=event.body[: rng.randrange(len(event.body))])
        )
    return bad


def test_a_flood_of_bad_events_is_cheap_and_changes_nothing() -> None:
    _, authors, events = household(3)
    events += facts(authors, 200, random.Random(1))
    replica = MemoryReplica()
    replica.take(events)
    before, spent = meaning(replica.state), replica.verifier.calls
    bad = flood(authors, 9_000) + events * 5
    tracemalloc.start()
    for start in range(0, len(bad), 64):
        replica.take(bad[start : start + 64], "attacker")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert meaning(replica.state) == before
    assert replica.verifier.calls - spent <= BAD_PER_MINUTE
    assert peak < 4 << 20
    assert [report.kind for report in replica.reports] == ["peer_muted"]
    assert replica.take([authors[0].publish("fine")], "friend").verdicts[EventVerdict.ACCEPTED] == 1


def test_replays_are_recognised_without_a_signature_check() -> None:
    _, authors, events = household(3)
    events += [author.publish("m") for author in authors]
    replica = MemoryReplica()
    replica.take(events)
    spent = replica.verifier.calls
    outcome = replica.take(events * 100, "echo")
    assert outcome.verdicts == {EventVerdict.KNOWN: 600}
    assert replica.verifier.calls == spent
    assert len(authors) == 3


def test_a_muted_peer_is_heard_again_later() -> None:
    _, (founder,), events = household(1)
    replica = MemoryReplica()
    replica.take(events)
    replica.take(flood([founder], 100), "attacker")
    event = founder.publish("m")
    assert replica.take([event], "attacker").verdicts == {}
    replica.clock.seconds += allowances.MUTED_S + 1
    assert replica.take([event], "attacker").verdicts == {EventVerdict.ACCEPTED: 1}


def test_a_few_bad_events_a_minute_mute_nobody() -> None:
    _, (founder,), events = household(1)
    replica = MemoryReplica()
    replica.take(events)
    for _ in range(5):
        replica.take(flood([founder], int(BAD_PER_MINUTE) - 1), "clumsy")
        replica.clock.seconds += 61
    assert not replica.intake.mutes(NodeId("clumsy"))


def test_what_waits_is_bounded_and_the_nearest_is_kept() -> None:
    waiting = room()
    author = Author(1)
    author.publish("first")
    events = [author.publish(str(number)) for number in range(400)]
    for event in reversed(events):
        waiting.hold(event, None)
    assert len(waiting) == pending.PER_AUTHOR
    assert [h.event.seq for h in waiting.take(author.id, 3)] == [2, 3]


def test_what_waits_is_bounded_over_all_authors() -> None:
    waiting = room()
    for number in range(pending.MAX_AUTHORS + 10):
        stranger = Author(1000 + number)
        stranger.publish("first")
        waiting.hold(stranger.publish("m"), None)
    assert len(waiting.authors()) == pending.MAX_AUTHORS
    big = Author(1)
    large = [big.sign("a.type", {"x": bytes(16000), "n": n}) for n in range(3)]
    assert all(len(event.body) > 16000 for event in large)
    full = room()
    for number in range(40):
        stranger = Author(2000 + number)
        for n in range(20):
            event = stranger.sign("a.type", {"x": bytes(16000), "n": n})
            full.hold(event, NodeId(f"peer {number % 10}"))
    assert WAITING.total - 20_000 < full.size_bytes <= WAITING.total


def test_one_peer_cannot_fill_the_waiting_room() -> None:
    full = room()
    author = Author(1)
    large = [author.sign("a.type", {"x": bytes(16000), "n": n}) for n in range(200)]
    kept = [full.hold(event, NodeId("greedy")) for event in large]
    assert kept.count(True) * len(large[0].body) <= WAITING.each
    assert kept.count(False) > 50
    assert full.hold(Author(2).publish("m"), NodeId("friend"))
    list(full.take(author.id, 1000))  # what came true is on nobody's account
    assert full.hold(author.sign("a.type", {"x": bytes(16000)}), NodeId("greedy"))


@pytest.mark.parametrize("resource", [Resource.EVENTS_STORED, Resource.EVENT_BYTES_STORED])
def test_what_is_kept_of_one_author_ends_at_the_same_event_on_every_node(
    resource: Resource,
) -> None:
    _, (founder, flooder), events = household(2)
    flood = [flooder.publish(f"m{number}" * (number % 7 + 1), 20) for number in range(200)]
    most = 50 if resource is Resource.EVENTS_STORED else 50 * len(flood[0].body)
    limits = {**allowances.LOG, resource: Limit(most)}
    replicas = []
    for order in (flood, flood[::-1], flood[100:] + flood[:100], flood[:40] + flood[::-1]):
        clock = FakeClock()
        replica = MemoryReplica(clock, ResourceLedger(clock, limits))
        replica.take(events)
        for start in range(0, len(order), 64):
            replica.take(order[start : start + 64])
        while replica.take(flood).verdicts[EventVerdict.ACCEPTED]:
            pass  # what overflowed the waiting room is sent again
        replicas.append(replica)
    heights = {replica.chains.height(flooder.id) for replica in replicas}
    assert len(heights) == 1
    assert 20 < heights.pop() <= 50
    fine = founder.publish("fine", 300)
    for replica in replicas:
        assert [report.kind for report in replica.reports] == ["author_full"]
        assert replica.chains.is_full(flooder.id)
        assert replica.take([fine]).verdicts == {EventVerdict.ACCEPTED: 1}
        assert replica.chains.accounts.held(of_peer(flooder.id), resource) <= most


def test_an_author_that_signs_too_much_in_a_minute_is_taken_in_later() -> None:
    clock = FakeClock()
    limits = {**allowances.LOG, Resource.EVENTS_PER_MINUTE: Limit(100)}
    replica = MemoryReplica(clock, ResourceLedger(clock, limits))
    _, (founder, flooder), events = household(2)
    replica.take(events)
    flood = [flooder.publish(str(number), 20) for number in range(150)]
    for event in flood:
        replica.take([event])
    assert replica.chains.height(flooder.id) == 100
    assert replica.take([flood[0], flood[149]]).verdicts == {
        EventVerdict.KNOWN: 1,
        EventVerdict.LATER: 1,
    }
    assert replica.take([founder.publish("fine", 300)]).verdicts == {EventVerdict.ACCEPTED: 1}
    clock.seconds += 60
    assert replica.take(flood).verdicts == {EventVerdict.KNOWN: 100, EventVerdict.ACCEPTED: 50}
    assert not replica.reports


def test_nobody_waits_for_ever_and_trying_again_does_not_prolong_it() -> None:
    clock = FakeClock()
    replica = MemoryReplica(clock)
    house, (founder,), events = household(1)
    replica.take(events)
    stranger = Author(9)
    replica.take([stranger.publish("m", 10)])
    for turn in range(3):
        clock.seconds += pending.HELD_S / 3
        replica.take([founder.publish("n")])
        replica.take([house.add(Author(11 + turn))])
    held = Author(99)
    replica.take([held.publish("m", 10)])
    assert replica.chains.pending.authors() == [held.id]


def test_a_failed_write_leaves_memory_as_it_was() -> None:
    _, authors, events = household(3)
    replica = MemoryReplica()
    replica.take(events)
    before, heads, lamport = replica.state, replica.chains.heads(), replica.chains.lamport
    more = facts(authors, 20, random.Random(2))
    replica.chains.begin()
    for event in more:
        assert replica.chains.offer(event) is EventVerdict.ACCEPTED
    replica.chains.settle()
    replica.chains.rollback()
    assert replica.state == before
    assert (replica.chains.heads(), replica.chains.lamport) == (heads, lamport)
    assert replica.take(more).verdicts[EventVerdict.ACCEPTED] == 20


@pytest.mark.parametrize("days", [-1, 1])
def test_a_clock_a_day_off_changes_nothing_but_a_warning(days: int) -> None:
    _, authors, events = household(2)
    events += facts(authors, 10, random.Random(3))
    skewed = MemoryReplica(FakeClock())
    skewed.clock.wall -= timedelta(days=days)
    right = MemoryReplica(FakeClock())
    skewed.take(events)
    right.take(events)
    assert meaning(skewed.state) == meaning(right.state)
    assert right.reports == []
    warned = [report.kind for report in skewed.reports]
    assert warned == (["clock_skew"] * 2 if days > 0 else [])
    # `mesh.identity.tokens` honours no token from so far off.
    assert all("times that are shown" in report.fix for report in skewed.reports)
    facts_only = [event for event in events if isinstance(event, Event)]
    assert {decode(e.body, e.signature).hearth_id for e in facts_only} == {HEARTH}
    # Once the clock is set right that is over.
    now = right.clock.now()
    untils = [datetime.fromisoformat(report.until or "") for report in skewed.reports]
    assert all(skewed.clock.now() < until <= now for until in untils)


def test_a_clock_that_stays_ahead_is_told_again_once_what_was_told_is_over() -> None:
    _, (author,), records = household(1)
    replica, told = MemoryReplica(), []
    replica.take(records)
    for hours_ahead, passes_h in ((1, 0), (2, 2), (3, 0)):
        draft = author.draft(MODEL_PUBLISHED, {"model_id": "m"})
        wall_ms = FOUNDED_MS + hours_ahead * 3_600_000
        event = seal(structs.replace(draft, wall_ms=wall_ms), author.key.sign)
        author.ids.append(event.id)
        author.lamport = event.lamport
        replica.take([event])
        told.append(len(replica.reports))
        replica.clock.wall += timedelta(hours=passes_h)
    assert told == [1, 1, 2]
