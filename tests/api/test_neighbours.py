"""Callers without a key: told apart by whose socket it is, and by their connection elsewhere."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import closing, contextmanager
from typing import Any

import httpx
import pytest

from mesh.api import neighbours
from mesh.api.neighbours import user_of
from mesh.types import ANONYMOUS, Principal
from tests.api.conftest import Served
from tests.other_users import ANNA, BEN, NEEDS_ROOT, as_user

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="nobody says so elsewhere")
CHAT = {"model": "echo", "messages": [{"role": "user", "content": "a"}]}


@contextmanager
def connected(host: str = "127.0.0.1", to: str = "") -> Iterator[tuple[Any, socket.socket]]:
    """(a client's socket, the server's end of it)."""
    family = socket.AF_INET6 if ":" in (to or host) else socket.AF_INET
    there = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        closing(socket.create_server((host, 0), family=there)) as listener,
        closing(socket.socket(family)) as theirs,
    ):
        theirs.connect((to or host, listener.getsockname()[1]))
        ours, _ = listener.accept()
        with closing(ours):
            yield theirs, ours


def user_at_the_other_end(ours: socket.socket) -> int | None:
    return user_of(ours.getpeername()[:2], ours.getsockname()[:2])


@LINUX
def test_the_kernel_says_whose_socket_it_is() -> None:
    with connected() as (_, ours):
        assert user_at_the_other_end(ours) == os.getuid()


@LINUX
def test_an_ipv6_socket_may_reach_an_ipv4_address() -> None:
    with connected(to="::ffff:127.0.0.1") as (_, ours):
        assert user_at_the_other_end(ours) == os.getuid()


@LINUX
@LINUX
def test_over_ipv6_it_says_so_as_well() -> None:
    with connected("::1") as (_, ours):
        assert user_at_the_other_end(ours) == os.getuid()


@LINUX
def test_no_socket_is_nobody_s() -> None:
    with connected() as (_, ours):
        host, port = ours.getpeername()[:2]
        assert user_of((host, port ^ 1), ours.getsockname()[:2]) is None


@LINUX
def test_a_socket_that_nobody_holds_is_not_root_s() -> None:
    with connected() as (theirs, ours):
        theirs.close()
        assert user_at_the_other_end(ours) is None


@LINUX
@NEEDS_ROOT
@pytest.mark.parametrize("uid", [ANNA, 65534])
def test_users_of_whom_this_system_has_no_number_are_unknown(uid: int) -> None:
    with as_user(uid) as anybody:
        theirs = anybody.submit(socket.socket).result()
    with closing(socket.create_server(("127.0.0.1", 0))) as listener, closing(theirs):
        theirs.connect(listener.getsockname())
        ours, _ = listener.accept()
        with closing(ours):
            assert user_at_the_other_end(ours) == (ANNA if uid == ANNA else None)


def client(url: str) -> httpx.Client:
    """Reads no certificates, which those who are not root may not."""
    return httpx.Client(base_url=url, trust_env=False, timeout=10, verify=False)  # noqa: S501


def chat(url: str, times: int = 1, **fields: Any) -> httpx.Response:
    """Ask, over one connection."""
    with client(url) as http:
        for _ in range(times):
            answer = http.post("/v1/chat/completions", json={**CHAT, **fields})
            assert answer.is_success, answer.text
    return answer


async def asked(api: Served, who: Executor, *arguments: Any) -> list[Principal]:
    """On whose behalf generations were asked for."""
    before = len(api.generations.requests)
    await asyncio.get_running_loop().run_in_executor(who, chat, api.url, *arguments)
    return [request.principal for request in api.generations.requests[before:]]


@LINUX
@NEEDS_ROOT
async def test_users_are_principals_over_all_their_connections(api: Served) -> None:
    with as_user(ANNA) as anna, as_user(BEN) as ben:
        assert await asked(api, anna, 2) == [Principal.user(ANNA)] * 2
        assert await asked(api, anna) == [Principal.user(ANNA)]
        assert await asked(api, ben) == [Principal.user(BEN)]


def stream_of(url: str, answer: httpx.Response) -> int:
    stream_id = answer.headers["x-stream-id"]
    with client(url) as http:
        return http.get(f"/v1/streams/{stream_id}").status_code


@LINUX
@NEEDS_ROOT
async def test_another_user_does_not_resume_a_stream_even_by_its_id(api: Served) -> None:
    loop = asyncio.get_running_loop()

    def resumable(url: str) -> httpx.Response:
        return chat(url, stream=True, resumable=True)

    with as_user(ANNA) as anna, as_user(BEN) as ben:
        answer = await loop.run_in_executor(anna, resumable, api.url)
        assert await loop.run_in_executor(ben, stream_of, api.url, answer) == 404
        assert await loop.run_in_executor(anna, stream_of, api.url, answer) == 200


async def test_where_nobody_says_so_a_connection_is_a_principal(
    api: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "_NETLINK_SOCK_DIAG", 31)  # there is no such protocol
    in_thread: Callable[..., Any] = asyncio.to_thread
    await in_thread(chat, api.url, 2)
    answer = await in_thread(chat, api.url, stream=True, resumable=True)
    first, again, other = (request.principal for request in api.generations.requests)
    assert first == again
    assert first != other
    assert {first.account, other.account} == {ANONYMOUS}
    assert await in_thread(stream_of, api.url, answer) == 200, "its id is the proof"


async def test_a_connection_that_ends_meanwhile_is_nobody_s() -> None:
    """Another user's may have its address by the time the table is read."""

    def slowly(peer: neighbours.Address, own: neighbours.Address) -> int:
        if ends:
            theirs.close()
        return ANNA

    found: asyncio.Queue[Principal] = asyncio.Queue()

    async def look(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.put_nowait(neighbours.Neighbour(writer.transport, slowly).principal)
        writer.close()

    async with await asyncio.start_server(look, "127.0.0.1", 0) as server:
        for ends in (False, True):
            theirs = socket.socket()
            theirs.setblocking(False)
            address = server.sockets[0].getsockname()
            await asyncio.get_running_loop().sock_connect(theirs, address)
            principal = await asyncio.wait_for(found.get(), 5)
            assert principal.account == (ANONYMOUS if ends else Principal.user(ANNA))
            theirs.close()
