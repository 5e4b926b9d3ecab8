"""Streams as sockets see them: keep-alive, clients that leave, clients that do not read."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from typing import Any

import httpx
import psutil
import pytest

from tests.api.conftest import Served, serving
from tests.fakes import FILLER


def body(model: str, *, stream: bool = True) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "x"}], "stream": stream}


def raw(model: str, *, stream: bool = True) -> bytes:
    """A whole HTTP request, for sockets that httpx would read too eagerly."""
    payload = json.dumps(body(model, stream=stream)).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    return head % len(payload) + payload


async def test_silence_is_filled_with_comments(http: httpx.AsyncClient, api: Served) -> None:
    lines: list[str] = []
    async with http.stream("POST", "/v1/chat/completions", json=body("silent")) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            lines += [line] if line else []
            if lines.count(": ping") == 3:
                api.generations.proceed.set()
    assert lines[:3] == [": ping"] * 3
    assert json.loads(lines[-3].removeprefix("data: "))["choices"][0]["delta"]["content"] == "late"
    assert lines[-1] == "data: [DONE]"


async def test_answers_do_not_wait_for_acknowledgements(api: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"200" in await asyncio.wait_for(reader.readline(), 5)
    own = writer.get_extra_info("sockname")
    connections = await asyncio.to_thread(psutil.Process().net_connections, "tcp4")
    (far,) = (each.fd for each in connections if each.raddr == own)
    with socket.socket(fileno=os.dup(far)) as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("model", ["stuck", "silent"])
@pytest.mark.parametrize("stream", [True, False])
async def test_generation_ends_when_the_client_leaves(
    api: Served, model: str, stream: bool
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
    writer.write(raw(model, stream=stream))
    await asyncio.wait_for(api.generations.started.wait(), 5)
    writer.close()
    await asyncio.wait_for(api.generations.ended[model].wait(), 5)
    await writer.wait_closed()


async def test_slow_reader_holds_back_its_own_stream_only(
    http: httpx.AsyncClient, api: Served
) -> None:
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, ("127.0.0.1", api.server.port))
        await loop.sock_sendall(slow, raw("endless"))
        pulled = -1
        while pulled != api.generations.pulled["endless"] or pulled < 1:
            pulled = api.generations.pulled["endless"]
            # Others are served meanwhile, and give the stuck stream time to move if it could.
            for _ in range(20):
                answer = await http.post("/v1/chat/completions", json=body("echo", stream=False))
                assert answer.status_code == 200
            # The kernel's socket buffers (a few MB on loopback) and uvicorn's 64 KiB, and no more.
            assert pulled * len(FILLER) < 16 << 20
    await asyncio.wait_for(api.generations.ended["endless"].wait(), 5)


async def test_events_replay_after_the_last_id_and_go_on(
    http: httpx.AsyncClient, api: Served
) -> None:
    for kind in ("peer_up", "shard_added", "peer_down"):
        api.view.happen(kind)
    events: list[str] = []
    headers = {"Last-Event-ID": "1"}
    async with http.stream("GET", "/mesh/v1/events", headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:])["type"])
            elif line.startswith(("id: ", "event: ")):
                events.append(line)
            if events.count("peer_down") == 1 and len(api.view.happened) == 3:
                api.view.happen("node_stopped")
            if "node_stopped" in events:
                break
    assert events == [
        "id: 2", "event: shard_added", "shard_added",
        "id: 3", "event: peer_down", "peer_down",
        "id: 4", "event: node_stopped", "node_stopped",
    ]  # fmt: skip
    await asyncio.wait_for(api.view.unwatched.wait(), 5)


@pytest.mark.parametrize("text", ["x", "-1", "1" * 30, "²"])
async def test_bad_last_event_id_is_refused(http: httpx.AsyncClient, text: str) -> None:
    response = await http.get("/mesh/v1/events", headers={"Last-Event-ID": text.encode()})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "Last-Event-ID"


async def test_closing_ends_event_streams_cleanly() -> None:
    async with serving() as api, httpx.AsyncClient(trust_env=False) as http:
        async with http.stream("GET", f"{api.url}/mesh/v1/events") as response:
            lines = response.aiter_lines()
            assert await anext(lines) == ": ping"
            closing = asyncio.create_task(api.server.close())
            # Ends without a protocol error: the response is complete.
            assert {line async for line in lines} <= {"", ": ping"}
        await asyncio.wait_for(closing, 5)
        assert api.view.unwatched.is_set()


async def test_closing_tells_clients_that_their_answers_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = [{"role": "user", "content": "x"}]
    chat, message = "/v1/chat/completions", "/v1/messages"
    bodies: list[tuple[str, dict[str, Any]]] = [
        (path, {"model": model, "stream": stream, **form})
        for model, stream in (("stuck", True), ("stuck", False), ("silent", True))
        for path, form in (
            (chat, {"messages": said}),
            ("/v1/responses", {"input": "x"}),
            (message, {"messages": said, "max_tokens": 9}),
            ("/api/chat", {"messages": said}),
        )
    ]
    bodies += [
        (chat, {"model": "stuck", "messages": said, "stream": True, "resumable": True}),
        (f"{message}/count_tokens", {"model": "silent", "messages": said}),
    ]
    async with serving() as api, httpx.AsyncClient(trust_env=False, timeout=10) as http:
        asked = [asyncio.create_task(http.post(api.url + path, json=one)) for path, one in bodies]
        async with asyncio.timeout(5):
            while len(api.generations.requests) < len(bodies):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.wait_for(api.server.close(grace_s=0.2), 5)
        answers = await asyncio.gather(*asked)
    for (path, one), answer in zip(bodies, answers, strict=True):
        last = answer.text.strip().splitlines()[-1].removeprefix("data: ")
        assert "node_stopped" in last, (path, one, answer.text)
        assert "Ask again when it is up" in last
        json.loads(last)
        assert answer.status_code == (503 if last == answer.text.strip() else 200)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING], caplog.text
