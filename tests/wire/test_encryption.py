"""TLS over two memory buffers: the same bytes come out, however TCP cuts them."""

from __future__ import annotations

import asyncio
import ssl as tls
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.identity.tls import TlsContexts
from mesh.wire.encryption import Encryption, PlainProtocol
from mesh.wire.websocket import connect, serve
from tests.identity.support import Party, contexts
from tests.waiting import until
from tests.wire.house import House
from tests.wire.support import Recorder

HOME, GUEST, STRANGER = Party("home"), Party("guest"), Party("stranger")


class Pipe(asyncio.Transport):
    """TCP as one end sees it: what is written waits in `sent` until somebody carries it over."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.is_cut = False
        self._closing = False

    def write(self, data: Any) -> None:
        self.sent += data

    def close(self) -> None:
        self._closing = True

    def abort(self) -> None:
        self._closing = self.is_cut = True

    def is_closing(self) -> bool:
        return self._closing


class Inner(PlainProtocol):
    """What hears the plain bytes."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.heard = bytearray()
        self.lost: list[Exception | None] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes | memoryview) -> None:
        self.heard += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)


class End:
    """One side of a connection."""

    def __init__(self, context: tls.SSLContext, *, server_side: bool, handshake_s: float = 5.0):
        self.inner, self.pipe = Inner(), Pipe()
        self.secure = Encryption(
            self.inner, context, handshake_s=handshake_s, server_side=server_side
        )

    def carry_to(self, other: End, cut: Callable[[int], int]) -> bool:
        """What this side has sent, in pieces of the sizes that `cut` says; whether it was any."""
        data, self.pipe.sent = bytes(self.pipe.sent), bytearray()
        rest = data
        while rest:
            room = other.secure.get_buffer(-1)
            size = min(cut(len(rest)), len(rest), len(room))
            room[:size] = rest[:size]
            other.secure.buffer_updated(size)
            rest = rest[size:]
        return bool(data)


HOME_TLS, GUEST_TLS = contexts(HOME, GUEST), contexts(GUEST, HOME)
STRANGER_TLS = contexts(STRANGER, HOME)


def pair(guest: TlsContexts = GUEST_TLS) -> tuple[End, End]:
    server = End(HOME_TLS.server, server_side=True)
    client = End(guest.client(HOME.id), server_side=False)
    for end in (server, client):
        end.secure.connection_made(end.pipe)
    return server, client


def settle(server: End, client: End, cut: Callable[[int], int] = lambda size: size) -> None:
    for _ in range(20):
        if not client.carry_to(server, cut) | server.carry_to(client, cut):
            return
    raise AssertionError("they never stop talking")


@settings(max_examples=40)
@given(
    said=st.lists(st.tuples(st.booleans(), st.integers(1, 70_000)), max_size=6),
    sizes=st.lists(st.integers(1, 40_000), min_size=1, max_size=12),
)
def test_the_same_bytes_come_out_however_they_are_cut(
    said: list[tuple[bool, int]], sizes: list[int]
) -> None:
    async def run() -> None:
        server, client = pair()
        turns = iter(range(10**6))

        def cut(_: int) -> int:
            return sizes[next(turns) % len(sizes)]

        settle(server, client, cut)
        expected = {True: bytearray(), False: bytearray()}
        for number, (to_server, size) in enumerate(said):
            data = bytes([number]) * size
            expected[to_server] += data
            sender = (client if to_server else server).inner.transport
            assert sender is not None
            sender.write(data)
        settle(server, client, cut)
        assert (server.inner.heard, client.inner.heard) == (expected[True], expected[False])

    asyncio.run(run())


async def test_every_single_byte_may_come_alone() -> None:
    server, client = pair()
    settle(server, client, lambda _: 1)
    assert client.inner.transport is not None
    client.inner.transport.write(b"hello")
    settle(server, client, lambda _: 1)
    assert server.inner.heard == b"hello"
    shown = server.inner.transport
    assert shown is not None
    assert shown.get_extra_info("ssl_object").getpeercert(binary_form=True) == GUEST.certificate


async def test_the_inner_protocol_hears_nothing_of_a_stranger() -> None:
    server, client = pair(STRANGER_TLS)
    settle(server, client)
    assert server.inner.transport is None
    assert server.pipe.is_closing()
    server.secure.connection_lost(None)
    assert isinstance(server.inner.lost[0], tls.SSLError)
    # The stranger's own handshake is done by then; the server's alert tells it.
    assert client.pipe.is_closing()
    client.secure.connection_lost(None)
    assert "UNKNOWN_CA" in str(client.inner.lost[0]).upper().replace(" ", "_")


@pytest.mark.parametrize("at", [0, 4, 60])
async def test_a_changed_byte_ends_the_connection(at: int) -> None:
    server, client = pair()
    settle(server, client)
    assert client.inner.transport is not None
    client.inner.transport.write(bytes(100))
    client.pipe.sent[at] ^= 1
    settle(server, client)
    assert server.inner.heard == b""
    assert server.pipe.is_closing()
    server.secure.connection_lost(None)
    assert isinstance(server.inner.lost[0], tls.SSLError)


async def test_the_peers_goodbye_closes_and_nothing_is_sent_after_it() -> None:
    server, client = pair()
    settle(server, client)
    assert client.inner.transport is not None
    assert server.inner.transport is not None
    client.inner.transport.write(b"last words")
    client.inner.transport.close()
    client.inner.transport.write(b"too late")
    settle(server, client)
    assert server.inner.heard == b"last words"
    assert server.inner.transport.is_closing()
    server.secure.connection_lost(None)
    assert server.inner.lost == [None]


async def test_a_handshake_that_does_not_end_is_cut() -> None:
    server = End(HOME_TLS.server, server_side=True, handshake_s=0.05)
    server.secure.connection_made(server.pipe)
    await until(lambda: server.pipe.is_cut)
    server.secure.connection_lost(None)
    assert isinstance(server.inner.lost[0], TimeoutError)


def compute() -> None:
    until_s = time.monotonic() + 0.1
    while time.monotonic() < until_s:
        pass


async def test_what_arrives_before_the_server_looks_is_not_lost() -> None:
    """A shard computes on its event loop: a client may have said much when it is let in."""
    house = House()
    server = await serve(
        "127.0.0.1", 0, accept=house.accept, hello=HOME.hello(), ssl=HOME_TLS.server
    )

    async def greet() -> None:
        link = await connect(
            "127.0.0.1", server.port, hello=GUEST.hello(), handler=Recorder(),
            ssl=GUEST_TLS.client(HOME.id),
        )  # fmt: skip
        link.close()
        await until(lambda: link.is_gone)

    def from_elsewhere() -> None:
        asyncio.run(greet())

    greeting = asyncio.create_task(asyncio.to_thread(from_elsewhere))
    while not greeting.done():
        compute()
        await asyncio.sleep(0.01)
    await greeting
    await server.close()
