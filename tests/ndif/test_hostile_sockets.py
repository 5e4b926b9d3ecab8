"""WebSockets that are opened to be held: nobody keeps a connection or memory for nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ndif.serving import Node, serving, with_key

SETTINGS = replace(with_key("0123456789abcdef0123"), unread_timeout_s=0.5)
LONG_S = 10.0
"""Beyond every limit that is tested: what has not happened by then never happens."""
UPGRADE = b"HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
OPENING = (
    b"GET /ws/socket.io " + UPGRADE + b"Sec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
PING = b"\x89\xfd" + bytes(4) + bytes(125)
BEGINNING, EMPTY = b"\x01\x80" + bytes(4), b"\x00\x80" + bytes(4)
"""Of a message, and a part of one without a byte."""


@asynccontextmanager
async def raw(node: Node) -> AsyncIterator[socket.socket]:
    loop = asyncio.get_running_loop()
    with socket.socket() as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        end.setblocking(False)
        await loop.sock_connect(end, ("127.0.0.1", node.server.port))
        yield end


@pytest.mark.parametrize(
    "rest",
    [b"Content-Length: 4\r\n\r\n", b"A: b\r\n" * 150 + b"\r\n"],
    ids=["a body", "many headers"],
)
async def test_an_opening_that_is_none_keeps_no_connection(tmp_path: Path, rest: bytes) -> None:
    async with serving(tmp_path, api=SETTINGS) as node, raw(node) as end, asyncio.timeout(LONG_S):
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(end, b"GET / " + UPGRADE + rest)
        while await loop.sock_recv(end, 4096):
            pass


@pytest.mark.parametrize(
    ("first", "then"), [(b"", PING * 8), (BEGINNING, EMPTY * 9000)], ids=["pings", "empty parts"]
)
async def test_who_floods_and_does_not_read_is_cut_off(
    tmp_path: Path, first: bytes, then: bytes
) -> None:
    async with serving(tmp_path, api=SETTINGS) as node, raw(node) as end:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(end, OPENING)
        await loop.sock_recv(end, 12)
        await loop.sock_sendall(end, first)
        with pytest.raises(ConnectionError):
            await flood(end, then)


async def flood(end: socket.socket, parts: bytes) -> None:
    async with asyncio.timeout(LONG_S):
        while True:
            await asyncio.get_running_loop().sock_sendall(end, parts)
            await asyncio.sleep(0)
