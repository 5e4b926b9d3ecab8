"""What the page offers to whoever has an administrator's key, and to nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from tests.page.browser import CHROMIUM, Page, browsing
from tests.tui.conftest import OWNER, Daemon
from tests.tui.house import ATTIC, GAP, SOFA, whole

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium (Debian: chromium)")
VERBS = "[...document.querySelectorAll('#deployed button')].map(each => each.ariaLabel).join()"
FOCUS = "(document.activeElement.ariaLabel || document.activeElement.id)"
LLAMA, QWEN = "0" * 15 + "1", "0" * 15 + "2"


@pytest.fixture
async def daemon() -> AsyncIterator[Daemon]:
    served = Daemon()
    await served.start()
    yield served
    await served.stop()


async def visit(daemon: Daemon, look: Callable[[Page], None], key: str = OWNER) -> None:
    """Look at the page as whoever has this key; in the end nothing was wrong, and it kept none."""

    def browse() -> None:
        with opened(daemon, key) as page:
            look(page)
            assert page.complaints == []
            assert not [url for url in page.asked if OWNER in url]
            assert page.eval("localStorage.length + sessionStorage.length") == 0
            assert page.eval("document.cookie") == ""

    await asyncio.to_thread(browse)


@contextmanager
def opened(daemon: Daemon, key: str) -> Iterator[Page]:
    with browsing(f"{daemon.url}/") as page:
        page.says("#deployed", "llama")
        if key:
            page.click("#key-open")
            page.until(f"{FOCUS} === 'key'")
            page.type(key)
            page.enter()
        if key == OWNER:
            page.until(f"{VERBS} === 'Scale llama,Evict llama,Scale qwen,Evict qwen'")
        yield page


def change(daemon: Daemon, loop: asyncio.AbstractEventLoop, **parts: Any) -> None:
    """Another picture of the house, from a browser's thread."""
    loop.call_soon_threadsafe(partial(daemon.house.change, **parts))


def is_read_only(page: Page) -> bool:
    verbs: str = page.eval(VERBS)
    is_offered = page.eval("document.querySelector('#wish-open').checkVisibility()")
    return not (verbs or is_offered or page.eval("document.querySelector('#wish').open"))


def wished(page: Page, model: str) -> None:
    """Ask for a model; Enter has it estimated."""
    page.click("#wish-open")
    page.until(f"{FOCUS} === 'wish-model'")
    page.type(model)
    page.enter()


@pytest.mark.parametrize("key", ["", "may-not"])
async def test_whoever_may_not_change_anything_is_offered_nothing(daemon: Daemon, key: str) -> None:
    loop = asyncio.get_running_loop()

    def look(page: Page) -> None:
        if key:
            page.says("#key-said", "This key has no scope `admin`")
            page.says("#key-open", "Forget the key")
        change(daemon, loop, models=[])
        page.until("document.querySelector('#models').innerText === ''")
        assert is_read_only(page)
        page.says("#key-open", "Forget the key" if key else "Use a key")

    await visit(daemon, look, key)


async def test_a_key_can_be_given_and_forgotten_where_none_is_needed(daemon: Daemon) -> None:
    def look(page: Page) -> None:
        assert page.eval(FOCUS) == "key-open"
        page.click("#wish-open")
        page.click("#key-open")
        page.until(f"{VERBS} === ''")
        assert is_read_only(page)
        page.says("#headline", "working")
        page.click("#key-open")
        page.says("#key-said", "kept in this tab only")
        assert page.eval("document.querySelector('#key-open').ariaExpanded") == "true"
        page.click("#key-open")
        page.until("document.querySelector('#key-form').hidden")

    await visit(daemon, look)


async def test_a_model_is_deployed_after_its_estimate_was_seen(daemon: Daemon) -> None:
    def look(page: Page) -> None:
        wished(page, "mist")
        page.says("#wish-said", "● replica 1: about 18.5 tok/s, first token 640 ms")
        page.says("#wish-said", "attic 8-15: needs 3.8 GiB of 5.6 GiB free, fetches 3.9 GB")
        page.says("#wish-said", "would help: a cable to attic")
        page.says("#wish-said", "○ study: 1.4 GiB free, not used: faster without it")
        page.until(f"{FOCUS} === 'wish-send'")
        for field, said in (("replicas", "2"), ("context", "8192"), ("nodes", "sofa, attic")):
            page.eval(f"document.querySelector('#wish-{field}').focus()")
            page.type(said)
        page.eval("document.querySelector('#wish-quant').value = 'int8'")
        # Another wish: that estimate is not its.
        assert page.eval("document.querySelector('#wish-send').disabled")
        assert "18.5" not in page.text("#wish-said")
        labels = "[...document.querySelectorAll('#wish input, #wish select')].map(e => e.labels[0])"
        assert page.eval(f"{labels}.every(label => label.innerText.trim())")
        page.size(390, 844)
        assert page.eval("document.documentElement.scrollWidth") <= 390
        page.enter()
        page.says("#wish-said", "● replica 2: about")
        page.until(f"{FOCUS} === 'wish-send'")
        assert daemon.deployments.wished == []
        page.enter()
        page.says("#deployed-said", "● mist: 2 replica(s) are wished for.")
        assert not page.eval("document.querySelector('#wish').open")

    await visit(daemon, look)
    order = {"model": "mist", "replicas": 2, "quant": "int8", "context": 8192,
             "nodes": ["sofa", "attic"]}  # fmt: skip
    assert daemon.deployments.orders == [order]
    assert daemon.plans.orders == [{"model": "mist"}, order]


async def test_what_is_refused_is_said_with_its_fix_and_not_done_by_a_second_enter(
    daemon: Daemon,
) -> None:
    def look(page: Page) -> None:
        wished(page, "huge")
        page.says("#wish-said", "✖ it does not fit: 96.0 GiB are missing.\nAdd a machine.")
        page.until(f"{FOCUS} === 'wish-leave'")
        page.enter()
        page.until("!document.querySelector('#wish').open")
        wished(page, "nowhere")
        page.until(f"{FOCUS} === 'wish-send'")
        page.enter()
        page.says("#deployed-said", "✖ no machine may hold nowhere now. Start a trusted node.")
        wished(page, "secret")
        page.says("#wish-said", "✖ no estimate: Nobody has 'secret'. Name another.")
        page.until(f"{FOCUS} === 'wish-leave'")
        page.complaints.clear()  # the browser tells of every answer that is an error

    await visit(daemon, look)
    assert daemon.deployments.wished == []


async def test_an_estimate_that_comes_late_is_not_taken_for_another_wishs(daemon: Daemon) -> None:
    loop = asyncio.get_running_loop()

    def look(page: Page) -> None:
        wished(page, "slow")
        asyncio.run_coroutine_threadsafe(daemon.plans.asked.wait(), loop).result(30)
        page.type("mist")
        loop.call_soon_threadsafe(daemon.plans.proceed.set)
        change(daemon, loop, models=[])
        page.until("document.querySelector('#models').innerText === ''")
        assert page.eval("document.querySelector('#wish-send').disabled")
        assert "18.5" not in page.text("#wish-said")
        page.enter()
        page.says("#wish-said", "about 18.5 tok/s")

    await visit(daemon, look)


async def test_a_deployment_is_scaled_with_the_estimate_of_its_own_settings(daemon: Daemon) -> None:
    llama, qwen = whole()["deployments"]
    wish: dict[str, Any] = {
        "quant": "int8", "context": 8192, "dedicated": True, "nodes": [SOFA, ATTIC],
        "layers": [f"{SOFA}=0-7"],
    }  # fmt: skip
    daemon.house.change(deployments=[{**llama, **wish}, qwen])
    daemon.deployments.gaps = [GAP]

    def look(page: Page) -> None:
        page.click("[aria-label='Scale llama']")
        page.until(f"{FOCUS} === 'wish-replicas'")
        assert page.eval("document.querySelector('#wish-replicas').value") == "1"
        assert page.eval("document.querySelector('#wish-model').disabled")
        page.type("3")
        page.enter()
        page.says("#wish-said", "● replica 3: about")
        page.until(f"{FOCUS} === 'wish-send'")
        page.enter()
        page.says(
            "#deployed-said",
            "● llama: 3 replica(s) are wished for. It is away for a moment:"
            " attic drops layers 8-15 before it loads layers 8-11.",
        )
        page.click("[aria-label='Scale qwen']")
        page.until(f"{FOCUS} === 'wish-replicas'")
        page.type("0")
        page.enter()
        page.says("#wish-said", "No replica stays loaded; what is on disk stays.")
        page.until(f"{FOCUS} === 'wish-send'")
        page.enter()
        page.says("#deployed-said", "● qwen: 0 replica(s) are wished for.")
        wished(page, "llama")  # what is deployed already keeps its settings
        page.says("#wish-said", "● replica 1: about")

    await visit(daemon, look)
    assert daemon.plans.orders == [{"model": "llama", "replicas": 3, **wish},
                                   {"model": "llama", **wish}]  # fmt: skip
    assert daemon.deployments.wished == [("scale", LLAMA, 3), ("scale", QWEN, 0)]


async def test_evicting_says_what_ends_and_asks_first(daemon: Daemon) -> None:
    def look(page: Page) -> None:
        for answer in ("false", "true"):
            assert daemon.deployments.wished == []
            page.eval(
                f"window.confirm = (words) => {{ window.question = words; return {answer}; }}"
            )
            page.click("[aria-label='Evict llama']")
        page.says("#deployed-said", "● llama is evicted.")
        assert page.eval("window.question") == (
            "Evict llama? Unloaded: 0-7 on sofa, 8-15 on attic, 16-23 on kitchen. Answers running"
            " now, which must go another way or end: 1. What is on disk stays."
        )

    await visit(daemon, look)
    assert daemon.deployments.wished == [("evict", LLAMA)]


async def test_a_pull_is_stopped_after_a_question(daemon: Daemon) -> None:
    stop = "[aria-label='Stop fetching qwen']"

    def look(page: Page) -> None:
        for answer in ("false", "true"):
            assert daemon.pulls.running
            page.eval(
                f"window.confirm = (words) => {{ window.question = words; return {answer}; }}"
            )
            page.click(stop)
            page.until("window.question === 'Stop fetching qwen? What has come is kept.'")
        page.says("#downloads-said", "● qwen is not fetched any more.")
        assert not daemon.pulls.running
        page.click(stop)  # the scripted house goes on fetching it
        page.says("#downloads-said", "qwen is fetched for its deployment: evicting that ends it")
        page.click("#key-open")
        page.until("!document.querySelector('#downloads button').checkVisibility()")

    await visit(daemon, look)


async def test_a_button_keeps_the_focus_while_what_is_beside_it_changes(daemon: Daemon) -> None:
    llama, qwen = whole()["deployments"]
    loop = asyncio.get_running_loop()

    def look(page: Page) -> None:
        page.eval("document.querySelector(\"[aria-label='Scale qwen']\").focus()")
        change(daemon, loop, deployments=[llama, {**qwen, "replicas_ready": 1}])
        page.says("#deployed", "1 of 2 replicas")
        assert page.eval(FOCUS) == "Scale qwen"
        change(daemon, loop, deployments=[qwen])
        page.until(f"{VERBS} === 'Scale qwen,Evict qwen'")
        assert page.eval(FOCUS) == "Scale qwen"
        change(daemon, loop, deployments=[])
        page.until("document.querySelector('#undeployed').checkVisibility()")

    await visit(daemon, look)


async def test_a_job_is_ended_and_said_why_it_is_not(daemon: Daemon) -> None:
    first, second = "1f" * 16, "2e" * 16

    def look(page: Page) -> None:
        page.eval("window.confirm = () => true; window.alert = (words) => { window.told = words; }")
        page.until("document.querySelectorAll('#jobs button').length === 2")
        page.eval("document.querySelector(\"[aria-label='End the job 1f1f1f1f']\").focus()")
        daemon.jobs.killed.append(second)
        page.until("document.querySelectorAll('#jobs button').length === 1")
        assert page.eval(FOCUS) == "End the job 1f1f1f1f"
        page.enter()
        page.until("document.querySelectorAll('#jobs button').length === 0")
        assert daemon.jobs.killed == [second, first]
        assert not page.eval("window.told")

    def too_late(page: Page) -> None:
        page.eval("window.confirm = () => true; window.alert = (words) => { window.told = words; }")
        page.until("document.querySelectorAll('#jobs button').length === 1")
        asyncio.run_coroutine_threadsafe(daemon.stop(), loop).result(30)
        page.click("#jobs button")
        told = "'The job 1f1f1f1f was not ended: the daemon does not answer; `hearthnet status`'"
        page.until(f"(window.told || '').startsWith({told})")

    await visit(daemon, look)
    daemon.jobs.killed.remove(first)
    loop = asyncio.get_running_loop()

    def browse() -> None:
        with opened(daemon, OWNER) as page:
            too_late(page)

    await asyncio.to_thread(browse)
