"""The unmodified nnsight client against the API: what it hands in, hears and gets."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import nnsight
import pytest
import torch
from nnsight.intervention.backends.remote import RemoteError
from websockets.asyncio.client import connect

from mesh.api.services import LOADING
from mesh.errors import Forbidden
from mesh.interventions.jobs.queue.types import QueueSettings
from mesh.types import BringingUp
from tests.health.clock import ManualClock
from tests.ndif import client
from tests.ndif.client import in_thread
from tests.ndif.serving import MODEL, Node, OwnView, serving
from tests.waiting import until


@pytest.fixture
async def narrow(tmp_path: Path) -> AsyncIterator[Node]:
    """A node that runs one job at a time."""
    async with serving(tmp_path, settings=QueueSettings(concurrent=1)) as running:
        yield running


async def test_a_small_result_comes_with_the_answer(node: Node) -> None:
    result, via = await in_thread(client.ask, node.url, "hello")
    assert torch.equal(result["value"], torch.ones(2, 3))
    statuses = [each.status.value for each in via.seen]
    assert statuses == ["RECEIVED", "QUEUED", "DEPLOYING", "DISPATCHED", "RUNNING", "COMPLETED"]
    assert isinstance(via.seen[-1].data, bytes)
    assert via.meta is not None
    assert via.meta["hops"] == ["attic", "kitchen"]
    assert {"wall_s", "peak_memory_bytes", "result_bytes"} <= via.meta.keys()
    await until(lambda: not any((node.root / "jobs/results").iterdir()))


async def test_a_large_result_comes_from_a_url(node: Node) -> None:
    result, via = await in_thread(client.ask, node.url, "big 600000")
    assert torch.equal(result["value"], torch.arange(600_000, dtype=torch.float32))
    assert via.seen[-1].data.startswith(f"{node.url}/result/")


@pytest.mark.parametrize("words", ["plain", "big 300000"])
async def test_an_uncompressed_job_has_an_uncompressed_result(
    node: Node, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.configure(monkeypatch, COMPRESS=False)
    result, _ = await in_thread(client.ask, node.url, words)
    assert result["words"] == words
    assert node.runner.specs[0].compress is False


async def test_printed_lines_arrive_in_order(node: Node) -> None:
    _, via = await in_thread(client.ask, node.url, "print 50")
    lines = [each.description for each in via.seen if each.status.value == "LOG"]
    assert lines == [f"line {number}" for number in range(50)]


async def test_a_failed_job_raises_with_its_own_words(node: Node) -> None:
    with pytest.raises(RemoteError, match="ZeroDivisionError: no") as caught:
        await in_thread(client.ask, node.url, "fail")
    assert "x = 1 / 0" in str(caught.value)
    # The client is told first, then the files are removed, then the event comes.
    await until(lambda: node.events[-1][0] == "job_ended")
    fields = node.events[-1][1]
    assert fields["status"] == "ERROR"
    took = {"wall_s": 0.25, "cpu_s": 0.125, "peak_memory_bytes": 4096, "hops": ["attic", "kitchen"]}
    assert took.items() <= fields.items()
    async with httpx.AsyncClient(base_url=node.url, trust_env=False) as http:
        (row,) = (await http.get("/mesh/v1/jobs")).json()["ended"]
    assert row["description"] == "ZeroDivisionError: no"  # tables have room for one line


async def test_a_bug_of_ours_tells_no_details(node: Node) -> None:
    with pytest.raises(RemoteError, match="nobody foresaw") as caught:
        await in_thread(client.ask, node.url, "break")
    assert "a bug of ours" not in str(caught.value)
    result, _ = await in_thread(client.ask, node.url, "after that")
    assert result["words"] == "after that"


@pytest.mark.parametrize("words", ["later", "big 600000"])
async def test_a_job_nobody_waits_for_is_fetched_later(node: Node, words: str) -> None:
    via = await in_thread(client.submit, node.url, words)
    assert via.status is not None
    assert via.status.value == "RECEIVED"
    result = await in_thread(client.wait_for, via)
    assert result["words"] == words
    again = client.backend(node.url, blocking=False, job_id=via.job_id)
    assert (await in_thread(client.wait_for, again))["words"] == words


async def test_a_failed_job_raises_when_it_is_polled(node: Node) -> None:
    via = await in_thread(client.submit, node.url, "fail")
    with pytest.raises(RemoteError, match="ZeroDivisionError"):
        await in_thread(client.wait_for, via)


async def test_the_asyncio_backend(node: Node) -> None:
    result = await in_thread(client.ask_async, node.url, "awaited")
    assert result["words"] == "awaited"


async def test_a_host_with_a_slash_at_its_end(node: Node) -> None:
    result, _ = await in_thread(client.ask, node.url + "/", "slash")
    assert result["words"] == "slash"


async def test_the_helpers(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    client.configure(monkeypatch, HOST=node.url)
    status = await in_thread(nnsight.status)
    assert status.status.value == "UP"
    assert status.deployments["builtin"]["state"] == "RUNNING"
    assert (await in_thread(nnsight.whoami))["email"] is None
    comparison = await in_thread(nnsight.compare)
    assert comparison.python_matches
    assert not comparison.critical_mismatches
    assert comparison.packages["torch"]["match"]
    async with httpx.AsyncClient(base_url=node.url, trust_env=False) as http:
        assert (await http.get("/ping")).json() == "pong"
        assert (await http.get("/connected")).json() is True


class HalfView(OwnView):
    """A node that does not run its model yet, for the reason in `lacks`."""

    def __init__(self) -> None:
        super().__init__()
        self.lacks: dict[str, Any] = {}

    def models(self) -> list[dict[str, Any]]:
        return [{**row, **self.lacks} for row in super().models()]


async def test_a_model_that_cannot_run_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = HalfView()
    async with serving(tmp_path, view=half) as node:
        client.configure(monkeypatch, HOST=node.url)

        async def told() -> tuple[str, str]:
            async with httpx.AsyncClient(base_url=node.url, trust_env=False) as http:
                row = (await http.get("/status")).json()["deployments"]["builtin"]
            seen = (await in_thread(nnsight.status)).deployments["builtin"]
            assert seen["state"] == row["application_state"]
            assert row["deployment_level"] == half.lacks.get("level", "HOT")
            return row["application_state"], row.get("reason", "")

        assert await told() == ("RUNNING", "")
        half.lacks = {"runnable": False, "reason": LOADING}
        assert await told() == ("DEPLOYING", "The model is loading.")
        half.lacks = {"runnable": False, "missing": ["2-3", "5-5"], "level": "WARM"}
        assert await told() == ("NOT_STARTED", "No node serves layers 2-3, 5-5.")
        half.lacks = {"runnable": False, "reason": "failed: The checkpoint is cut off."}
        assert await told() == ("UNHEALTHY", "failed: The checkpoint is cut off.")
        node.runner.obstacle = "this node has no files of it"
        assert await told() == ("UNHEALTHY", "this node has no files of it")


async def test_who_waits_hears_his_place(narrow: Node) -> None:
    first = await in_thread(client.submit, narrow.url, "wait 0")
    await narrow.runner.began.get()
    others = [client.backend(narrow.url) for _ in range(2)]
    asking = [in_thread(client.trace, via, f"next {n}") for n, via in enumerate(others)]

    def heard() -> set[int]:
        said = [each for via in others for each in via.seen if each.status.value == "QUEUED"]
        return {each.meta["position"] for each in said}

    await until(lambda: heard() == {1, 2})
    narrow.runner.proceed.set()
    await asyncio.gather(*asking)
    assert heard() == {1, 2}
    await in_thread(client.wait_for, first)
    assert narrow.runner.most_running == 1


async def test_killing_a_running_job_tells_its_client(node: Node) -> None:
    asking = in_thread(client.ask, node.url, "wait")
    job_id = await node.runner.began.get()
    async with httpx.AsyncClient(base_url=node.url, trust_env=False) as http:
        answer = await http.post(f"/mesh/v1/jobs/{job_id}/kill")
    assert answer.json() == {"id": job_id, "status": "ERROR"}
    with pytest.raises(RemoteError, match=r"ended by (uid:\d+|anonymous)\."):
        await asking
    assert node.runner.ended_by_cancel == [job_id]
    assert not any((node.root / "jobs/payloads").iterdir())


async def test_killing_a_waiting_job_tells_its_client(narrow: Node) -> None:
    await in_thread(client.submit, narrow.url, "wait 1")
    await narrow.runner.began.get()
    via = await in_thread(client.submit, narrow.url, "second")
    async with httpx.AsyncClient(base_url=narrow.url, trust_env=False) as http:
        await http.post(f"/mesh/v1/jobs/{via.job_id}/kill")
        assert (await http.post(f"/mesh/v1/jobs/{via.job_id}/kill")).status_code == 404
    with pytest.raises(RemoteError, match=r"ended by (uid:\d+|anonymous)\."):
        await in_thread(via)
    assert narrow.runner.words == ["wait 1"]


async def test_a_client_that_goes_away_takes_its_jobs_along(node: Node) -> None:
    async with httpx.AsyncClient(base_url=node.url, trust_env=False) as http:
        async with connect(node.url.replace("http", "ws") + "/subscribe", proxy=None) as socket:
            session = await socket.recv()
            await post(http, session_id=json.loads(session)["session_id"])
            job_id = await node.runner.began.get()
        await until(lambda: node.runner.ended_by_cancel == [job_id])
        await until(lambda: node.events[-1][0] == "job_ended")
        assert (await http.get(f"/response/{job_id}")).json()["status"] == "ERROR"


async def test_a_job_over_its_time_limit_is_ended(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=QueueSettings(time_limit_s=0.2)) as node:
        with pytest.raises(RemoteError, match="its time limit"):
            await in_thread(client.ask, node.url, "wait")
        assert len(node.runner.ended_by_cancel) == 1


async def test_a_node_that_stops_tells_everybody_who_waits(narrow: Node) -> None:
    asking = [in_thread(client.ask, narrow.url, f"wait {n}") for n in range(2)]
    await until(lambda: narrow.queue.counts() == (1, 1))
    await narrow.queue.stop(0)
    for task in asking:
        with pytest.raises(RemoteError, match="The node is stopping"):
            await task


async def test_a_model_that_nobody_serves_is_waited_for(node: Node) -> None:
    node.runner.obstacle = "no node serves layers 3-5"
    via = client.backend(node.url)
    asking = in_thread(client.trace, via, "patient")
    await until(lambda: any(each.status.value == "PROVISIONING" for each in via.seen))
    node.runner.obstacle = None
    assert (await asking)["words"] == "patient"
    waited = [each for each in via.seen if each.status.value == "PROVISIONING"]
    assert waited[0].description == "no node serves layers 3-5."


async def test_a_model_that_nobody_ever_serves_is_an_error(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=QueueSettings(patience_s=0.2)) as node:
        node.runner.obstacle = "no node serves layers 3-5"
        with pytest.raises(RemoteError, match="no node serves layers 3-5"):
            await in_thread(client.ask, node.url, "in vain")
        assert not node.runner.specs


def coming_up() -> list[BringingUp]:
    """How a model comes up, step by step."""
    return [
        BringingUp(MODEL, "QUEUED"),
        *(BringingUp(MODEL, "PROVISIONING", percent) for percent in (10, 60)),
        *(BringingUp(MODEL, "DEPLOYING", percent) for percent in (30, 90)),
    ]


def heard_of_it(via: client.Recording) -> list[tuple[str, int | None]]:
    """How far the client was told that the model is: its phases and their percent."""
    return [
        (each.status.value, (each.meta or {}).get("percent"))
        for each in via.seen
        if "not up yet" in each.description
    ]


async def test_who_waits_for_a_model_that_is_brought_up_hears_how_far_it_is(
    tmp_path: Path,
) -> None:
    # All of it takes longer than the patience, no step does.
    clock, settings = ManualClock(), QueueSettings(patience_s=100.0)
    async with serving(tmp_path, settings=settings, clock=clock) as node:
        node.runner.coming = coming_up()[0]
        via = client.backend(node.url)
        asking = in_thread(client.trace, via, "at last")
        told: list[tuple[str, int | None]] = []
        for step in coming_up():
            node.runner.coming = step
            told.append((step.phase, step.percent))
            # What is said anew before the client has read it takes the place of what was said.
            await until(lambda: heard_of_it(via) == told)
            clock.time += 60.0
        node.runner.coming = None
        assert (await asking)["words"] == "at last"
        assert [each.status.value for each in via.seen[-3:]] == [
            "DISPATCHED",
            "RUNNING",
            "COMPLETED",
        ]


async def test_a_model_that_comes_no_nearer_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    clock, settings = ManualClock(), QueueSettings(patience_s=100.0)
    async with serving(tmp_path, settings=settings, clock=clock) as node:
        node.runner.coming = coming_up()[-1]
        asking = in_thread(client.ask, node.url, "in vain")
        await until(lambda: node.queue.unended)
        again = itertools.cycle(coming_up())  # it fails, and is fetched and loaded anew
        while not asking.done():
            node.runner.coming = next(again)
            clock.time += 10.0
            await asyncio.sleep(0.1)
        with pytest.raises(RemoteError, match=r"After 1\d\d s of waiting: builtin is not up yet"):
            await asking
        assert not node.runner.specs


async def test_who_may_not_wake_a_model_that_rests_again_is_told(narrow: Node) -> None:
    await in_thread(client.submit, narrow.url, "wait")
    await narrow.runner.began.get()
    asking = in_thread(client.ask, narrow.url, "too late")
    await until(lambda: narrow.queue.counts() == (1, 1))
    narrow.runner.coming = Forbidden("builtin is COLD.", fix="Use a trusted key.")
    narrow.runner.proceed.set()
    with pytest.raises(RemoteError, match=r"builtin is COLD. Use a trusted key."):
        await asking
    assert not any(narrow.runner.woken)
    narrow.runner.coming = None
    assert (await in_thread(client.ask, narrow.url, "awake"))[0]["words"] == "awake"


async def test_a_job_that_could_not_be_begun_is_begun_later(node: Node) -> None:
    node.runner.refusals = 3
    result, via = await in_thread(client.ask, node.url, "again")
    assert result["words"] == "again"
    assert node.runner.words == ["again"]
    assert via.seen[-1].status.value == "COMPLETED"


async def test_a_job_whose_hop_nobody_takes_over_waits_for_one_and_is_begun_once_more(
    node: Node,
) -> None:
    node.runner.losses = 1
    result, via = await in_thread(client.ask, node.url, "lose a hop")
    assert result["words"] == "lose a hop"
    assert [spec.lost_a_hop for spec in node.runner.specs] == [False, True]
    assert [each.status.value for each in via.seen[-5:]] == [
        "RUNNING",
        "PROVISIONING",
        "DISPATCHED",
        "RUNNING",
        "COMPLETED",
    ]
    assert via.seen[-4].description == "no node serves layers 3-5."


async def test_jobs_from_many_clients_are_not_mixed_up(node: Node) -> None:
    await many(node, clients=8, each=5)


@pytest.mark.chaos
async def test_two_hundred_jobs_at_once(node: Node) -> None:
    await many(node, clients=8, each=25)


async def many(node: Node, clients: int, each: int) -> None:
    """Every client sends its jobs one after the other, half of them without waiting."""

    def work(number: int) -> None:
        later = {}
        for turn in range(each):
            words = f"echo {number} {turn}"
            if turn % 2:
                later[words] = client.submit(node.url, words)
            else:
                assert client.ask(node.url, words)[0]["words"] == words
        for words, via in later.items():
            assert client.wait_for(via)["words"] == words

    # Threads that parse at once break CPython's 3.11 where garbage is collected meanwhile
    # (https://github.com/python/cpython/issues/106905); clients have a process each.
    gc.disable()
    try:
        await asyncio.gather(*(in_thread(work, number) for number in range(clients)))
    finally:
        gc.enable()
    assert len(set(node.runner.words)) == clients * each
    assert node.queue.counts() == (0, 0)
    assert not node.queue.unended
    await until(lambda: not any((node.root / "jobs/payloads").iterdir()))


async def post(http: httpx.AsyncClient, **fields: object) -> httpx.Response:
    """A request as the client sends it, with a payload of ours."""
    data = {"model_key": client.KEY, "session_id": "", "compress": False, "env": {}, **fields}
    return await http.post(
        "/request",
        data={"data": json.dumps(data)},
        files={"blob": ("request", b"script = 'wait'", "application/octet-stream")},
        headers={"nnsight-version": "0.8.1"},
    )
