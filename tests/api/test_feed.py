"""The feed: at most ten updates a second, every event in one of them, nothing for nobody."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import httpx
import pytest

from mesh.api.auth import Access, Caller
from mesh.api.feed import KNOWN_S, PACE_S, DashboardFeed
from mesh.client import Client
from mesh.clock import SystemClock
from mesh.errors import Unauthorized
from mesh.health.eventstream import HISTORY, EventFeed
from mesh.identity.api_keys import ApiKeys, Quota, Scope
from mesh.types import Principal, PrincipalKind
from tests.api.conftest import SETTINGS, Served, serving
from tests.fakes import ScriptedView
from tests.simulation.virtual_loop import run_virtually

KEYLESS = Caller(Principal(PrincipalKind.LOCAL, "1000"), frozenset({Scope.CHAT}))


class CountedView(ScriptedView):
    """A mesh with a real stream of events; says how often somebody looked at it."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = EventFeed(SystemClock())
        self.looks = 0
        self.tokens = 0

    def status(self) -> dict[str, Any]:
        self.looks += 1
        return {"node": {"name": "here"}, "generations": [{"tokens": self.tokens}]}

    def batches(
        self, after: int | None, *, pace_s: float, idle_s: float
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        return self.stream.batches(after, pace_s=pace_s, idle_s=idle_s)


class Queue:
    """Remembers who asked."""

    def __init__(self) -> None:
        self.asked: list[Principal | None] = []

    async def overview(self, who: Principal | None) -> dict[str, list[dict[str, Any]]]:
        self.asked.append(who)
        return {"models": [], "jobs": [{"id": "a"}], "ended": []}


def a_feed(
    view: CountedView, keys: ApiKeys | None = None, queue: Queue | None = None
) -> DashboardFeed:
    return DashboardFeed(view, Access(SETTINGS, keys, SystemClock()), queue)


async def test_a_flood_comes_in_ten_updates_a_second_and_whole() -> None:
    view = CountedView()
    feed = a_feed(view)
    loop = asyncio.get_running_loop()
    total = 1000

    async def flood() -> None:
        for number in range(total):
            view.stream.emit("peer_up", number=number)
            view.tokens += 1
            await asyncio.sleep(0.001)

    flooding = asyncio.create_task(flood(), name="flood")
    begun, seen, times = loop.time(), [], []
    async with aclosing(feed.follow(KEYLESS, 0)) as updates, asyncio.timeout(30):
        async for update in updates:
            seen += [event["number"] for event in update["events"]]
            assert update["missed"] == 0
            times.append(loop.time() - begun)
            if len(seen) == total:
                break
    await flooding
    assert seen == list(range(total))
    assert len(times) <= times[-1] / PACE_S + 2
    assert view.looks <= len(times) + 1


async def test_only_what_changed_is_sent_again() -> None:
    view = CountedView()
    async with aclosing(a_feed(view).follow(KEYLESS, None)) as updates, asyncio.timeout(10):
        first = await anext(updates)
        assert set(first["status"]) == {"node", "generations"}
        view.tokens = 7
        view.stream.stir()
        second = await anext(updates)
        assert second["status"] == {"generations": [{"tokens": 7}]}
        view.stream.emit("peer_up")
        third = await anext(updates)
        assert (third["status"], third["last_id"]) == ({}, 1)


async def test_nobody_looks_when_nobody_follows() -> None:
    view = CountedView()
    feed = a_feed(view)
    async with aclosing(feed.follow(KEYLESS, None)) as updates:
        await anext(updates)
    looks = view.looks
    for _ in range(20):
        view.stream.emit("peer_up")
        await asyncio.sleep(0)
    assert view.looks == looks == 1
    assert not view.stream._readers


async def test_followers_share_a_look() -> None:
    view = CountedView()
    feed = a_feed(view)
    followers = [feed.follow(KEYLESS, None) for _ in range(5)]
    for follower in followers:
        await anext(follower)
    for follower in followers:
        await follower.aclose()
    assert view.looks == 1


async def test_a_gap_is_counted() -> None:
    view = CountedView()
    for _ in range(HISTORY + 5):
        view.stream.emit("peer_up")
    async with aclosing(a_feed(view).follow(KEYLESS, 2)) as updates:
        update = await anext(updates)
    assert (update["missed"], len(update["events"])) == (3, HISTORY)


async def test_jobs_are_shown_to_whoever_may_see_them() -> None:
    view, queue = CountedView(), Queue()
    me = Principal(PrincipalKind.KEY, "k1")
    callers = [
        Caller(me, frozenset({Scope.CHAT})),
        Caller(me, frozenset({Scope.INTERVENTIONS})),
        Caller(me, frozenset({Scope.ADMIN})),
    ]
    keys = ApiKeys()
    feed = DashboardFeed(view, Access(replace(SETTINGS, keyless=False), keys, SystemClock()), queue)
    shown = []
    for caller in callers:
        keyed = replace(caller, principal=KEYLESS.principal) if caller is callers[0] else caller
        made, _ = await asyncio.to_thread(keys.create, "k", keyed.scopes, Quota(), SystemClock())
        known = replace(keyed, principal=Principal(PrincipalKind.KEY, made.id))
        async with aclosing(feed.follow(known, None)) as updates:
            shown.append("jobs" in (await anext(updates))["status"])
    assert shown == [False, True, True]
    assert [who is None for who in queue.asked] == [False, True]


async def test_a_revoked_key_follows_no_longer() -> None:
    view, keys = CountedView(), ApiKeys()
    made, _ = keys.create("k", frozenset({Scope.CHAT}), Quota(), SystemClock())
    caller = Caller(Principal(PrincipalKind.KEY, made.id), made.scopes)
    async with aclosing(a_feed(view, keys).follow(caller, None)) as updates, asyncio.timeout(10):
        await anext(updates)
        keys.revoke(made.id)
        view.stream.emit("peer_up")
        with pytest.raises(Unauthorized):
            await anext(updates)


def test_a_revoked_key_hears_of_no_event() -> None:
    async def main() -> None:
        view, keys = CountedView(), ApiKeys()
        made, _ = keys.create("k", frozenset({Scope.CHAT}), Quota(), SystemClock())
        caller = Caller(Principal(PrincipalKind.KEY, made.id), made.scopes)
        feed = a_feed(view, keys)
        view.stream.emit("peer_up")
        async with (
            aclosing(feed.events(caller, 0)) as told,
            aclosing(feed.events(caller, None)) as silent,
        ):
            assert (await anext(told))["type"] == "peer_up"
            waiting = asyncio.create_task(anext(silent))
            await asyncio.sleep(2 * KNOWN_S)
            assert not waiting.done()
            keys.revoke(made.id)
            await asyncio.sleep(KNOWN_S)
            assert isinstance(waiting.exception(), Unauthorized)
            view.stream.emit("peer_down")
            with pytest.raises(Unauthorized):
                await anext(told)

    run_virtually(main)


async def test_the_client_follows_and_comes_back_by_id(api: Served) -> None:
    for kind in ("peer_up", "peer_down"):
        api.view.happen(kind)
    async with Client(api.url) as client, asyncio.timeout(10):
        async with aclosing(client.follow(0)) as updates:
            first = await anext(updates)
            assert [event["type"] for event in first["events"]] == ["peer_up", "peer_down"]
            assert first["status"] == api.view.status()
        api.view.happen("shard_added")
        async with aclosing(client.follow(first["last_id"])) as updates:
            again = await anext(updates)
            assert [event["id"] for event in again["events"]] == [3]


async def test_an_update_carries_the_id_by_which_a_browser_comes_back(
    http: httpx.AsyncClient, api: Served
) -> None:
    api.view.happen("peer_up")
    headers = {"Last-Event-ID": "0"}
    async with http.stream("GET", "/mesh/v1/events?with=status", headers=headers) as response:
        lines = response.aiter_lines()
        head = [await anext(lines) for _ in range(3)]
    assert head[:2] == ["id: 1", "event: update"]
    assert json.loads(head[2].removeprefix("data: "))["last_id"] == 1


async def test_what_else_is_asked_for_is_refused(http: httpx.AsyncClient) -> None:
    response = await http.get("/mesh/v1/events?with=everything")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "with")


async def test_following_ends_with_the_server() -> None:
    async with serving() as api, Client(api.url) as client:
        async with aclosing(client.follow(None)) as updates, asyncio.timeout(10):
            await anext(updates)
            closing = asyncio.create_task(api.server.close(), name="close")
            assert [update async for update in updates] == []
        await closing
