"""Who gets a shard's streams and caches when somebody holds them all: over TLS, several nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mesh.accounts.ledger import Resource, of_peer
from mesh.errors import Busy, CacheFull, MeshError, SessionGone
from mesh.identity.tls import require_node
from mesh.wire.connection import WebSocketLink
from mesh.wire.link import LinkHandler
from mesh.wire.messages import Failure
from mesh.wire.websocket import connect, serve
from tests.identity.support import Party
from tests.shard.asker import Asker, Attic, settled
from tests.shard.spans import rows

STREAMS = 8


class House:
    """A shard that listens, and the nodes that it lets in."""

    def __init__(self, attic: Attic, home: Party, port: int) -> None:
        self.attic = attic
        self._home = home
        self._port = port

    async def enter(self, party: Party) -> Asker:
        asker = Asker()
        tls = await party.trusting(self._home)
        asker.use(
            await connect(
                "127.0.0.1", self._port, hello=party.hello(), handler=asker,
                ssl=tls.client(self._home.id),
            )
        )  # fmt: skip
        return asker

    def held(self, party: Party, resource: Resource = Resource.STREAMS) -> float:
        return self.attic.server.accounts.held(of_peer(party.id), resource)


ANN, BOB, EVE = Party("ann"), Party("bob"), Party("eve")


@asynccontextmanager
async def house(**settings: Any) -> AsyncIterator[House]:
    home = Party("attic")
    tls = await home.trusting(ANN, BOB, EVE)
    async with Attic(**{"max_concurrent_streams": STREAMS, **settings}) as attic:

        def accept(link: WebSocketLink) -> LinkHandler:
            require_node(link.peer_certificate, link.peer.node_id)
            return attic.service.handler(link)

        server = await serve("127.0.0.1", 0, accept=accept, hello=home.hello(), ssl=tls.server)
        try:
            yield House(attic, home, server.port)
        finally:
            await server.close()


async def reason(asker: Asker) -> MeshError | dict[str, Any]:
    """Why the shard ended one of the asker's sessions."""
    failure = await asker.answer()
    assert isinstance(failure, Failure)
    return failure.error


async def test_one_node_may_have_everything_while_nobody_else_asks() -> None:
    async with house() as here:
        ann = await here.enter(ANN)
        for number in range(STREAMS):
            await ann.open(number)
        with pytest.raises(
            Busy, match=rf"There are 8 streams here, 8 are taken, 8 .* peer:{ANN.id}"
        ):
            await ann.open(STREAMS)
        for number in range(STREAMS):
            await ann.step(1, 0, rows(2), number)
        ann.link.close()


async def test_silent_sessions_make_room_for_anothers_share_and_no_further() -> None:
    """Of streams and of positions: whoever goes for one leaves the other as well."""
    async with house(silent_s=0.0, kv_tokens=STREAMS * 128) as here:
        eve, ann = await here.enter(EVE), await here.enter(ANN)
        for number in range(STREAMS):
            await eve.open(number)
        await eve.step(1, 0, rows(2), 0)  # not the longest silent any more
        for number in range(STREAMS // 2):
            await ann.open(number)
            error = await reason(eve)
            assert isinstance(error, dict)
            assert error["code"] == SessionGone.code
            assert "more than its share" in error["message"]
            assert here.held(EVE) == STREAMS - 1 - number
        with pytest.raises(Busy):
            await ann.open(STREAMS // 2)
        assert (here.held(EVE), here.held(ANN)) == (4, 4)
        await eve.step(2, 2, rows(1), 0)
        await ann.step(1, 0, rows(3), 3)
        bob = await here.enter(BOB)
        await bob.open()
        await bob.open(2)
        assert here.held(BOB) == 2
        with pytest.raises(Busy):  # a third of eight is all that falls to each
            await bob.open(3)
        for asker in (eve, ann, bob):
            asker.link.close()


async def test_whoever_has_nothing_gets_one_stream_even_from_sessions_at_work() -> None:
    async with house(silent_s=60.0) as here:
        eve, ann = await here.enter(EVE), await here.enter(ANN)
        for number in range(STREAMS):
            await eve.open(number)
            await eve.step(1, 0, rows(2), number)
        await ann.open(1)
        assert "share" in str(await reason(eve))
        with pytest.raises(Busy):
            await ann.open(2)
        assert (here.held(EVE), here.held(ANN)) == (7, 1)
        await ann.step(1, 0, rows(3))
        await eve.step(2, 2, rows(1), 0)  # the youngest had to go
        eve.link.close()
        await settled(lambda: here.held(EVE) == 0)
        await ann.open(2)
        ann.link.close()


async def test_a_nodes_only_session_at_work_is_nobody_elses() -> None:
    async with house(max_concurrent_streams=1, silent_s=60.0) as here:
        ann, bob = await here.enter(ANN), await here.enter(BOB)
        await ann.open()
        with pytest.raises(Busy):
            await bob.open()
        await ann.step(1, 0, rows(2))
        ann.link.close()
        bob.link.close()


async def test_silent_caches_make_room_for_anothers_share_of_positions() -> None:
    async with house(kv_tokens=1200, silent_s=0.0) as here:
        eve, ann = await here.enter(EVE), await here.enter(ANN)
        for number in range(3):
            await eve.open(number, max_tokens=400)
        with pytest.raises(CacheFull):
            await ann.open(1, max_tokens=601)  # more than half of it
        await ann.open(1, max_tokens=500)
        gone = [await reason(eve) for _ in range(2)]
        assert all("share" in str(error) for error in gone)
        assert here.held(EVE, Resource.CACHE_POSITIONS) == 400
        assert here.held(ANN, Resource.CACHE_POSITIONS) == 500
        eve.link.close()
        ann.link.close()


async def test_a_session_without_a_step_for_a_lease_is_closed_and_its_asker_told() -> None:
    async with house(session_lease_s=0.4, max_concurrent_streams=2) as here:
        eve, ann = await here.enter(EVE), await here.enter(ANN)
        await eve.open(1)
        await ann.open(1)
        told = asyncio.create_task(eve.answer())
        position = 0
        while not told.done():
            await ann.step(position + 1, position, rows(1))
            position += 1
            await asyncio.sleep(0.02)
        failure = told.result()
        assert isinstance(failure, Failure)
        assert (failure.session, failure.step) == (1, None)
        assert failure.error["code"] == SessionGone.code
        assert "no step for 0.4 s" in failure.error["message"]
        assert here.held(EVE) == here.held(EVE, Resource.CACHE_POSITIONS) == 0
        await ann.step(position + 1, position, rows(1))
        with pytest.raises(SessionGone):
            await eve.step(1, 0, rows(1))
        await eve.open(1)  # the number is free again
        eve.link.close()
        ann.link.close()


async def test_a_parked_session_has_the_lease_of_a_parked_one() -> None:
    async with house(session_lease_s=0.2, park_lease_s=60.0) as here:
        ann = await here.enter(ANN)
        await ann.open()
        await ann.step(1, 0, rows(3))
        ann.park()
        await asyncio.sleep(0.5)
        assert (here.held(ANN), here.held(ANN, Resource.CACHE_POSITIONS)) == (0, 128)
        await ann.resume()
        await ann.step(2, 3, rows(1))
        ann.link.close()
