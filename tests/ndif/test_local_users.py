"""Users of one machine who need no key: their jobs, sessions and results are each one's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

from mesh.api import neighbours
from mesh.types import Principal
from tests.ndif import client
from tests.ndif.client import in_thread
from tests.ndif.serving import Node
from tests.ndif.test_protocol import VERSION, parts
from tests.other_users import ANNA, BEN, NEEDS_ROOT, as_user
from tests.waiting import until

Users = tuple["User", "User"]


class User:
    """Asks over connections of one user's."""

    def __init__(self, node: Node, thread: Executor) -> None:
        self._node = node
        self._thread = thread

    async def ask(self, method: str, path: str, **more: Any) -> Any:
        """(status, JSON), over a connection of its own."""

        def ask() -> tuple[int, Any]:
            with httpx.Client(
                base_url=self._node.url,
                trust_env=False,
                verify=False,  # noqa: S501 - reads no certificates, which others than root may not
                headers=VERSION,
            ) as http:
                answer = http.request(method, path, **more)
                return answer.status_code, answer.json()

        return await asyncio.get_running_loop().run_in_executor(self._thread, ask)


@pytest.fixture
async def users(node: Node) -> AsyncIterator[Users]:
    with ExitStack() as stack:
        anna, ben = (User(node, stack.enter_context(as_user(uid))) for uid in (ANNA, BEN))
        yield anna, ben


@NEEDS_ROOT
async def test_another_user_s_jobs_are_not_there(node: Node, users: Users) -> None:
    anna, ben = users
    _, job = await anna.ask("POST", "/request", **parts(b"script = 'wait'"))
    running = await node.runner.began.get()
    kill = f"/mesh/v1/jobs/{job['id']}/kill"
    status, body = await ben.ask("GET", f"/response/{job['id']}")
    assert (status, body["error"]["code"]) == (404, "not_found")
    assert (await ben.ask("POST", kill))[0] == 404
    assert running not in json.dumps((await ben.ask("GET", "/mesh/v1/jobs"))[1])
    assert (await anna.ask("GET", f"/response/{job['id']}"))[1]["status"] == "RUNNING"
    _, listed = await anna.ask("GET", "/mesh/v1/jobs")
    assert [(row["id"], row["owner"]) for row in listed["jobs"]] == [(job["id"], f"uid:{ANNA}")]
    node.runner.proceed.set()
    await until(lambda: not node.queue.unended)
    assert running not in json.dumps((await ben.ask("GET", "/mesh/v1/jobs"))[1])
    (row,) = (await anna.ask("GET", "/mesh/v1/jobs"))[1]["ended"]
    assert row["id"] == job["id"]


@NEEDS_ROOT
async def test_another_user_does_not_use_a_session_nor_take_its_place(
    node: Node, users: Users
) -> None:
    _, ben = users
    async with connect(node.url.replace("http", "ws") + "/subscribe", proxy=None) as socket:
        session = json.loads(await socket.recv())["session_id"]
        status, body = await ben.ask("POST", "/request", **parts(session_id=session))
        assert (status, body["error"]["param"]) == (400, "session_id")


@NEEDS_ROOT
async def test_users_take_turns_and_have_half_of_the_places_each(node: Node, users: Users) -> None:
    for user in users:
        await user.ask("POST", "/request", **parts(b"script = 'wait'"))
        await node.runner.began.get()
    owners = {ticket.job.asked.owner for ticket in node.queue.unended}
    assert owners == {Principal.user(ANNA), Principal.user(BEN)}


@pytest.fixture
def _nobody_says_whose_a_socket_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a system that has no `sock_diag`."""
    monkeypatch.setattr(neighbours, "_NETLINK_SOCK_DIAG", 31)


@pytest.mark.usefixtures("_nobody_says_whose_a_socket_is")
class TestOnOtherSystems:
    async def test_an_unmodified_client_works(self, node: Node) -> None:
        result, _ = await in_thread(client.ask, node.url, "waited for")
        assert result["words"] == "waited for"
        via = await in_thread(client.submit, node.url, "fetched later")
        assert (await in_thread(client.wait_for, via))["words"] == "fetched later"

    async def test_a_job_is_found_by_its_id_and_listed_to_nobody(self, node: Node) -> None:
        async with httpx.AsyncClient(base_url=node.url, trust_env=False) as http:
            asked = await http.post("/request", headers=VERSION, **parts())  # type: ignore[arg-type]
            job_id = asked.json()["id"]
            assert len(bytes.fromhex(job_id)) >= 16
        async with httpx.AsyncClient(base_url=node.url, trust_env=False) as http:
            listed = (await http.get("/mesh/v1/jobs")).json()
            assert (listed["jobs"], listed["ended"]) == ([], [])
            assert (await http.get(f"/response/{job_id}")).json()["id"] == job_id

    async def test_what_happens_is_told_without_the_ids_that_open_it(self, node: Node) -> None:
        await in_thread(client.ask, node.url, "told")
        (job_id,) = [spec.job_id for spec in node.runner.specs]
        await until(lambda: node.events[-1][0] == "job_ended")
        kinds = [kind for kind, _ in node.events]
        assert kinds == ["job_started", "job_ended"]
        assert job_id not in json.dumps(node.events)
        assert len({fields["job"] for _, fields in node.events}) == 1
