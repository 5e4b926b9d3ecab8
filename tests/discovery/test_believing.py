"""What is routed to: only what a trusted member signed itself, lately. Real links, real signatures.

Each attack comes over an authenticated link of a member, or else it would not come at all.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from mesh import codec
from mesh.accounts.ledger import Resource, of_peer
from mesh.capacity import Capacity, Device, Speed
from mesh.discovery.advertisement import encode
from mesh.discovery.events import Warned
from mesh.discovery.greeting import PeerHello, to_hello
from mesh.events.ephemera import DOMAIN
from mesh.identity.keys import NodeKey
from mesh.types import ModelId, PrincipalKind
from mesh.wire.link import Link
from mesh.wire.messages import Advertise
from mesh.wire.websocket import connect
from tests.discovery.network import (
    VILLAGE,
    Node,
    Silent,
    advertised,
    new_key,
    running,
    signed,
)

TINY = ModelId("tiny")


@dataclass
class Member:
    """A member whose every byte is ours to choose, linked to `node`."""

    key: NodeKey
    hearth: str
    node: Node
    link: Link

    def says(self, counter: int, layers: str = "0-7", **more: object) -> Advertise:
        shard = encode(advertised(self.key.node_id, layers))
        return signed(self.key, self.hearth, counter, [shard], **more)

    async def settle(self, counter: int) -> None:
        """Wait until something sent after all else is listed."""
        self.link.send(self.says(counter, "8-15"))
        await self.node.until(lambda store: layers(self.node) == ["8-15"])


def layers(node: Node) -> list[str]:
    return [str(s.descriptor.layers) for s in node.store.shards(TINY)]


@asynccontextmanager
async def member(node: Node, hearth: str, key: NodeKey | None = None) -> AsyncIterator[Member]:
    key = key or new_key()
    trust = await VILLAGE.enter(hearth, key)
    me = PeerHello(key.node_id, "attic", "0.1", hearth, secrets.token_hex(4), 1, "127.0.0.1:9")
    link = await connect(
        "127.0.0.1", node.peering.port, hello=to_hello(me), handler=Silent(),
        ssl=trust.tls.client(node.id),
    )  # fmt: skip
    try:
        yield Member(key, hearth, node, link)
    finally:
        link.close()


@pytest.fixture
def hearth() -> str:
    return f"test-{secrets.token_hex(8)}"


def another_signs(liar: Member) -> Advertise:
    notice = liar.says(9)
    return Advertise(notice.body, new_key().sign(DOMAIN + notice.body))


def nobody_signs(liar: Member) -> Advertise:
    return Advertise(liar.says(9).body, bytes(64))


def of_another_hearth(liar: Member) -> Advertise:
    return signed(liar.key, "elsewhere", 9, [encode(advertised(liar.key.node_id))])


def malformed(liar: Member) -> Advertise:
    return Advertise(b"\x93" * 40, bytes(64))


FORGERIES = [another_signs, nobody_signs, of_another_hearth, malformed]


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
async def test_forged_advertisement_changes_nothing(
    hearth: str, forge: Callable[[Member], Advertise]
) -> None:
    async with running(hearth, multicast=False) as node, member(node, hearth) as liar:
        liar.link.send(forge(liar))
        warning = await node.event(lambda event: isinstance(event, Warned))
        assert getattr(warning, "code", "") == "bad_advertisement"
        assert layers(node) == []
        # What was forged has not used up its number.
        liar.link.send(liar.says(9))
        await node.until(lambda store: layers(node) == ["0-7"])


async def test_recorded_advertisement_does_not_come_back(hearth: str) -> None:
    async with running(hearth, multicast=False) as node, member(node, hearth) as peer:
        before = peer.says(1)
        peer.link.send(before)
        await node.until(lambda store: layers(node) == ["0-7"])
        peer.link.send(signed(peer.key, hearth, 2, []))
        await node.until(lambda store: layers(node) == [])
        peer.link.send(before)
        await node.event(lambda event: isinstance(event, Warned) and "repeats" in event.message)
        assert layers(node) == []
        await peer.settle(3)


async def test_advertisement_of_an_earlier_start_does_not_come_back(hearth: str) -> None:
    async with running(hearth, multicast=False) as node, member(node, hearth) as peer:
        peer.link.send(signed(peer.key, hearth, 1, [], epoch=2))
        peer.link.send(peer.says(99, epoch=1))
        await node.event(lambda event: isinstance(event, Warned) and "older" in event.message)
        assert layers(node) == []


async def test_a_node_is_heard_again_behind_another_machine_that_had_its_key(hearth: str) -> None:
    async with running(hearth, multicast=False) as node, member(node, hearth) as copied:
        copied.link.send(copied.says(9, epoch=2))
        await node.until(lambda store: layers(node) == ["0-7"])
        async with member(node, hearth, copied.key) as own:
            own.link.send(own.says(1, "8-15", epoch=1))
            await node.until(lambda store: layers(node) == ["8-15"])


async def test_nobody_speaks_for_another_member(hearth: str) -> None:
    """Also not with that member's own signature: notices are not passed on."""
    async with (
        running(hearth, multicast=False) as node,
        member(node, hearth) as victim,
        member(node, hearth) as liar,
    ):
        liar.link.send(victim.says(7))
        await node.event(lambda event: isinstance(event, Warned))
        assert layers(node) == []
        # Nor is it kept from speaking for itself.
        victim.link.send(victim.says(7))
        await node.until(lambda store: layers(node) == ["0-7"])


async def test_what_is_too_old_is_not_routed_to(hearth: str) -> None:
    async with running(hearth, multicast=False) as node, member(node, hearth) as peer:
        peer.link.send(peer.says(1, ttl_ms=0))
        await node.until(
            lambda store: any(v.offers.shards for v in store._nodes.values() if v.ttl_s <= 0)
        )
        assert layers(node) == []
        await peer.settle(2)
        # However long it says: this node's own limit counts.
        peer.link.send(peer.says(3, ttl_ms=10**12))
        await node.until(lambda store: layers(node) == ["0-7"])
        assert node.store._nodes[peer.key.node_id].ttl_s == node.store._expiry_s


async def test_member_that_is_not_trusted_is_not_routed_to_until_it_is(hearth: str) -> None:
    async with running(hearth, multicast=False) as node, member(node, hearth) as peer:
        node.trust.untrusted.add(peer.key.node_id)
        peer.link.send(peer.says(1))
        peer.link.send(malformed(peer))  # once this was noticed, the other one was heard
        await node.event(lambda event: isinstance(event, Warned))
        assert layers(node) == []
        node.trust.untrusted.clear()
        node.peering.follow_members()
        assert layers(node) == ["0-7"]


HOLDS = Capacity((Device("cpu", 1 << 30, 1 << 32, (Speed("int8", 20.0, 300.0, 0.02),)),))


def capacity(node: Node, of: str) -> Capacity | None:
    return next((v.offers.capacity for v in node.store.nodes() if v.info.node_id == of), None)


async def test_what_devices_hold_is_told_to_neighbours(hearth: str) -> None:
    async with running(hearth, multicast=False) as node, member(node, hearth) as peer:
        assert capacity(node, node.id) is None
        node.capacity = HOLDS
        node.peering.advertise()
        await node.until(lambda store: capacity(node, node.id) == HOLDS)
        # A node that says nothing of it, as earlier versions do, is listed as before.
        peer.link.send(peer.says(1))
        await node.until(lambda store: layers(node) == ["0-7"])
        assert capacity(node, peer.key.node_id) is None
        said = {"shards": [], "capacity": {**codec.plain(HOLDS), "of tomorrow": 1}}
        peer.link.send(signed(peer.key, hearth, 2, [], payload=said))
        await node.until(lambda store: capacity(node, peer.key.node_id) == HOLDS)


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {"devices": [{"name": "cpu", "free_bytes": -1, "total_bytes": 1, "speeds": []}]},
        {"devices": [{"name": "cpu", "free_bytes": 1, "total_bytes": 1}] * 17},
        {
            "devices": [
                {
                    "name": "cpu", "free_bytes": 1, "total_bytes": 1,
                    "speeds": [{"format": "int8", "decode_gb_s": 0.0, "prefill_gflops": 1.0}],
                }
            ]
        },
    ],
)  # fmt: skip
async def test_a_capacity_that_cannot_be_is_refused(hearth: str, wrong: object) -> None:
    async with running(hearth, multicast=False) as node, member(node, hearth) as liar:
        said = {"shards": [], "capacity": wrong}
        liar.link.send(signed(liar.key, hearth, 1, [], payload=said))
        warning = await node.event(lambda event: isinstance(event, Warned))
        assert "capacity" in getattr(warning, "message", "")
        await liar.settle(2)


async def test_of_a_flood_of_good_advertisements_the_rest_is_not_even_read(hearth: str) -> None:
    async with running(hearth, multicast=False) as node, member(node, hearth) as peer:
        accounts, principal = node.trust.accounts, of_peer(peer.key.node_id)
        most = accounts.limit(principal, Resource.ADVERTISEMENTS_PER_MINUTE)
        assert most >= 60
        accounts.charge(principal, Resource.ADVERTISEMENTS_PER_MINUTE, most - 1)
        for message in (peer.says(1), peer.says(2, "8-15"), malformed(peer)):
            peer.link.send(message)
        async with asyncio.timeout(20):
            while accounts.snapshot()[0]["refused"] < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert layers(node) == ["0-7"]
        assert not node.told("warning")
        # As when the minute is over.
        accounts.keep_only(PrincipalKind.PEER, frozenset())
        await peer.settle(2)
