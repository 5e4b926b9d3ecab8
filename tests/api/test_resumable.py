"""Streams that are resumed by their id after the connection broke."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from mesh.api import resumable
from mesh.api.resumable import KeptStreams
from mesh.clock import SystemClock
from mesh.errors import Busy, NotFound
from mesh.identity.api_keys import Quota, Scope
from mesh.types import THIS_NODE, Principal, PrincipalKind
from tests.api.conftest import SETTINGS, Served, serving
from tests.simulation.virtual_loop import run_virtually


def body(model: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "one two three four"}]
    return {"model": model, "messages": messages, "stream": True, "resumable": True, **fields}


def events(lines: list[str]) -> list[tuple[int, str]]:
    """(id, data) of each event."""
    found, number = [], -1
    for line in lines:
        if line.startswith("id: "):
            number = int(line.removeprefix("id: "))
        elif line.startswith("data: "):
            found.append((number, line.removeprefix("data: ")))
    return found


async def rest(http: httpx.AsyncClient, stream_id: str, after: int | None) -> list[tuple[int, str]]:
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    response = await http.get(f"/v1/streams/{stream_id}", headers=headers)
    assert response.status_code == 200, response.text
    return events(response.text.splitlines())


async def test_the_rest_follows_the_last_event_seen(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/chat/completions", json=body("echo"))
    whole = events(response.text.splitlines())
    stream_id = json.loads(whole[0][1])["id"]
    assert response.headers["x-stream-id"] == stream_id
    assert [number for number, _ in whole] == list(range(len(whole)))
    assert whole[-1][1] == "[DONE]"
    assert await rest(http, stream_id, None) == whole
    assert await rest(http, stream_id, 2) == whole[3:]
    assert await rest(http, stream_id, len(whole) - 1) == []


async def test_the_generation_goes_on_while_nobody_reads(
    http: httpx.AsyncClient, api: Served
) -> None:
    async with http.stream("POST", "/v1/chat/completions", json=body("silent")) as response:
        stream_id = response.headers["x-stream-id"]
        async for line in response.aiter_lines():
            if line == ": ping":
                break
    assert not api.generations.ended["silent"].is_set()
    reading = asyncio.create_task(rest(http, stream_id, None))
    await asyncio.sleep(0)
    api.generations.proceed.set()
    found = await reading
    assert "late" in found[1][1]
    assert found[-1][1] == "[DONE]"


async def test_an_error_is_kept_like_any_event(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/chat/completions", json=body("breaks"))
    whole = events(response.text.splitlines())
    assert "error" in json.loads(whole[-1][1])
    stream_id = response.headers["x-stream-id"]
    assert await rest(http, stream_id, None) == whole


async def test_a_stream_is_for_the_key_that_asked_for_it(
    http: httpx.AsyncClient, api: Served
) -> None:
    chat = frozenset({Scope.CHAT})
    keys = [api.keys.create(name, chat, Quota(), SystemClock())[1] for name in ("one", "other")]
    callers = [{}, *({"Authorization": f"Bearer {key}"} for key in keys)]
    for asker in callers:
        response = await http.post("/v1/chat/completions", json=body("echo"), headers=asker)
        path = f"/v1/streams/{response.headers['x-stream-id']}"
        for caller in callers:
            again = await http.get(path, headers=caller)
            assert again.status_code == (200 if caller is asker else 404)
            assert ("three" in again.text) == (caller is asker)


@pytest.mark.parametrize("last", ["x", "1.5", "--1", "-1", "-5", "1" * 30])
async def test_an_offset_that_is_no_number_is_refused(http: httpx.AsyncClient, last: str) -> None:
    response = await http.get("/v1/streams/any", headers={"Last-Event-ID": last})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "Last-Event-ID"


async def test_streams_nobody_asked_to_keep_are_not_kept(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/chat/completions", json=body("echo", resumable=False))
    stream_id = json.loads(response.text.splitlines()[0].removeprefix("data: "))["id"]
    assert (await http.get(f"/v1/streams/{stream_id}")).status_code == 404


async def test_only_so_many_are_under_way_and_ended_ones_make_room() -> None:
    async with (
        serving(replace(SETTINGS, kept_streams=4)) as api,
        httpx.AsyncClient(base_url=api.url, trust_env=False, timeout=10) as http,
    ):
        for _ in range(4):  # these end, and make room for each other
            assert (await http.post("/v1/chat/completions", json=body("echo"))).status_code == 200
        waiting = [
            asyncio.create_task(http.post("/v1/chat/completions", json=body("silent")))
            for _ in range(2)
        ]
        async with asyncio.timeout(10):
            while len(api.generations.requests) < 6:  # noqa: ASYNC110 - the fake has no event
                await asyncio.sleep(0)
        refused = await http.post("/v1/chat/completions", json=body("echo"))
        assert refused.status_code == 429
        assert "2 resumable streams of yours" in refused.json()["error"]["message"]
        api.generations.proceed.set()
        await asyncio.gather(*waiting)


async def one_event() -> AsyncGenerator[bytes, None]:
    yield b"data: one\n\n"


async def no_end() -> AsyncGenerator[bytes, None]:
    yield b"data: first\n\n"
    await asyncio.Event().wait()


def named(name: str) -> Principal:
    return Principal(PrincipalKind.KEY, name)


async def ended(streams: KeptStreams, owner: Principal, *stream_ids: str) -> None:
    """Keep these streams of the owner's, which have ended when this returns."""
    for stream_id in stream_ids:
        streams.keep(owner, stream_id, one_event())
        assert len([event async for event in streams.follow(owner, stream_id, -1)]) == 1


def is_kept(streams: KeptStreams, owner: Principal, stream_id: str) -> bool:
    try:
        streams.follow(owner, stream_id, -1)
    except NotFound:
        return False
    return True


async def test_an_owner_has_half_of_the_places_and_takes_nobody_s_answer() -> None:
    streams = KeptStreams(most=8)
    bob, eve = named("bob"), named("eve")
    await ended(streams, bob, "b0")
    for number in range(4):
        streams.keep(eve, f"e{number}", no_end())
    with pytest.raises(Busy):
        streams.keep(eve, "e4", no_end())
    assert is_kept(streams, bob, "b0")
    await ended(streams, bob, "b1", "b2", "b3")  # the other half
    assert all(is_kept(streams, bob, f"b{number}") for number in range(4))
    await streams.close()


async def test_what_ended_first_makes_room_one_s_own_before_others() -> None:
    streams = KeptStreams(most=8)
    bob, eve, amy = named("bob"), named("eve"), named("amy")
    await ended(streams, bob, "b0", "b1", "b2")
    await ended(streams, eve, "e0", "e1", "e2", "e3")
    await ended(streams, eve, "e4")
    assert not is_kept(streams, eve, "e0")
    await ended(streams, amy, "a0")  # all places are taken now
    await ended(streams, amy, "a1")
    assert not is_kept(streams, amy, "a0")
    streams.keep(amy, "a2", no_end())
    assert not is_kept(streams, amy, "a1")
    await ended(streams, amy, "a3")  # of eve, who keeps most
    assert not is_kept(streams, eve, "e1")
    assert [number for number in range(3) if is_kept(streams, bob, f"b{number}")] == [0, 1, 2]
    await streams.close()


async def test_nobody_gives_way_to_who_keeps_as_many() -> None:
    streams = KeptStreams(most=4)
    others = [named("amy"), named("bob"), named("dan")]
    streams.keep(named("eve"), "first", no_end())
    for other in others:
        await ended(streams, other, "answer")
    with pytest.raises(Busy):
        streams.keep(named("eve"), "second", no_end())
    assert all(is_kept(streams, other, "answer") for other in others)
    await streams.close()


def test_a_stream_is_forgotten_so_long_after_its_end() -> None:
    async def slowly() -> AsyncGenerator[bytes, None]:
        yield b"data: one\n\n"
        await asyncio.sleep(3 * resumable.KEEP_S)
        yield b"data: two\n\n"

    async def main() -> None:
        streams = KeptStreams()
        streams.keep(THIS_NODE, "s", slowly())
        whole = [b"id: 0\ndata: one\n\n", b"id: 1\ndata: two\n\n"]
        assert [event async for event in streams.follow(THIS_NODE, "s", -1)] == whole
        await asyncio.sleep(resumable.KEEP_S - 1)
        assert [event async for event in streams.follow(THIS_NODE, "s", -1)] == whole
        await asyncio.sleep(2)
        with pytest.raises(NotFound):
            await anext(streams.follow(THIS_NODE, "s", -1))
        await streams.close()

    run_virtually(main)
