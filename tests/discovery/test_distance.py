"""What makes a shard near: the address it is reached at, and the round trip as measured."""

from __future__ import annotations

from ipaddress import IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.discovery.distance import HERE, LAN, Distances, hop_weight
from mesh.routing.cover import FAR_HOP_WEIGHT, LAN_HOP_WEIGHT
from mesh.types import Endpoint, NodeId

HOME = (IPv4Network("192.168.1.0/24"),)
NEAR, FAR = "192.168.1.7", "203.0.113.9"


@pytest.mark.parametrize(
    ("host", "rtt_ms", "is_near"),
    [
        ("127.0.0.1", None, True),
        ("::1", 300.0, True),
        (NEAR, None, True),
        (NEAR, 0.3, True),
        ("169.254.3.4", None, True),
        ("fe80::1%eth0", 0.4, True),
        (NEAR, 12.0, True),  # Wi-Fi on a bad day
        (NEAR, 45.0, False),  # a bridge to somewhere else
        (FAR, None, False),
        (FAR, 45.0, False),
        (FAR, 0.8, True),  # another subnet of the same house
        ("attic.local", None, False),
        ("attic.local", 0.5, True),
        ("", None, False),
    ],
)
def test_near_is_what_answers_like_the_lan(host: str, rtt_ms: float | None, is_near: bool) -> None:
    assert (hop_weight(host, rtt_ms, HOME) < FAR_HOP_WEIGHT) is is_near


def test_the_unit_is_the_lan() -> None:
    assert hop_weight(NEAR, None, HOME) == LAN == LAN_HOP_WEIGHT
    assert hop_weight("127.0.0.1", None, HOME) < LAN


@given(st.sampled_from([NEAR, FAR, "127.0.0.1"]), st.floats(0, 1e4), st.floats(0, 1e4))
def test_a_longer_way_is_never_lighter(host: str, one: float, other: float) -> None:
    short, long = sorted((one, other))
    assert hop_weight(host, short, HOME) <= hop_weight(host, long, HOME)


def test_the_quickest_of_the_last_round_trips_counts() -> None:
    distances = Distances(NodeId("own"), ["127.0.0.1"])
    peer, endpoint = NodeId("peer"), Endpoint(f"wss://{FAR}:1")
    first = distances.weight(peer, endpoint)
    distances.measured(peer, None)
    assert distances.weight(peer, endpoint) == first
    distances.measured(peer, 0.5)
    near = distances.weight(peer, endpoint)
    assert near < FAR_HOP_WEIGHT <= first
    distances.measured(peer, 400.0)  # it computed just then
    for _ in range(20):
        distances.measured(peer, 400.0)  # the same measurement, told again and again
    assert distances.weight(peer, endpoint) == near
    for rtt_ms in range(60, 70):  # it moved out
        distances.measured(peer, float(rtt_ms))
    assert distances.weight(peer, endpoint) >= FAR_HOP_WEIGHT


def test_this_machine_is_here_at_whatever_address_it_listens() -> None:
    distances = Distances(NodeId("own"), ["127.0.0.1"])
    assert distances.weight(NodeId("own"), Endpoint(f"wss://{FAR}:1")) == HERE
