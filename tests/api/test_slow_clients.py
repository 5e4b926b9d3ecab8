"""Clients that never end: heads, bodies and answers that are not read, over raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import pairwise

import httpx
import pytest

from mesh.api.auth import MAX_HEADER_BYTES, MAX_HEADERS
from tests.api.conftest import SETTINGS, Served, serving

QUICK = replace(SETTINGS, head_timeout_s=0.3, body_timeout_s=0.2, unread_timeout_s=0.3)
LONG_S = 60.0
"""Beyond every limit that is tested: what has not happened by then never happens."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def quick() -> AsyncIterator[Served]:
    async with serving(QUICK) as api:
        yield api


@asynccontextmanager
async def raw(api: Served, host: str = "127.0.0.1") -> AsyncIterator[Streams]:
    port = api.server.port
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def trickle(api: Served, start: bytes, drop: bytes) -> bytes:
    """Send `start`, then `drop` again and again until the server ends it; what it said."""
    async with raw(api) as (reader, writer):
        writer.write(start)
        answer = asyncio.create_task(_heard(reader))
        async with asyncio.timeout(LONG_S):
            while not answer.done():
                if not writer.transport.is_closing():
                    writer.write(drop)
                await asyncio.wait([answer], timeout=0.05)
        return answer.result()


async def _heard(reader: asyncio.StreamReader) -> bytes:
    """All that came: also what did before a reset, which whoever still writes gets in the end."""
    heard = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(4096):
            heard += part
    return heard


@pytest.mark.parametrize(
    "start",
    [b"", b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n",
     b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP/1.1\r\n"],
    ids=["nothing", "first", "second on a connection"],
)  # fmt: skip
async def test_slow_head_is_cut(start: bytes, quick: Served) -> None:
    await trickle(quick, start, b"X-A: b\r\n" if start else b"")


async def test_slow_body_is_refused_and_cut(quick: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n"
    said = await trickle(quick, head, b" ")
    assert said.startswith(b"HTTP/1.1 400")
    assert b"did not arrive within" in said


async def test_a_client_that_leaves_before_its_body_is_whole_is_no_failure(
    quick: Served, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n"
    async with raw(quick) as (_, writer):
        writer.write(head + b" ")
        await writer.drain()
        await asyncio.sleep(0.05)  # the rest of it is waited for
    with caplog.at_level(logging.INFO):
        async with asyncio.timeout(LONG_S):
            while "/v1/completions" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert ": 499 in " in caplog.text
    assert "Traceback" not in caplog.text


async def test_slow_body_that_nobody_asked_for_is_cut(quick: Served) -> None:
    head = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000\r\n\r\n"
    assert (await trickle(quick, head, b" ")).startswith(b"HTTP/1.1 404")


async def test_slow_chunks_are_cut(quick: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert b"did not arrive within" in await trickle(quick, head, b"1\r\n \r\n")


async def test_a_body_in_crumbs_is_read_and_holds_nobody_up() -> None:
    turns = [time.thread_time()]  # of the loop, in each of which others are served
    settings = replace(SETTINGS, max_body_bytes=1 << 20)
    async with serving(settings) as api, raw(api) as (reader, writer):
        writer.write(
            b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        writer.write(b"1\r\n \r\n" * 120_000 + b"7\r\nnothing\r\n0\r\n\r\n")
        answer = asyncio.create_task(reader.read())
        async with asyncio.timeout(LONG_S):
            while not answer.done():
                await asyncio.sleep(0)
                turns.append(time.thread_time())
    assert b"line 1 column 120001" in answer.result()
    *_, third, _, _ = sorted(after - before for before, after in pairwise(turns))
    # What came is read in more than three pieces; the garbage collector may take two turns.
    assert third < (turns[-1] - turns[0]) / 20


async def test_answer_that_nobody_reads_ends_its_generation(quick: Served) -> None:
    body = b'{"model": "endless", "prompt": "a", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", quick.server.port))
        await loop.sock_sendall(client, head % len(body) + body)
        async with asyncio.timeout(LONG_S):
            await quick.generations.ended["endless"].wait()


async def test_a_connection_stays_open_for_longer_than_clients_keep_theirs() -> None:
    """Whoever sends something just when it is closed would hear that it broke."""
    kept_s = httpx.Limits().keepalive_expiry
    assert kept_s is not None
    head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with serving(SETTINGS) as api, raw(api) as (reader, writer), asyncio.timeout(3 * LONG_S):
        for pause_s in (kept_s + 0.5, 0):
            writer.write(head)
            assert b"HTTP/1.1 200 OK" in await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(pause_s)


async def test_too_many_or_too_long_headers_are_refused(quick: Served) -> None:
    async with httpx.AsyncClient(base_url=quick.url, trust_env=False) as http:
        many = {f"X-{n}": "1" for n in range(MAX_HEADERS + 1)}
        refused = await http.get("/v1/models", headers=many)
        assert refused.status_code == 431
        assert refused.json()["error"]["code"] == "headers_too_large"
        long = {"X": "a" * MAX_HEADER_BYTES}
        assert (await http.get("/v1/models", headers=long)).status_code == 431


async def test_too_large_bodies_are_refused_whether_they_say_so_or_not(quick: Served) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 1000

    async with httpx.AsyncClient(base_url=quick.url, trust_env=False) as http:
        for body in (b" " * (QUICK.max_body_bytes + 1), chunks()):
            refused = await http.post("/v1/completions", content=body)
            assert refused.status_code == 413


async def test_connections_that_ask_nothing_keep_nobody_out() -> None:
    settings = replace(SETTINGS, head_timeout_s=60, max_connections=20)
    async with (
        serving(settings) as api,
        httpx.AsyncClient(base_url=api.url, trust_env=False) as http,
        AsyncExitStack() as stack,
    ):
        following = http.stream("GET", "/mesh/v1/events")
        followed = (await stack.enter_async_context(following)).aiter_lines()
        first = await anext(followed)
        late, _ = await stack.enter_async_context(raw(api, "127.0.0.2"))
        reads = [asyncio.create_task(late.read())]
        for _ in range(40):
            reader, _ = await stack.enter_async_context(raw(api))
            reads.append(asyncio.create_task(reader.read()))
        async with asyncio.timeout(LONG_S):
            await asyncio.gather(*reads[1:23], return_exceptions=True)
            assert (await http.get("/v1/models")).status_code == 200
            await asyncio.gather(reads[23], return_exceptions=True)  # which made room for it
            assert not any(read.done() for read in (reads[0], *reads[24:]))
            assert first
            assert await anext(followed) is not None
    await asyncio.gather(*reads, return_exceptions=True)


async def test_a_connection_beyond_the_limit_is_dropped_where_all_are_served() -> None:
    async with (
        serving(replace(SETTINGS, max_connections=3)) as api,
        httpx.AsyncClient(base_url=api.url, trust_env=False) as http,
        AsyncExitStack() as stack,
    ):
        for _ in range(3):
            await stack.enter_async_context(http.stream("GET", "/mesh/v1/events"))
        with pytest.raises(httpx.TransportError):
            await http.get("/v1/models")


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels count who waits otherwise")
async def test_no_more_are_accepted_at_once_than_the_loop_has_time_for() -> None:
    """As many as wait: asyncio takes all of them before it serves anybody else."""
    async with serving(SETTINGS) as api:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(socket.socket()) for _ in range(200)]
            for client in clients:
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", api.server.port))
            _, connected, _ = select.select([], clients, [], 0)  # the loop accepts none meanwhile
            assert 100 < len(connected) < 150
        async with httpx.AsyncClient(base_url=api.url, trust_env=False) as http:
            await http.get("/v1/models")  # it is taken behind all of them, which are gone by then
