"""Whole nodes on loopback: real zeroconf, real links."""

from __future__ import annotations

import asyncio
import secrets
import socket
from contextlib import AsyncExitStack
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import Any

import pytest

from mesh.codec import MAX_TEXT
from mesh.discovery.advertisement import encode
from mesh.discovery.announcement import Announcement, instance_name
from mesh.discovery.dialing import Target
from mesh.discovery.events import PeerDown, PeerEvent, PeerUp, Warned
from mesh.discovery.greeting import PeerHello, from_hello, to_hello
from mesh.discovery.interfaces import Interface, InterfaceChoice, Reach
from mesh.discovery.mdns import Mdns
from mesh.discovery.multicast import Multicast
from mesh.discovery.progress import MAX_SPANS, NodeProgress, SpanProgress
from mesh.discovery.sightings import PeerState, PeerView, Sightings
from mesh.errors import ConnectFailed, LinkLost, PeerRefused, UntrustedPeer
from mesh.identity.keys import node_id
from mesh.types import ModelId, NodeId
from mesh.wire.connection import WebSocketLink
from mesh.wire.messages import PROTOCOL_VERSION, Hello
from mesh.wire.websocket import connect, serve
from tests.descriptors import none_left
from tests.discovery.network import (
    QUICK_MDNS,
    VILLAGE,
    Node,
    Silent,
    advertised,
    loopback,
    new_key,
    running,
    signed,
)

TINY = ModelId("tiny")


@pytest.fixture
def hearth() -> str:
    """Nobody else's: other tests announce on loopback at the same time."""
    return f"test-{secrets.token_hex(8)}"


async def test_three_nodes_on_one_machine_find_each_other_and_their_shards(hearth: str) -> None:
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(running(hearth)) for _ in range(3)]
        for node, layers in zip(nodes, ("0-4", "5-9", "10-15"), strict=True):
            node.serve(advertised(node.id, layers))
        everybody = {node.id for node in nodes}
        for node in nodes:
            await node.until(lambda store: len(store.shards(TINY)) == 3)
            assert node.online() == everybody
            assert [str(s.descriptor.layers) for s in node.store.shards(TINY)] == [
                "0-4", "5-9", "10-15",
            ]  # fmt: skip
            linked = {view.node_id for view in node.peering.peers() if view.state == "up"}
            assert linked == everybody - {node.id}
            assert len(node.told("peer_up")) == 2
            assert not node.told("peer_down")


async def test_what_is_served_is_heard_however_much_others_wish_for_there(hearth: str) -> None:
    async with running(hearth, multicast=False) as hears:
        address = f"127.0.0.1:{hears.peering.port}"
        async with running(hearth, address, multicast=False) as serves:
            longest = "\U00020000" * MAX_TEXT
            far = SpanProgress(longest, "QUEUED", reason=longest)
            serves.progress = NodeProgress((far,) * MAX_SPANS, ("tiny",), paused=True)
            serves.serve(advertised(serves.id))
            await hears.until(lambda store: len(store.shards(TINY)) == 1)
            view = hears.store.node(serves.id)
            assert view is not None
            assert view.offers.progress == NodeProgress((), ("tiny",), paused=True)


async def test_goodbye_removes_a_node_at_once(hearth: str) -> None:
    async with running(hearth, multicast=False) as stays:
        address = f"127.0.0.1:{stays.peering.port}"
        async with running(hearth, address, multicast=False) as leaves:
            leaves.serve(advertised(leaves.id))
            await stays.until(lambda store: len(store.shards(TINY)) == 1)
        await stays.until(lambda store: {v.info.node_id for v in store.nodes()} == {stays.id})
        down = await stays.event(lambda event: isinstance(event, PeerDown))
        assert isinstance(down, PeerDown)
        assert (down.node_id, down.reason) == (leaves.id, "goodbye")


async def test_lost_link_takes_a_node_offline_and_its_return_brings_it_back(hearth: str) -> None:
    async with running(hearth) as one, running(hearth) as other:
        other.serve(advertised(other.id))
        await one.until(lambda store: len(store.shards(TINY)) == 1)
        cut(other)
        down = await one.event(lambda event: isinstance(event, PeerDown))
        assert isinstance(down, PeerDown)
        assert down.reason != "goodbye"
        assert one.store.shards(TINY) == []
        assert other.id in {view.info.node_id for view in one.store.nodes()}
        await one.until(lambda store: len(store.shards(TINY)) == 1)
        assert len(one.told("peer_up")) == 2


async def test_a_lost_node_keeps_its_row_and_its_name(hearth: str) -> None:
    async with running(hearth, multicast=False) as before:
        port = before.peering.port
    async with running(hearth, f"127.0.0.1:{port}", multicast=False) as watches:
        async with running(hearth, multicast=False, port=port) as goes:
            await watches.event(lambda event: isinstance(event, PeerUp))
            cut(goes)
            await watches.event(lambda event: isinstance(event, PeerDown))
            (row,) = watches.peering.peers()
            assert (row.node_id, row.name, row.state) == (goes.id, "kitchen", "trying")
            assert row.reason
            await watches.event(lambda event: len(watches.told("peer_up")) == 2)
            watches.events.clear()
        await watches.event(lambda event: getattr(event, "state", "") == "unreachable")
        (row,) = watches.peering.peers()
        assert (row.node_id, row.name, row.state) == (goes.id, "kitchen", "unreachable")


def test_who_was_found_in_two_ways_has_one_row_when_lost() -> None:
    sightings = Sightings(lambda event: None)
    address, elsewhere = "192.168.1.5:8421", "192.168.1.6:8421"
    lost = PeerView(NodeId("lost"), "attic", address, PeerState.TRYING, "cut", None)
    sightings.expect([f"static {address}", "announced lost"], lost)
    assert sightings.rows() == [lost]
    refused = replace(lost, state=PeerState.NOT_A_PEER)
    sightings.show("announced lost", refused)
    assert sightings.rows() == [refused]
    copied = replace(lost, address=elsewhere)
    sightings.show(f"static {elsewhere}", copied)
    assert sightings.rows() == [refused, copied]


def test_names_of_lost_nodes_are_bounded() -> None:
    sightings = Sightings(lambda event: None)
    for number in range(1000):
        sightings.met(NodeId("first"), "met again and again")
        sightings.met(NodeId(f"node {number}"), f"name {number}")
    assert sightings.name_of(NodeId("node 999")) == "name 999"
    assert sightings.name_of(NodeId("first")) == "met again and again"
    kept = [number for number in range(1000) if sightings.name_of(NodeId(f"node {number}"))]
    assert len(kept) == 255


def test_a_warning_is_given_once_and_not_every_one_is_remembered() -> None:
    heard: list[PeerEvent] = []
    sightings = Sightings(heard.append)

    def warn(key: str) -> None:
        sightings.warn_once(key, Warned("cloned_key", key, ""))

    for key in ("first", "first", "second", "first"):
        warn(key)
    assert [event.message for event in heard if isinstance(event, Warned)] == ["first", "second"]
    for number in range(1000):
        warn(f"{number}")
    assert len(heard) == 1002
    warn("first")
    assert len(heard) == 1003, "it was forgotten for those that came after it"


async def test_named_peer_is_found_without_multicast(hearth: str) -> None:
    async with running(hearth, multicast=False) as one:
        address = f"127.0.0.1:{one.peering.port}"
        async with running(hearth, address, multicast=False) as other:
            one.serve(advertised(one.id))
            await other.until(lambda store: len(store.shards(TINY)) == 1)
            up = await one.event(lambda event: isinstance(event, PeerUp))
            assert isinstance(up, PeerUp)
            assert (up.node_id, up.initiated) == (other.id, False)


async def test_who_names_one_node_finds_the_others_without_multicast(hearth: str) -> None:
    """Also who came before it; and who leaves is not looked for because of what was told."""
    async with running(hearth, multicast=False) as named:
        address = f"127.0.0.1:{named.peering.port}"
        async with running(hearth, address, multicast=False) as early:
            await named.event(lambda event: isinstance(event, PeerUp))
            async with running(hearth, address, multicast=False) as late:
                late.serve(advertised(late.id))
                await early.until(lambda store: len(store.shards(TINY)) == 1)
                assert late.online() == {named.id, early.id, late.id}
            await early.event(lambda event: isinstance(event, PeerDown))
            named.serve()
            await early.until(lambda store: len(early.peering.peers()) == 1)
            (row,) = early.peering.peers()
            assert (row.node_id, row.state) == (named.id, "up")


async def test_named_peer_is_awaited_until_it_starts(hearth: str) -> None:
    async with running(hearth, multicast=False) as first:
        port = first.peering.port
    async with running(hearth, f"127.0.0.1:{port}", multicast=False) as waiting:
        seen = await waiting.event(lambda event: event.type == "peer_seen")
        assert getattr(seen, "state", "") == "unreachable"
        async with running(hearth, multicast=False, port=port) as late:
            await waiting.until(lambda store: late.id in waiting.online())
    assert len(waiting.told("peer_seen")) == 1  # said once, not at every attempt


async def test_forged_announcements_of_a_member_do_not_hide_it(hearth: str) -> None:
    key = new_key()
    async with running(hearth, key=key, multicast=False) as first:
        port = first.peering.port

    async def announce(port: int, *hosts: int) -> Multicast:
        addresses = tuple(f"127.0.0.{host}" for host in hosts)
        instance = instance_name(key.node_id, secrets.token_hex(3))
        forged = Announcement(
            instance, key.node_id, hearth, "attic", PROTOCOL_VERSION, port, addresses
        )
        return await Multicast.open(["127.0.0.1"], forged, lambda name, alive: None, ttl_s=60)

    mdns = Mdns(loopback, settings=QUICK_MDNS)
    async with running(hearth, mdns=mdns) as asker, AsyncExitStack() as stack:
        for count, hosts in enumerate([[1], range(2, 10), range(10, 18), range(18, 26)], start=1):
            multicast = await announce(port if count == 1 else 9, *hosts)
            stack.push_async_callback(multicast.close)
            while sum(a.hearth == hearth for a in mdns.announcements()) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        async with running(hearth, key=key, multicast=False, port=port):
            await asker.until(lambda store: key.node_id in asker.online())


async def test_each_peer_gets_the_address_it_can_reach_of_a_node_with_two(hearth: str) -> None:
    mine = {"127.0.0.1", "127.0.0.2"}
    reach = Reach(sorted(mine), "127.0.0.1", lambda: [at(*sorted(mine))])
    async with running(hearth, multicast=False, answers_at=reach) as wide:
        wide.serve(advertised(wide.id))
        port = wide.peering.port
        for address in sorted(mine):
            async with running(hearth, f"{address}:{port}", multicast=False) as peer:
                await peer.until(lambda store: bool(store.shards(TINY)))
                (shard,) = peer.store.shards(TINY)
                assert shard.descriptor.endpoint == f"wss://{address}:7701"
        async with running(hearth, f"127.0.0.3:{port}", multicast=False) as peer:
            await peer.event(lambda event: event.type == "peer_seen")
            assert not peer.online() - {peer.id}


async def test_a_peer_whose_address_changed_is_listed_at_the_new_one_before_it_announces_that(
    hearth: str,
) -> None:
    subnet, table = IPv4Network("127.0.0.0/8"), [at("127.0.0.2")]
    before = [InterfaceChoice("home0", subnet[2], subnet, "")]
    announced = Mdns(lambda: before, settings=QUICK_MDNS)
    reach = Reach(["home0"], "127.0.0.2", lambda: table, look_every_s=0.0)
    async with running(hearth, mdns=announced, answers_at=reach) as laptop:
        laptop.serve(advertised(laptop.id))
        table[:] = [at("127.0.0.3")]
        async with running(hearth, f"127.0.0.3:{laptop.peering.port}", multicast=False) as peer:
            await peer.until(lambda store: bool(store.shards(TINY)))
            (shard,) = peer.store.shards(TINY)
            assert shard.descriptor.endpoint == "wss://127.0.0.3:7701"
        assert laptop.peering.address == f"127.0.0.3:{laptop.peering.port}"


def at(*addresses: str) -> Interface:
    return Interface("home0", True, tuple(IPv4Interface(f"{each}/8") for each in addresses))


async def test_broken_multicast_is_a_warning_that_names_the_way_out(hearth: str) -> None:
    nowhere = InterfaceChoice(
        "gone0", IPv4Address("198.51.100.7"), IPv4Network("198.51.100.0/24"), ""
    )
    mdns = Mdns(lambda: [nowhere], settings=QUICK_MDNS)
    async with running(hearth, multicast=False) as one:
        address = f"127.0.0.1:{one.peering.port}"
        async with running(hearth, address, mdns=mdns) as other:
            warning = await other.event(lambda event: event.type == "warning")
            assert isinstance(warning, Warned)
            assert warning.code == "no_multicast"
            assert "gone0 (198.51.100.7)" in warning.message
            assert "--peer HOST:PORT" in warning.fix
            await other.until(lambda store: one.id in other.online())


async def test_both_dialling_at_once_keep_the_link_of_the_smaller_id(hearth: str) -> None:
    small, large = sorted((new_key(), new_key()), key=lambda key: key.node_id)
    async with (
        running(hearth, key=small, multicast=False) as one,
        running(hearth, key=large, multicast=False) as other,
    ):
        pairs = ((one, other), (other, one)) * 3
        await asyncio.gather(
            *(a.peering._dial(Target("", ()), f"127.0.0.1:{b.peering.port}") for a, b in pairs)
        )
        one.serve(advertised(one.id, "0-7"))
        other.serve(advertised(other.id, "8-15"))
        for node in (one, other):
            await node.until(lambda store: len(store.shards(TINY)) == 2)
            assert not node.told("peer_down")
            assert len(node.told("peer_up")) == 1
        [kept], [same] = one.peering.links.all(), other.peering.links.all()
        assert (kept.initiated, same.initiated) == (True, False)
        assert kept.dial == same.dial


async def test_node_named_by_two_addresses_keeps_one_link(hearth: str) -> None:
    async with running(hearth, multicast=False) as one:
        port = one.peering.port
        aliases = (f"127.0.0.1:{port}", f"localhost:{port}")
        async with running(hearth, *aliases, multicast=False) as other:
            await other.until(lambda store: one.id in other.online())
            one.serve(advertised(one.id))
            await other.until(lambda store: len(store.shards(TINY)) == 1)
            assert len(other.peering.links.all()) == len(one.peering.links.all()) == 1
            assert not other.told("peer_down")
            assert not one.told("peer_down")


async def test_own_address_is_not_a_peer(hearth: str) -> None:
    [port] = free_ports(1)
    async with running(hearth, f"127.0.0.1:{port}", multicast=False, port=port) as node:
        seen = await node.event(lambda event: event.type == "peer_seen")
        assert getattr(seen, "state", "") == "this node"
        assert node.online() == {node.id}
        assert not node.told("warning")


async def test_copied_key_is_reported_with_both_addresses(hearth: str) -> None:
    key = new_key()
    async with running(hearth, key=key) as one, running(hearth, key=key) as clone:
        for node in (one, clone):
            warning = await node.event(lambda event: event.type == "warning")
            assert isinstance(warning, Warned)
            assert warning.code == "cloned_key"
            for port in (one.peering.port, clone.peering.port):
                assert f"127.0.0.1:{port}" in warning.message
            assert node.online() == {one.id}


async def test_third_node_reports_two_machines_with_one_key(hearth: str) -> None:
    key = new_key()
    shared = key.node_id
    async with (
        running(hearth, multicast=False) as witness,
        running(hearth, f"127.0.0.1:{witness.peering.port}", key=key, multicast=False) as one,
    ):
        await witness.until(lambda store: shared in witness.online())
        address = f"127.0.0.1:{witness.peering.port}"
        async with running(hearth, address, key=key, multicast=False) as other:
            warning = await witness.event(lambda event: event.type == "warning")
            assert isinstance(warning, Warned)
            assert warning.code == "cloned_key"
            assert f":{one.peering.port}" in warning.message
            assert f":{other.peering.port}" in warning.message


async def test_other_hearth_is_shown_once_and_never_dialled(hearth: str) -> None:
    next_door, key = f"{hearth}-next-door", new_key()
    async with running(next_door, key=key) as stranger, running(hearth) as node:
        seen = await node.event(
            lambda event: event.type == "peer_seen" and getattr(event, "node_id", "") == stranger.id
        )
        assert getattr(seen, "state", "") == "other hearth"
        await stranger.event(
            lambda event: event.type == "peer_seen" and getattr(event, "node_id", "") == node.id
        )
        assert node.peering.dials == stranger.peering.dials == 0
        assert node.online() == {node.id}
        async with running(next_door, key=key) as again:  # while the old one is still announced
            await node.event(
                lambda event: getattr(event, "address", "").endswith(f":{again.peering.port}")
            )
            (row,) = [view for view in node.peering.peers() if view.node_id == stranger.id]
            assert row.address.endswith(f":{again.peering.port}")


async def test_other_hearth_is_turned_away_when_it_dials(hearth: str) -> None:
    async with running(hearth, multicast=False) as node:
        address = f"127.0.0.1:{node.peering.port}"
        async with running(f"{hearth}-next-door", address, multicast=False) as stranger:
            seen = await stranger.event(lambda event: event.type == "peer_seen")
            assert getattr(seen, "state", "") in ("not a peer", "unreachable")
            assert node.online() == {node.id}
            assert not node.told("peer_up")


async def test_peer_of_another_version_is_shown_with_who_is_too_old(hearth: str) -> None:
    key = new_key()
    trust = await VILLAGE.enter(hearth, key)
    newer = Hello(key.node_id, "attic", "control", "9.0", version=PROTOCOL_VERSION + 1)
    server = await serve(
        "127.0.0.1", 0, accept=lambda link: Silent(), hello=newer, ssl=trust.tls.server
    )
    try:
        async with running(hearth, f"127.0.0.1:{server.port}", multicast=False) as node:
            seen = await node.event(lambda event: event.type == "peer_seen")
            assert getattr(seen, "state", "") == "other version"
            assert "too old" in getattr(seen, "reason", "")
    finally:
        await server.close()


SOMEBODY = node_id(b"somebody else")


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        ({n: v for n, v in encode(advertised(SOMEBODY)).items() if n != "layers"}, "layers"),
        (encode(advertised(SOMEBODY)), "host"),
    ],
    ids=["missing", "foreign"],
)
async def test_malformed_advertisement_is_reported_and_the_last_good_one_stays(
    hearth: str, entry: Any, field: str
) -> None:
    async with running(hearth, multicast=False) as node:
        key = new_key()
        trust = await VILLAGE.enter(hearth, key)
        me = PeerHello(key.node_id, "attic", "0.1", hearth, "run", 1, "127.0.0.1:9")
        link = await connect(
            "127.0.0.1", node.peering.port, hello=to_hello(me), handler=Silent(), timeout_s=5,
            ssl=trust.tls.client(node.id),
        )  # fmt: skip
        good = advertised(me.node_id)
        link.send(signed(key, hearth, 1, [encode(good)]))
        await node.until(lambda store: len(store.shards(TINY)) == 1)
        link.send(signed(key, hearth, 2, [encode(good), entry]))
        warning = await node.event(lambda event: event.type == "warning")
        assert isinstance(warning, Warned)
        assert warning.code == "bad_advertisement"
        assert repr(field) in warning.message
        assert node.store.shards(TINY) == [good]
        assert not link.is_closed
        link.close()


async def test_member_that_claims_to_be_another_one_is_refused(hearth: str) -> None:
    async with running(hearth, multicast=False) as node, running(hearth, multicast=False) as victim:
        key = new_key()
        tls = (await VILLAGE.enter(hearth, key)).tls.client(node.id)
        claim = PeerHello(victim.id, "attic", "0.1", hearth, "run", 1, "127.0.0.1:9")
        with pytest.raises(UntrustedPeer):
            await connect(
                "127.0.0.1", node.peering.port, hello=to_hello(claim), handler=Silent(), ssl=tls
            )
        assert node.online() == {node.id}


async def test_plain_text_gets_no_answer(hearth: str) -> None:
    async with running(hearth, multicast=False) as node:
        me = PeerHello(new_key().node_id, "attic", "0.1", hearth, "run", 1, "127.0.0.1:9")
        with pytest.raises(ConnectFailed):
            await connect(
                "127.0.0.1", node.peering.port, hello=to_hello(me), handler=Silent(), timeout_s=5
            )
        assert node.online() == {node.id}


async def test_who_is_put_out_loses_its_live_link_and_its_shards(hearth: str) -> None:
    async with running(hearth, multicast=False) as one:
        address = f"127.0.0.1:{one.peering.port}"
        async with running(hearth, address, multicast=False) as other:
            other.serve(advertised(other.id))
            await one.until(lambda store: len(store.shards(TINY)) == 1)
            await asyncio.to_thread(one.trust.tls.update, [])
            one.peering.follow_members()
            assert one.store.shards(TINY) == []
            down = await one.event(lambda event: isinstance(event, PeerDown))
            assert getattr(down, "reason", "") == "not a member of this hearth"
            await other.event(lambda event: isinstance(event, PeerDown))
            seen = await other.event(lambda event: event.type == "peer_seen")
            assert getattr(seen, "state", "") in ("not a peer", "unreachable")
            assert one.online() == {one.id}


@pytest.mark.parametrize("fields", [{}, {"hearth": 1}, {"hearth": "x" * 300}])
async def test_hello_without_what_a_daemon_says_is_refused(
    hearth: str, fields: dict[str, Any]
) -> None:
    async with running(hearth, multicast=False) as node:
        key = new_key()
        tls = (await VILLAGE.enter(hearth, key)).tls.client(node.id)
        hello = Hello(key.node_id, "attic", "control", "0.1", fields=fields)
        with pytest.raises(PeerRefused):
            await connect("127.0.0.1", node.peering.port, hello=hello, handler=Silent(), ssl=tls)
        assert node.online() == {node.id}


def test_who_comes_for_something_else_is_no_daemon() -> None:
    own = PeerHello(new_key().node_id, "attic", "0.1", "home", "run", 1, "127.0.0.1:7")
    hello = to_hello(own)
    assert from_hello(hello) == own
    with pytest.raises(PeerRefused, match="links between daemons"):
        from_hello(replace(hello, purpose="tensors"))


async def test_heartbeats_renew_what_would_expire(hearth: str) -> None:
    """With a health timeout of 0.3 s advertisements expire after 1.2 s unless repeated."""
    async with (
        running(hearth, multicast=False, health_timeout_s=0.3) as one,
        running(
            hearth, f"127.0.0.1:{one.peering.port}", multicast=False, health_timeout_s=0.3
        ) as other,
    ):
        other.serve(advertised(other.id))
        await one.until(lambda store: len(store.shards(TINY)) == 1)
        await asyncio.sleep(1.5)  # real time has to pass: that is what is tested
        await one.until(lambda store: len(store.shards(TINY)) == 1)


async def test_a_node_goes_on_telling_its_peers_once_it_has_descriptors_again(hearth: str) -> None:
    reach = Reach(["lo"], "127.0.0.2")
    async with (
        running(hearth, multicast=False) as one,
        running(
            hearth, f"127.0.0.1:{one.peering.port}", multicast=False, answers_at=reach
        ) as other,
    ):
        await one.until(lambda store: other.id in one.online())
        with none_left():
            other.serve(advertised(other.id))
            await one.until(lambda store: len(store.shards(TINY)) == 1)
        other.serve()
        await one.until(lambda store: not store.shards(TINY))


def cut(node: Node) -> None:
    """Break every link of a node as a power failure would, without a goodbye."""
    for end in node.peering.links.all():
        link = end.link
        assert isinstance(link, WebSocketLink)
        link.abort(LinkLost("The power failed.", fix="Wait."))


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
