"""What becomes of results: who gets them, until when, and what is said once they are gone."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from nnsight.intervention.backends.remote import RemoteError
from websockets.asyncio.client import connect

from mesh.clock import SystemClock
from mesh.interventions.jobs.queue.keeping import KEEP_RESULTS_S
from tests.ndif import client
from tests.ndif.client import in_thread
from tests.ndif.serving import serving, with_key
from tests.ndif.test_protocol import OWNER, VERSION, parts
from tests.waiting import until


class LaterClock(SystemClock):
    """The wall clock, moved."""

    later = timedelta()

    def now(self) -> datetime:
        return datetime.now(UTC) + self.later


async def test_result_urls_cannot_be_made_up_and_end(tmp_path: Path) -> None:
    clock = LaterClock()
    async with serving(tmp_path, api=with_key(OWNER), clock=clock) as node:
        via = await in_thread(client.submit_with_key, node.url, "big 10", OWNER)
        await in_thread(client.wait_for, via)
        async with httpx.AsyncClient(base_url=node.url, trust_env=False) as http:
            headers = {"ndif-api-key": OWNER}
            url = (await http.get(f"/response/{via.job_id}", headers=headers)).json()["data"]
            assert (await http.get(url)).status_code == 200  # no key: the URL is the key
            path, _, query = url.partition("?")
            for wrong in (
                path,
                f"{path}?{query}0",
                f"{path}?{query[:-1]}",
                f"{path[:-1]}{'1' if path[-1] == '0' else '0'}?{query}",
                url.replace("expires=1", "expires=9"),
                f"{path}?expires=²&signature=x",
                f"{node.url}/result/urls.key?{query}",
                f"{node.url}/result/..%2Furls.key?{query}",
            ):
                assert (await http.get(wrong)).status_code in (403, 404), wrong
            clock.later = timedelta(seconds=KEEP_RESULTS_S + 5)
            assert (await http.get(url)).status_code == 404


async def test_results_are_kept_two_hours_and_no_longer(tmp_path: Path) -> None:
    clock = LaterClock()
    async with serving(tmp_path, clock=clock) as node:
        via = await in_thread(client.submit, node.url, "big 10")
        await in_thread(client.wait_for, via)
        clock.later = timedelta(seconds=KEEP_RESULTS_S - 60)
        await node.queue.sweep()
        await in_thread(client.wait_for, via)
        assert node.queue.spool.used_bytes > 0
        clock.later = timedelta(seconds=KEEP_RESULTS_S + 60)
        await node.queue.sweep()
        assert not list((tmp_path / "jobs/results").iterdir())
        assert node.queue.spool.used_bytes == 0
        with pytest.raises(RemoteError, match="deleted two hours after"):
            await in_thread(via)
        clock.later = timedelta(days=2)
        await node.queue.sweep()
        assert await in_thread(via) is None


async def test_every_job_has_a_last_frame_also_when_its_result_is_gone_by_then(
    tmp_path: Path,
) -> None:
    """A client that reads too slowly is at the results once they have been deleted."""
    clock = LaterClock()
    async with (
        serving(tmp_path, clock=clock) as node,
        httpx.AsyncClient(base_url=node.url, trust_env=False, timeout=20) as http,
        connect(
            node.url.replace("http", "ws") + "/subscribe", proxy=None, max_queue=1, max_size=None
        ) as socket,
        asyncio.timeout(60),
    ):
        session = json.loads(await socket.recv())["session_id"]
        blob = parts(b"script = 'big 250000'", session_id=session)
        jobs = set[str]()
        for _ in range(24):
            answer = await http.post("/request", headers=VERSION, **blob)  # type: ignore[arg-type]
            jobs.add(answer.json()["id"])
        await until(lambda: node.queue.counts() == (0, 0))
        clock.later = timedelta(seconds=KEEP_RESULTS_S + 60)
        await node.queue.sweep()
        given, told = 0, dict[str, str]()
        while given + len(told) < len(jobs):
            frame = await socket.recv()
            if isinstance(frame, bytes):
                given += 1
            elif (said := json.loads(frame))["status"] == "ERROR":
                told[said["id"]] = said["description"]
        assert told.keys() < jobs
        assert set(told.values()) == {
            "The result could not be read from the node's disk. Send the job again."
        }


async def test_what_was_handed_over_is_tidied_up_each_by_itself(tmp_path: Path) -> None:
    """One file that cannot be removed keeps no other."""
    async with (
        serving(tmp_path) as node,
        httpx.AsyncClient(base_url=node.url, trust_env=False, timeout=20) as http,
        asyncio.timeout(60),
    ):
        handed = list[str]()
        async with connect(node.url.replace("http", "ws") + "/subscribe", proxy=None) as socket:
            session = json.loads(await socket.recv())["session_id"]
            for _ in range(2):
                answer = await http.post("/request", headers=VERSION, **parts(session_id=session))  # type: ignore[arg-type]
                handed.append(answer.json()["id"])
                while isinstance(await socket.recv(), str):
                    pass
            stuck, other = (node.queue.spool.result(job_id) for job_id in handed)
            stuck.unlink()
            (stuck / "a file").mkdir(parents=True)
        await until(lambda: not other.exists())
