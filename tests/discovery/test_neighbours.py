"""Whom a node dials because a peer told it where they are."""

from __future__ import annotations

import sys

from mesh.discovery import neighbours
from mesh.discovery.dialing import Dialer, DialResult, Target
from mesh.discovery.directory import Offering
from mesh.discovery.greeting import PeerHello
from mesh.discovery.links import ControlLink
from mesh.discovery.neighbours import LinkedPeer
from mesh.discovery.sightings import Sightings
from mesh.types import NodeId
from tests.discovery.network import QUICK, new_id
from tests.discovery.test_links import End


def teller(host: str, *told: LinkedPeer) -> ControlLink:
    end = ControlLink(lambda end, message: None, lambda end, error: None, initiated=True)
    end.identify(End(), PeerHello(new_id(), "n", "0", "h", "run", 0, f"{host}:8421", (host,)))
    end.host, end.advertised = host, Offering(neighbours=told)
    return end


async def dial(target: Target, endpoint: str) -> DialResult:
    return DialResult.REFUSED


async def test_a_member_can_have_only_members_dialled_and_not_at_this_nodes_own_services() -> None:
    own, member, announced, other = new_id(), new_id(), new_id(), new_id()
    dialer = Dialer(dial, lambda node_id: False, own_id=own, settings=QUICK)
    dialer.add(f"mdns {announced}", ("192.0.2.8:8421",), announced)
    end = teller(
        "192.0.2.5",
        LinkedPeer(
            member, ("127.0.0.1:22", "[::ffff:127.0.0.1]:22", "224.0.0.251:5353", "[::]:22")
        ),
        LinkedPeer(own, ("192.0.2.1:8421",)),
        LinkedPeer(announced, ("192.0.2.9:8421",)),
        LinkedPeer(new_id(), ("192.0.2.6:8421",)),
        LinkedPeer(other, ("a.name:8421", "192.0.2.7:8421", "192.0.2.7", "[fe80::1]:8421")),
    )
    members = {own, member, announced, other}

    def told() -> list[tuple[NodeId | None, tuple[str, ...]]]:
        neighbours.follow([end], members.__contains__, dialer, Sightings(lambda event: None))
        return [(t.node_id, tuple(sorted(t.endpoints))) for t in dialer.targets()]

    try:
        assert told() == [
            (announced, ("192.0.2.8:8421",)), (other, ("192.0.2.7:8421", "[fe80::1]:8421")),
        ]  # fmt: skip
        neighbours.forget([end], other)
        assert told() == [(announced, ("192.0.2.8:8421",))]
    finally:
        await dialer.stop()


async def test_the_addresses_that_forty_peers_tell_each_time_are_read_once() -> None:
    ids = [new_id() for _ in range(40)]
    told = [LinkedPeer(one, (f"192.0.2.{at}:8421",)) for at, one in enumerate(ids, 1)]
    links = [teller(f"192.0.2.{at}", *told) for at in range(1, 41)]
    dialer = Dialer(dial, lambda node_id: False, own_id=new_id(), settings=QUICK)
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    try:
        for _ in range(2):
            calls = 0
            sys.setprofile(count)
            neighbours.follow(links, lambda _: True, dialer, Sightings(lambda event: None))
            sys.setprofile(None)
        assert len(dialer.targets()) == len(ids)
        assert calls < 4 * len(links) * len(told)
    finally:
        sys.setprofile(None)
        await dialer.stop()


def test_of_a_peer_is_told_where_it_was_reached_and_no_more_than_a_notice_takes() -> None:
    (one,) = neighbours.linked([teller("192.0.2.5")])
    assert one.endpoints == ("192.0.2.5:8421",)
    for said, endpoints in (
        ("fd00::5", ("192.0.2.5:8421", "[fd00::5]:8421")),
        (f"fe80::5%{'z' * 200}", ("192.0.2.5:8421",)),
        ("a.name", ("192.0.2.5:8421",)),
    ):
        end = teller(said)
        end.host = "192.0.2.5"
        assert neighbours.linked([end])[0].endpoints == endpoints
    many = [teller(f"192.0.2.{number}") for number in range(100)]
    assert len(neighbours.linked(many)) == neighbours.MAX_NEIGHBOURS
