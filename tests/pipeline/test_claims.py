"""Replicas share what one asker does: what it has under way counts, and turns are taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from mesh.clock import LoopClock
from mesh.discovery.advertisement import Advertisement
from mesh.pipeline.claims import Claim, Claims
from mesh.pipeline.commands import Offer
from mesh.pipeline.known_shards import KnownShards
from mesh.pipeline.watch.reputation import Reputations
from mesh.routing.cover import Candidate, CoverRules, ShardKey, greedy_cover, key_of
from mesh.types import LayerRange, NodeId, ShardHealth
from tests.routing.test_cover import shard

WHOLE = LayerRange(0, 16)


def counted(candidates: Sequence[Candidate], claims: Claims) -> list[Candidate]:
    """As `KnownShards` has them."""
    return [
        replace(
            candidate,
            queue_depth=candidate.queue_depth + claims.depth(key_of(candidate.descriptor)),
            lot=claims.lot(key_of(candidate.descriptor)),
        )
        for candidate in candidates
    ]


def pick(candidates: Sequence[Candidate], claims: Claims) -> tuple[ShardKey, Claim]:
    (hop,) = greedy_cover(counted(candidates, claims), WHOLE, CoverRules())
    key = key_of(hop.shard)
    return key, claims.claim(key)


@given(st.integers(1, 6), st.lists(st.booleans(), max_size=60), st.text(max_size=8))
def test_equal_replicas_get_equal_shares(replicas: int, arrivals: list[bool], asker: str) -> None:
    """Whatever comes and goes in whatever order: True begins a session, False ends the oldest."""
    candidates = [shard("0-15", f"node-{n}") for n in range(replicas)]
    claims = Claims(asker)
    open_now: list[tuple[ShardKey, Claim]] = []
    used: Counter[ShardKey] = Counter({key_of(c.descriptor): 0 for c in candidates})
    for begins in arrivals:
        if begins:
            fewest = min(claims.sessions(key) for key in used)
            key, claim = pick(candidates, claims)
            assert claims.sessions(key) == fewest + 1
            used[key] += 1
            open_now.append((key, claim))
        elif open_now:
            open_now.pop(0)[1].release()
    if all(arrivals) or not open_now:
        assert max(used.values()) - min(used.values()) <= 1
    for _, claim in open_now:
        claim.release()
        claim.release()
    assert all(claims.depth(key) == claims.sessions(key) == 0 for key in used)


@given(st.integers(1, 6), st.integers(0, 30))
def test_one_after_the_other_takes_turns(replicas: int, requests: int) -> None:
    candidates = [shard("0-15", f"node-{n}") for n in range(replicas)]
    claims = Claims()
    used: Counter[ShardKey] = Counter()
    for _ in range(requests):
        key, claim = pick(candidates, claims)
        used[key] += 1
        claim.release()
    shares = [used[key_of(c.descriptor)] for c in candidates]
    assert max(shares) - min(shares) <= 1


def test_what_a_host_says_and_what_one_has_there_oneself_add_up() -> None:
    busy, idle = shard("0-15", "busy", queue=3), shard("0-15", "idle")
    claims = Claims()
    picked = [pick([busy, idle], claims)[0] for _ in range(7)]
    assert [key[0] for key in picked[:3]] == ["idle", "idle", "idle"]
    assert Counter(key[0] for key in picked) == {"idle": 5, "busy": 2}


def test_steps_that_are_owed_count_until_they_are_answered_or_the_session_rests() -> None:
    claims = Claims()
    claim = claims.claim(("host", "shard"))
    claim.owes(5)
    assert claims.depth(("host", "shard")) == 6
    claim.owes(2)
    assert claims.depth(("host", "shard")) == 3
    claim.release()
    claim.owes(4)
    assert claims.depth(("host", "shard")) == 0
    claim.renew()
    claim.renew()
    assert (claims.depth(("host", "shard")), claims.sessions(("host", "shard"))) == (1, 1)


def test_what_a_host_counted_of_ours_is_not_counted_twice() -> None:
    first, kept = shard("0-15", "attic"), datetime.now(UTC)
    key, claims = key_of(first.descriptor), Claims()
    known = KnownShards(NodeId("sofa"), Reputations(LoopClock()), claims)

    def depth(told: int, at: datetime) -> int:
        """The depth that is routed by once the host has said so much at that time."""
        health = ShardHealth(True, at, 1.0, 1.0, told, 1)
        known.replace([Offer(Advertisement(first.descriptor, health))])
        return known.candidates(first.descriptor.model_id)[0].queue_depth

    claim = claims.claim(key)
    claim.owes(3)
    claim.release()
    assert depth(2, kept) == 0, "they were ours, and are answered"
    assert depth(2, kept) == 0, "the same word again"
    assert depth(2, kept + timedelta(seconds=10)) == 2, "ours were before"
    claim = claims.claim(key)
    claim.owes(1)
    assert depth(4, kept + timedelta(seconds=20)) == 3 + claims.depth(key)
    claim.owes(0)
    assert depth(4, kept + timedelta(seconds=30)) == 3 + claims.depth(key), "it was owed till then"
    assert depth(4, kept + timedelta(seconds=40)) == 4 + claims.depth(key)


def test_askers_do_not_all_begin_with_the_same_replica() -> None:
    candidates = [shard("0-15", f"node-{n}") for n in range(3)]
    first = {pick(candidates, Claims(f"asker-{n}"))[0] for n in range(40)}
    assert len(first) == 3
    assert pick(candidates, Claims("one"))[0] == pick(candidates, Claims("one"))[0]
