"""What principals may hold and use: counted exactly, refused at the limit, bounded in number."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.accounts.ledger import Hold, Limit, Resource, ResourceLedger, of_peer
from mesh.errors import Busy, LimitReached, QuotaExceeded, from_dict
from mesh.types import Principal, PrincipalKind
from tests.health.clock import ManualClock

ANN, BOB = of_peer("ann"), of_peer("bob")
STREAMS, EVENTS = Resource.STREAMS, Resource.EVENTS_PER_MINUTE


def streams(each: float, total: float) -> ResourceLedger:
    return ResourceLedger(ManualClock(), {STREAMS: Limit(each, total)})


def test_what_is_over_ones_limit_is_refused_with_all_numbers_and_changes_nothing() -> None:
    ledger = streams(each=3, total=9)
    hold = ledger.hold(ANN, STREAMS, 2)
    with pytest.raises(LimitReached) as refused:
        hold.grow(2)
    assert refused.value.param == "streams"
    for part in ("peer:ann", "may hold 3 streams", "holds 2", "2 more"):
        assert part in str(refused.value)
    assert (hold.size, ledger.held(ANN, STREAMS), ledger.together(STREAMS)) == (2, 2, 2)
    ledger.hold(BOB, STREAMS, 3)  # another's limit is its own


def test_what_is_over_the_whole_is_refused_whoever_asks() -> None:
    ledger = streams(each=8, total=8)
    ledger.hold(ANN, STREAMS, 7)
    whole = "There are 8 streams here, 7 are taken, 0 of them by peer:bob; 2 more"
    with pytest.raises(Busy, match=whole) as refused:
        ledger.hold(BOB, STREAMS, 2)
    assert type(refused.value) is Busy
    ledger.hold(BOB, STREAMS, 1)


def test_kinds_may_have_limits_of_their_own() -> None:
    ledger = ResourceLedger(ManualClock(), {STREAMS: Limit(1, kinds={PrincipalKind.KEY: 2})})
    ledger.hold(Principal(PrincipalKind.KEY, "k"), STREAMS, 2)
    with pytest.raises(LimitReached):
        ledger.hold(ANN, STREAMS, 2)


def test_a_hold_gives_back_exactly_once() -> None:
    ledger = streams(each=5, total=5)
    with ledger.hold(ANN, STREAMS, 2) as hold, ledger.hold(ANN, STREAMS, 2) as other:
        hold.shrink(1)
        other.resize(4)
        other.resize(3)
        hold.close()
        hold.close()
        assert ledger.held(ANN, STREAMS) == 3
        with pytest.raises(ValueError, match="closed"):
            hold.grow(1)
        with pytest.raises(ValueError, match="4 of 3"):
            other.shrink(4)
    assert ledger.together(STREAMS) == 0
    assert ledger.snapshot() == []


@given(st.integers(0, 2**32))
def test_sums_are_those_of_the_holds_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    ledger = ResourceLedger(ManualClock(), {STREAMS: Limit(40, 100)})
    principals = [of_peer(str(number)) for number in range(4)]
    holds: list[tuple[Principal, Hold]] = []
    for _ in range(rng.randrange(80)):
        action = rng.randrange(4)
        try:
            if action == 0 or not holds:
                principal = rng.choice(principals)
                holds.append((principal, ledger.hold(principal, STREAMS, rng.randrange(20))))
            elif action == 1:
                rng.choice(holds)[1].resize(rng.randrange(40))
            elif action == 2:
                holds.pop(rng.randrange(len(holds)))[1].close()
            else:
                rng.choice(holds)[1].grow(rng.randrange(10))
        except Busy:
            pass
        for principal in principals:
            held = sum(hold.size for owner, hold in holds if owner == principal)
            assert ledger.held(principal, STREAMS) == held <= 40
        assert ledger.together(STREAMS) == sum(hold.size for _, hold in holds) <= 100


def test_shares_are_equal_among_those_who_hold_or_ask() -> None:
    ledger = streams(each=8, total=8)
    assert ledger.share(ANN, STREAMS) == 8
    ledger.hold(ANN, STREAMS, 5)
    assert ledger.share(ANN, STREAMS) == 8
    assert ledger.share(BOB, STREAMS) == 4
    ledger.hold(BOB, STREAMS, 1)
    assert ledger.share(of_peer("eve"), STREAMS) == 2
    assert ledger.holders(STREAMS) == {ANN: 5, BOB: 1}


def test_a_rate_is_refused_within_its_window_and_free_after_it() -> None:
    clock = ManualClock()
    ledger = ResourceLedger(clock, {EVENTS: Limit(10)})
    ledger.spend(ANN, EVENTS, 8)
    clock.time += 20
    with pytest.raises(
        LimitReached, match="may use 10 events per minute; 8 are used, 3 more"
    ) as no:
        ledger.spend(ANN, EVENTS, 3)
    assert no.value.fix == "Try again in 40 s."
    told = from_dict(no.value.to_dict())
    assert isinstance(told, LimitReached)
    assert told.retry_after_s == 40
    ledger.spend(ANN, EVENTS, 2)
    assert ledger.exhausted(ANN, EVENTS)
    with pytest.raises(LimitReached):
        ledger.require(ANN, EVENTS)
    assert not ledger.exhausted(BOB, EVENTS)
    clock.time += 40
    ledger.require(ANN, EVENTS)
    ledger.spend(ANN, EVENTS, 10)


def test_what_was_used_already_is_counted_beyond_the_limit_and_its_end_is_told_once() -> None:
    ledger = ResourceLedger(ManualClock(), {EVENTS: Limit(10)})
    assert [ledger.charge(ANN, EVENTS, 6) for _ in range(4)] == [False, True, False, False]
    assert ledger.snapshot()[0]["resources"] == {
        "events_per_minute": {"used": 24, "limit": 10, "window_s": 60.0}
    }


def test_a_cooldown_outlasts_the_window() -> None:
    clock = ManualClock()
    ledger = ResourceLedger(clock, {EVENTS: Limit(2, cooldown_s=300)})
    assert not ledger.charge(ANN, EVENTS)
    assert ledger.charge(ANN, EVENTS)
    clock.time += 299
    assert ledger.exhausted(ANN, EVENTS)
    with pytest.raises(LimitReached):
        ledger.spend(ANN, EVENTS)
    clock.time += 1
    assert not ledger.exhausted(ANN, EVENTS)
    ledger.spend(ANN, EVENTS)


def test_a_principals_own_quota_goes_before_its_kinds() -> None:
    key = Principal(PrincipalKind.KEY, "k")
    quotas = {(key, Resource.TOKENS_PER_DAY): 5}
    ledger = ResourceLedger(
        ManualClock(),
        {Resource.TOKENS_PER_DAY: Limit(100)},
        personal=lambda principal, resource: quotas.get((principal, resource)),
    )
    ledger.charge(key, Resource.TOKENS_PER_DAY, 7)
    ledger.charge(ANN, Resource.TOKENS_PER_DAY, 7)
    with pytest.raises(QuotaExceeded, match="tokens per day"):
        ledger.require(key, Resource.TOKENS_PER_DAY)
    ledger.require(ANN, Resource.TOKENS_PER_DAY)
    quotas.clear()
    ledger.require(key, Resource.TOKENS_PER_DAY)


def test_accounts_are_bounded_and_those_who_hold_something_are_never_forgotten() -> None:
    clock = ManualClock()
    limits = {EVENTS: Limit(10), STREAMS: Limit(5)}
    ledger = ResourceLedger(clock, limits, max_principals=3)
    held = ledger.hold(ANN, STREAMS, 1)
    for number in range(50):
        clock.time += 0.1
        ledger.spend(of_peer(str(number)), EVENTS, 4)
    assert {row["name"] for row in ledger.snapshot()} == {"ann", "48", "49"}
    ledger.hold(of_peer("48"), STREAMS)  # also a hold of nothing is one
    ledger.hold(of_peer("49"), STREAMS)
    with pytest.raises(Busy, match="3 others"):
        ledger.hold(BOB, STREAMS, 1)
    held.close()
    with pytest.raises(LimitReached):
        ledger.hold(ANN, STREAMS, 6)
    ledger.hold(BOB, STREAMS, 1)  # who was refused holds nothing


def test_revoked_names_are_forgotten_unless_they_hold_something() -> None:
    ledger = ResourceLedger(ManualClock())
    keys = [Principal(PrincipalKind.KEY, name) for name in "abc"]
    for key in keys:
        ledger.charge(key, Resource.TOKENS_PER_DAY, 1)
    ledger.hold(keys[1], STREAMS, 1)
    ledger.charge(ANN, Resource.TOKENS_PER_DAY, 1)
    ledger.keep_only(PrincipalKind.KEY, frozenset("a"))
    rows = {row["name"]: row["resources"].keys() for row in ledger.snapshot()}
    assert rows == {"a": {"tokens_per_day"}, "b": {"streams"}, "ann": {"tokens_per_day"}}


def test_the_snapshot_says_who_holds_what_of_how_much() -> None:
    ledger = ResourceLedger(ManualClock(), {STREAMS: Limit(each=4, total=8)})
    ledger.hold(ANN, STREAMS, 3)
    ledger.hold(ANN, Resource.BYTES_BUFFERED, 1 << 20)
    with pytest.raises(LimitReached):
        ledger.hold(ANN, STREAMS, 2)
    ledger.hold(BOB, STREAMS, 2)
    (ann,) = [row for row in ledger.snapshot() if row["name"] == "ann"]
    assert [ann] == [
        {
            "kind": "peer",
            "name": "ann",
            "refused": 1,
            "resources": {
                "streams": {"held": 3, "limit": 4, "together": 5, "total": 8},
                "bytes_buffered": {
                    "held": 1 << 20,
                    "limit": None,
                    "together": 1 << 20,
                    "total": None,
                },
            },
        }
    ]


def test_a_report_is_bounded_and_shows_who_was_there_last() -> None:
    clock = ManualClock()
    ledger = ResourceLedger(clock)
    for number in range(100):
        clock.time += 0.1
        ledger.spend(of_peer(str(number)), EVENTS)
    report = ledger.report("here")
    assert (report["where"], report["more"]) == ("here", 36)
    assert [row["name"] for row in report["principals"]] == [str(n) for n in range(99, 35, -1)]


def test_a_refusal_travels_as_what_it_is_and_counts_as_busy() -> None:
    """An asker that another node refuses for its share goes to another hop, as when it is full."""
    with pytest.raises(LimitReached) as refused:
        streams(each=0, total=1).hold(ANN, STREAMS, 1)
    told = from_dict(refused.value.to_dict())
    assert type(told) is LimitReached
    assert isinstance(told, Busy)
    assert told.retryable
