"""The page at `/`: what its files are, and what they do in a real browser."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from importlib import resources

import httpx
import pytest

from mesh.api.app import create_app
from mesh.api.page import PATHS
from mesh.api.server import serve_api
from mesh.api.services import RESTING
from tests.api.conftest import SETTINGS, Served, serving, with_key
from tests.page.browser import CHROMIUM, Page, browsing
from tests.tui.house import whole

KEY = "k" * 20
in_a_browser = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium (Debian: chromium)")


HASTY = """(() => {
  const patient = window.setTimeout;
  window.setTimeout = (act, ms) => patient(act, Math.min(ms, 2000));
})()"""
"""What makes a page wait for less."""


def asks(page: Page, text: str) -> None:
    page.eval(f"document.querySelector('#text').value = {json.dumps(text)}")
    page.eval("document.querySelector('#chat').requestSubmit()")


async def browse(url: str, look: Callable[[Page], None]) -> None:
    def visit() -> None:
        with browsing(url) as page:
            look(page)

    await asyncio.to_thread(visit)


async def test_the_files_are_open_and_nothing_else_is() -> None:
    async with (
        serving(with_key(KEY)) as api,
        httpx.AsyncClient(base_url=api.url, trust_env=False) as http,
    ):
        for path, (_, media_type) in PATHS.items():
            answer = await http.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-type"] == media_type
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
            assert "unsafe" not in policy
        assert (await http.get("/mesh/v1/status")).status_code == 401
        assert (await http.get("/page.txt")).status_code == 401


def test_the_files_name_no_other_place_and_write_no_markup() -> None:
    for name, _ in PATHS.values():
        text = resources.files("mesh.api.page").joinpath(name).read_text("utf-8")
        assert not re.search(r"https?:|[\"'(]//|@import|<script>| style=| on[a-z]+=", text)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document.write|eval\(", text)


@in_a_browser
async def test_it_shows_the_mesh_and_chats() -> None:
    async with serving() as api:

        def look(page: Page) -> None:
            page.size(1200, 900)
            page.says("#headline", "working · echo")
            page.says("#nodes", "attic")
            page.says("#models", "echo")
            assert page.eval("document.querySelectorAll('#models .bar span').length") > 0
            page.until("document.querySelector('#model').value === 'echo'")
            page.eval("document.querySelector('#text').value = 'hello'")
            page.eval("document.querySelector('#chat').requestSubmit()")
            page.until("document.querySelectorAll('#turns .turn').length === 2")
            page.until("document.querySelector('#stop').hidden")
            assert page.text("#turns .turn:last-child span:nth-child(2)").strip()
            assert "attic" in page.text("#turns")
            heard = page.do("Accessibility.getFullAXTree")["nodes"]
            names = {(each["role"]["value"], each["name"]["value"]) for each in heard
                     if "name" in each}  # fmt: skip
            assert {("group", "Question"), ("group", "Answer"), ("log", "Conversation")} <= names
            assert any(role == "heading" and "working" in name for role, name in names)
            page.size(390, 844)
            assert page.eval("document.documentElement.scrollWidth") <= 390
            assert page.complaints == []
            assert {httpx.URL(url).netloc for url in page.asked} == {httpx.URL(api.url).netloc}

        await browse(f"{api.url}/", look)


@in_a_browser
async def test_the_chat_keeps_who_was_chosen_and_says_what_to_do_where_an_answer_breaks() -> None:
    long = "org/" + "very-long-" * 20
    async with serving() as api:
        echo, other = api.view.models()
        rows = [echo, {**other, "id": long, "runnable": True}, {**echo, "id": "breaks"}]
        api.view.models = lambda: list(rows)  # type: ignore[method-assign]

        def look(page: Page) -> None:
            chosen = "document.querySelector('#model').value"
            page.size(390, 844)
            page.until("document.querySelector('#model').options.length === 3")
            assert page.eval("document.documentElement.scrollWidth") <= 390
            page.eval(f"{chosen} = 'breaks'")
            rows[1:] = [{**each, "runnable": False} for each in rows[1:]]
            page.until("document.querySelector('#model').options.length === 2")
            assert page.eval(chosen) == "breaks"
            page.eval("document.querySelector('#text').value = 'hello'")
            page.eval("document.querySelector('#chat').requestSubmit()")
            page.says("#turns", "✖ No progress for 30 s. Try again.")

        await browse(f"{api.url}/", look)


@in_a_browser
async def test_who_clears_begins_anew_whatever_still_comes_of_the_answer() -> None:
    async with serving() as api:
        said, loop = api.generations, asyncio.get_running_loop()
        said.scripts["echo"] = "stuck"

        def look(page: Page) -> None:
            page.until("document.querySelector('#model')?.value === 'echo'")
            asks(page, "old")
            page.says("#turns", "one")
            page.click("#clear")
            loop.call_soon_threadsafe(said.proceed.set)
            page.until("document.querySelector('#stop').hidden")
            assert page.text("#turns") == ""
            said.scripts["echo"] = "narrow"
            asks(page, "new")
            page.says("#turns", "⚠ cut off: attic has no room for more of this text")
            page.says("#turns", "attic 0-5")
            page.until("document.querySelector('#stop').hidden")
            said.scripts["echo"] = "busy"
            asks(page, "more")
            page.says("#turns", "✖ 4 generations run already.")
            page.until("document.querySelector('#text').value === 'more'")

        await browse(f"{api.url}/", look)
    new = {"role": "user", "content": "new"}
    _, first, second = (each.messages for each in said.requests)
    assert first == (new,)
    assert second == (new, {"role": "assistant", "content": "one"}, {**new, "content": "more"})


@in_a_browser
async def test_a_long_answer_is_followed_until_somebody_scrolls_away() -> None:
    async with serving() as api:
        said, loop = api.generations, asyncio.get_running_loop()
        said.repeated = 500
        left = (
            "(e => e.scrollHeight - e.scrollTop - e.clientHeight)(document.querySelector('#turns'))"
        )

        def look(page: Page) -> None:
            page.until("document.querySelector('#model')?.value === 'echo'")
            asks(page, "this is long")
            page.says("#turns", "attic 0-5")
            page.until(f"{left} < 20")
            assert page.eval("document.querySelector('#turns').scrollTop") > 100
            said.scripts["echo"] = "stuck"
            asks(page, "more")
            page.says(".turn:last-child", "one")
            page.until(f"{left} < 20")
            page.eval("document.querySelector('#turns').scrollTop = 20")
            page.until(f"{left} > 100")
            page.eval("new Promise(requestAnimationFrame)")
            loop.call_soon_threadsafe(said.proceed.set)
            page.says(".turn:last-child", "one two")
            page.until("document.querySelector('#stop').hidden")
            assert page.eval("document.querySelector('#turns').scrollTop") == 20

        await browse(f"{api.url}/", look)


@in_a_browser
async def test_a_daemon_that_is_silent_is_missed() -> None:
    async with serving(replace(SETTINGS, ping_s=3600.0)) as api:
        api.generations.scripts["echo"] = "silent"

        def look(page: Page) -> None:
            page.do("Page.addScriptToEvaluateOnNewDocument", source=HASTY)
            page.do("Page.reload")
            page.until("document.querySelector('#model')?.value === 'echo'")
            asks(page, "hello")
            page.says("#headline", "does not answer: it is silent")
            page.says("#turns", "✖ the daemon does not answer: it is silent")
            page.says("#headline", "working")  # it asks again

        await browse(f"{api.url}/", look)


@in_a_browser
async def test_what_is_no_trouble_is_not_shown_as_one() -> None:
    async with serving() as api:
        attic, *_ = api.view.peers()
        echo, _ = api.view.models()
        stranger = {**attic, "id": "0" * 52, "name": "next door", "state": "other hearth",
                    "shards": []}  # fmt: skip
        doubted = {**attic, "id": "z" * 52, "name": "shed", "verdict": "suspect"}
        peers, models = [stranger, attic, doubted], [echo]
        api.view.peers = lambda: peers  # type: ignore[method-assign]
        api.view.models = lambda: list(models)  # type: ignore[method-assign]
        api.view.happen("peer_up", name="attic")
        api.view.happen("deployment_span", shard_id="m:0-3", phase="READY", reason=None)

        def look(page: Page) -> None:
            page.do("Emulation.setTimezoneOverride", timezoneId="Asia/Tokyo")
            page.do("Emulation.setLocaleOverride", locale="de")
            page.do("Page.reload")
            page.says("#headline", "working · echo · 3 nodes")
            rows = page.eval("[...document.querySelector('#nodes').children].map(e => e.innerText)")
            assert rows.pop() == "away: laptop (0 s), phone"
            letters, names, states = zip(*(row.split("\n")[:3] for row in rows), strict=True)
            assert letters == ("A", "B", "C", "D")
            assert names == ("here", "attic\x1b[2J", "shed", "next door")
            assert states == ("● here", "● up", "◌ suspect", "○ other hearth")
            page.says("#events", "09:00:00 peer_up attic")
            page.says("#events", "deployment_span m:0-3 READY")
            for reason, said in (
                ("loading", "◌ starting"), (RESTING, "○ at rest"), ("missing 0-5", "✖ not working"),
            ):  # fmt: skip
                models[:] = [{**echo, "runnable": False, "reason": reason, "missing": ["0-5"]}]
                page.says("#headline", f"{said} · echo: {reason}")
                page.says("#models", f"{said[0]} {reason}")
            layers = "document.querySelector('#models .bar')"
            assert page.eval(f"{layers}.offsetHeight") > 10
            peers.clear()
            models.clear()
            page.until("document.querySelector('#model').options.length === 0")
            asks(page, "hello")
            page.says("#chat-said", "no model can be asked now")
            assert page.eval("document.querySelector('#text').value") == "hello"

        await browse(f"{api.url}/", look)


@in_a_browser
async def test_names_are_text() -> None:
    async with serving() as api:
        hostile = "<img src=x onerror=document.title='got'>"
        rows = [{**row, "name": hostile} for row in api.view.peers()]
        api.view.peers = lambda: rows  # type: ignore[method-assign]

        def look(page: Page) -> None:
            page.says("#nodes", hostile)
            assert page.eval("document.title") == "hearthnet"
            assert page.eval("document.querySelectorAll('img').length") == 0

        await browse(f"{api.url}/", look)


@in_a_browser
async def test_what_comes_up_and_what_is_fetched_is_shown() -> None:
    house = whole()
    async with serving() as api:
        plain = api.view.status
        parts = {name: house[name] for name in ("deployments", "weights")}
        api.view.status = lambda: {**plain(), **parts}  # type: ignore[method-assign]

        def look(page: Page) -> None:
            page.says("#deployed", "llama")
            page.says("#deployed", "● ready")
            page.says("#deployed", "0 of 2 replicas")
            page.says("#deployed", "34 % (4.1 GB of 12.0 GB)")
            page.says("#deployed", "nobody serves layers 12-15")
            page.says("#downloads", "52.1 MB/s · 3 min left · from attic, the hub")
            page.says("#downloads", "10.0 MB/s · 2 min left · to attic")
            assert page.eval("document.querySelectorAll('#downloads progress').length") == 2
            # Without a key it only shows; `tests.page.test_deployed` has one.
            assert page.eval("document.querySelectorAll('#deployed button').length") == 0
            page.says("#deployed", "HOT")
            page.says("#deployed", "WARM")
            assert page.complaints == []
            page.size(390, 844)
            assert page.eval("document.documentElement.scrollWidth") <= 390

        await browse(f"{api.url}/", look)


@in_a_browser
async def test_it_asks_for_a_key_where_one_is_needed() -> None:
    async with serving(with_key(KEY)) as api:

        def look(page: Page) -> None:
            page.says("#headline", "wants a key")
            page.eval(f"document.querySelector('#key').value = '{KEY}'")
            page.eval("document.querySelector('#key-form').requestSubmit()")
            page.says("#headline", "working · echo")
            assert page.eval("document.querySelector('#key').value") == ""

        await browse(f"{api.url}/", look)


@in_a_browser
async def test_a_wrong_key_can_be_forgotten_where_none_is_needed() -> None:
    async with serving() as api:

        def look(page: Page) -> None:
            page.says("#headline", "working · echo")
            page.eval("document.querySelector('#key').value = 'hn_mistyped'")
            page.eval("document.querySelector('#key-form').requestSubmit()")
            page.says("#headline", "wants a key")
            page.until("document.querySelector('#key-open').checkVisibility()")
            page.click("#key-open")
            page.says("#headline", "working · echo")

        await browse(f"{api.url}/", look)


@in_a_browser
async def test_what_happened_is_that_of_the_daemon_that_runs() -> None:
    """Which counts from one again."""
    async with serving() as before:
        before.view.happen("peer_up")

        async def start_anew() -> None:
            await before.server.close()
            after = Served()
            after.view.happen("peer_down")
            after.app = create_app(after.generations, after.view, SETTINGS, None, after.keys)
            before.server = await serve_api(after.app, "127.0.0.1", before.server.port)

        def look(page: Page) -> None:
            page.says("#events", "peer_up")
            asyncio.run_coroutine_threadsafe(start_anew(), loop).result(30)
            page.says("#events", "peer_down")
            assert "peer_up" not in page.text("#events")

        loop = asyncio.get_running_loop()
        await browse(f"{before.url}/", look)


@in_a_browser
async def test_tabs_that_nobody_looks_at_leave_the_daemon_to_the_others() -> None:
    """Browsers have six connections to it."""
    async with serving() as api:

        def look(first: Page) -> None:
            first.says("#headline", "working")
            with ExitStack() as tabs:
                for _ in range(6):
                    tabs.enter_context(first.another(f"{api.url}/")).says("#headline", "working")
                asks(first, "hello")
                first.says("#turns", "attic 0-5")
                asyncio.run_coroutine_threadsafe(api.server.close(), loop).result(30)
            first.says("#headline", "does not answer")  # it looks again

        loop = asyncio.get_running_loop()
        await browse(f"{api.url}/", look)


@in_a_browser
async def test_a_daemon_that_goes_is_missed() -> None:
    async with serving() as api:

        def look(page: Page) -> None:
            page.says("#headline", "working")
            asyncio.run_coroutine_threadsafe(api.server.close(), loop).result(30)
            page.says("#headline", "does not answer")
            assert page.eval("document.body.classList.contains('stale')")

        loop = asyncio.get_running_loop()
        await browse(f"{api.url}/", look)
