"""Peers that are not ours, or not nice: fragments, floods, silence, rule breakers."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import replace

import pytest

from mesh.accounts.ledger import Limit, Resource, ResourceLedger, of_peer
from mesh.clock import SystemClock
from mesh.errors import (
    BadFrame,
    ConnectFailed,
    FrameTooLarge,
    LinkLost,
    MeshError,
    PipelineStalled,
    UntrustedPeer,
)
from mesh.wire.connection import PATH, WebSocketLink
from mesh.wire.frames import FrameType, pack_frame
from mesh.wire.framing import wrap
from mesh.wire.limits import DEFAULT_LIMITS, MIB
from mesh.wire.link import LinkHandler
from mesh.wire.messages import Park, Step
from mesh.wire.protocol import TensorSession
from mesh.wire.websocket import Doorkeeper, connect, place_of
from tests.wire.house import QUICK, House, foreign_client, listening
from tests.wire.support import Recorder, hello, tensor


def park(sequence: int, session: int) -> bytes:
    body = b"\x81\xa7session" + bytes([session])
    return pack_frame(FrameType.PARK, sequence, 0, body)


async def test_fragmented_and_batched_messages_and_websocket_pings_are_understood() -> None:
    async with listening() as house, foreign_client(house) as websocket:
        frame = park(1, 1)
        await websocket.send([frame[:3], frame[3:10], frame[10:]])
        await (await websocket.ping())
        for number in range(2, 50):
            await websocket.send(park(number, number))
        got = [await house.handlers[0].next() for _ in range(49)]
        assert got == [Park(number) for number in range(1, 50)]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("text", BadFrame),
        (["te", "xt"], BadFrame),
        (b"no frame", BadFrame),
        (bytes(DEFAULT_LIMITS.message_bytes + 1), FrameTooLarge),
    ],
)
async def test_a_peer_that_breaks_the_rules_is_closed(
    message: str | bytes, error: type[MeshError]
) -> None:
    async with listening() as house, foreign_client(house) as websocket:
        await websocket.send(message)
        assert isinstance(await house.handlers[0].end(), error)
        await websocket.wait_closed()


@pytest.mark.parametrize("crumb", [b"\x00", b"\x8a"], ids=["empty parts", "pongs"])
async def test_a_peer_that_sends_crumbs_without_end_is_cut_off(crumb: bytes) -> None:
    async with listening() as house, foreign_client(house) as websocket:
        socket = websocket.transport
        socket.write(b"\x02\x80" + bytes(4))
        for _ in range(5):
            socket.write((crumb + b"\x80" + bytes(4)) * 9000)
            await asyncio.sleep(0)
        assert isinstance(await house.handlers[0].end(), BadFrame)
        await websocket.wait_closed()


async def test_a_websocket_close_without_bye_is_a_lost_link() -> None:
    async with listening() as house, foreign_client(house) as websocket:
        await websocket.close(1001, "elsewhere")
        error = await house.handlers[0].end()
        assert isinstance(error, LinkLost)
        assert "1001" in error.message


async def test_a_silent_peer_is_lost() -> None:
    async with listening(QUICK) as house, foreign_client(house) as websocket:
        websocket.transport.pause_reading()
        assert "silent" in str(await house.handlers[0].end())
        websocket.transport.abort()


async def raw_peer(house: House) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A peer under the test's control down to the socket, after the hello exchange."""
    # A small receive buffer, or the kernel would take megabytes before anybody feels anything.
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", house.server.port))
    reader, writer = await asyncio.open_connection(sock=sock)
    writer.write(
        f"GET {PATH} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    await reader.readuntil(b"\r\n\r\n")
    session = TensorSession(hello("raw"))
    session.start()
    writer.write(wrap(session.next_frame() or b"", masked=True))
    await reader.read(10)
    return reader, writer


async def test_nobody_is_charged_for_who_says_to_be_him() -> None:
    def identify(link: WebSocketLink) -> None:
        raise UntrustedPeer(f"{link.peer.node_id} has another key.", fix="")

    def admit(link: WebSocketLink) -> LinkHandler:
        raise AssertionError("nobody is let in")

    ledger = ResourceLedger(SystemClock(), {Resource.LINKS: Limit(8)})
    limits = replace(DEFAULT_LIMITS, accounts=ledger)
    async with listening(limits, Doorkeeper(identify, admit)) as house:
        _, writer = await raw_peer(house)  # it is refused, and does not hang up
        assert ledger.held(of_peer("id-raw"), Resource.LINKS) == 0
        writer.transport.abort()


@pytest.mark.parametrize("endpoint", ["wss://[:::::]:1", "wss://127.0.0.1", "wss://a:99999"])
def test_what_is_no_endpoint_is_said_to_be_none(endpoint: str) -> None:
    with pytest.raises(ConnectFailed, match="is no endpoint"):
        place_of(endpoint)


async def test_a_name_that_no_host_can_have_is_a_link_that_failed() -> None:
    with pytest.raises(ConnectFailed, match=r"No link to a\.\.b:7700"):
        await connect(*place_of("wss://a..b:7700"), hello=hello(), handler=Recorder())


async def test_a_peer_that_sends_but_does_not_read_does_not_fill_our_memory() -> None:
    limits = replace(
        DEFAULT_LIMITS, chunk_bytes=MIB // 16, control_bytes=MIB // 16, high_water_bytes=MIB // 8
    )
    async with listening(limits) as house:
        reader, writer = await raw_peer(house)
        (link,) = house.server.links
        blob = b"".join(
            wrap(pack_frame(FrameType.PING, 1 + n, 0, struct.pack("!Q", n)), masked=True)
            for n in range(10_000)
        )
        # Our own pings first, then websocket pings, which websockets answers by itself.
        writer.write(blob)
        control = b"\x89\xfd\0\0\0\0" + bytes(125)
        worst = 0
        stuck = asyncio.create_task(flood(writer, control * 8000))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 20
        while not link._read_paused and loop.time() < deadline:
            worst = max(worst, link.queued_bytes)
            await asyncio.sleep(0.01)
        assert link._read_paused
        await asyncio.sleep(0.1)
        assert max(worst, link.queued_bytes) < limits.unread_bytes + 2 * MIB
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)
        # Once it reads, it is read again.
        reading = asyncio.create_task(exhaust(reader))
        writer.write(wrap(park(10_001, 7), masked=True))
        assert await house.handlers[0].next() == Park(7)
        writer.transport.abort()
        await house.handlers[0].end()
        await reading


async def exhaust(reader: asyncio.StreamReader) -> None:
    while await reader.read(MIB):
        pass


async def flood(writer: asyncio.StreamWriter, data: bytes) -> None:
    while True:
        writer.write(data)
        await writer.drain()


async def test_drain_waits_for_a_peer_that_does_not_read_and_wakes_when_it_does() -> None:
    async with listening() as house:
        _, writer = await raw_peer(house)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        (link,) = house.server.links
        for number in range(30):
            link.send(Step(1, number, 0, tensor("int8", (MIB,))))
        with pytest.raises(PipelineStalled):
            await link.drain(0.05)
        waiting = asyncio.create_task(link.drain(10))
        await asyncio.sleep(0)
        writer.transport.abort()
        with pytest.raises(LinkLost):
            await waiting
