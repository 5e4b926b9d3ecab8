"""The API as it is on the wire: refusals, access, uploads, result URLs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from mesh.accounts.ledger import Limit, Resource, ResourceLedger
from mesh.api.services import ApiSettings
from mesh.clock import SystemClock
from mesh.identity.api_keys import Quota, Scope
from mesh.interventions.jobs.queue.types import QueueSettings
from tests.ndif import client
from tests.ndif.client import in_thread
from tests.ndif.serving import Node, OwnView, serving, with_key
from tests.waiting import until

VERSION = {"nnsight-version": "0.8.1"}
OWNER = "0123456789abcdef0123"


@pytest.fixture
async def http(node: Node) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=node.url, trust_env=False, timeout=20) as made:
        yield made


def parts(blob: bytes = b"script = 'x'", **fields: object) -> dict[str, object]:
    data = {"model_key": client.KEY, "session_id": "", "compress": False, "env": {}, **fields}
    return {
        "data": {"data": json.dumps(data)},
        "files": {"blob": ("request", blob, "application/octet-stream")},
    }


@pytest.mark.parametrize("version", ["0.5.15", "0.7.0", "0.80.1", "1.0.0", "x", ""])
async def test_other_versions_are_told_which_one_works(
    http: httpx.AsyncClient, version: str
) -> None:
    answer = await http.post("/request", headers={"nnsight-version": version}, **parts())  # type: ignore[arg-type]
    assert answer.status_code == 426
    assert "pip install 'nnsight>=0.8.1,<0.9'" in answer.json()["detail"]


@pytest.mark.parametrize("version", ["0.8.0", "0.8.1", "0.8.12.dev3"])
async def test_versions_that_are_served(http: httpx.AsyncClient, version: str) -> None:
    headers = {"nnsight-version": version, "python-version": "3.14.0"}
    answer = await http.post("/request", headers=headers, **parts())  # type: ignore[arg-type]
    assert answer.json()["status"] == "RECEIVED"


async def test_socket_io_clients_are_led_to_the_answer_they_show(
    node: Node, http: httpx.AsyncClient
) -> None:
    url = node.url.replace("http", "ws") + "/ws/socket.io/?transport=websocket&EIO=4"
    async with connect(url, proxy=None) as socket:
        assert str(await socket.recv()).startswith('0{"sid"')
        await socket.send("40")
        assert str(await socket.recv()).startswith('40{"sid"')
    polling = await http.get("/ws/socket.io/?transport=polling&EIO=4")
    assert polling.status_code == 426
    assert "nnsight>=0.8.1" in polling.json()["detail"]
    # What nnsight 0.5 sends: everything in headers, the payload as the body.
    old = {"nnsight-model-key": "x", "nnsight-version": "0.5.0", "ndif-session_id": "y"}
    answer = await http.post("/request", headers=old, content=b"zlib")
    assert answer.status_code == 426
    assert "0.5.0" in answer.json()["detail"]


async def test_old_clients_without_a_key_are_led_there_too(tmp_path: Path) -> None:
    """They send none when they connect, only with the job."""
    async with serving(tmp_path, api=with_key(OWNER)) as node:
        url = node.url.replace("http", "ws") + "/ws/socket.io/?transport=websocket&EIO=4"
        async with connect(url, proxy=None) as socket:
            assert str(await socket.recv()).startswith('0{"sid"')
            await socket.send("40")
            assert str(await socket.recv()).startswith('40{"sid"')
        async with httpx.AsyncClient(base_url=node.url, trust_env=False) as http:
            for slash in ("", "/"):
                polling = await http.get(f"/ws/socket.io{slash}?transport=polling&EIO=4")
                assert polling.status_code == 426
                assert "nnsight>=0.8.1" in polling.json()["detail"]
            foreign = await http.get("/ws/socket.io", headers={"Origin": "https://evil.example"})
            assert foreign.status_code == 403
            old = {"nnsight-model-key": "x", "nnsight-version": "0.5.0", "ndif-api-key": OWNER}
            answer = await http.post("/request", headers=old, content=b"zlib")
            assert answer.status_code == 426
            assert (await http.get("/ws/socket.iox")).status_code == 404


async def test_a_session_is_its_owners(tmp_path: Path) -> None:
    async with serving(tmp_path, api=with_key(OWNER)) as node:
        scopes = frozenset({Scope.INTERVENTIONS})
        keys = [
            (await asyncio.to_thread(node.keys.create, name, scopes, Quota(), SystemClock()))[1]
            for name in ("anna", "ben")
        ]
        url = node.url.replace("http", "ws") + "/subscribe"
        anna, ben = ({"ndif-api-key": key, **VERSION} for key in keys)
        async with (
            httpx.AsyncClient(base_url=node.url, trust_env=False, timeout=20) as http,
            connect(url, proxy=None, additional_headers={"ndif-api-key": keys[0]}) as socket,
        ):
            session = json.loads(await socket.recv())["session_id"]
            stolen = await http.post("/request", headers=ben, **parts(session_id=session))  # type: ignore[arg-type]
            assert (stolen.status_code, stolen.json()["error"]["param"]) == (400, "session_id")
            job = (await http.post("/request", headers=anna, **parts(b"script = 'wait'"))).json()  # type: ignore[arg-type]
            for path in (f"/response/{job['id']}", "/response/nothing"):
                assert (await http.get(path, headers=ben)).status_code == 404
            assert (await http.get(f"/response/{job['id']}", headers=anna)).status_code == 200
            kill = f"/mesh/v1/jobs/{job['id']}/kill"
            assert (await http.post(kill, headers=ben)).status_code == 404
            shown = (await http.get("/mesh/v1/jobs", headers=ben)).json()
            assert (shown["jobs"], shown["ended"]) == ([], [])
            owner = {"Authorization": f"Bearer {OWNER}"}
            assert (await http.get("/mesh/v1/jobs", headers=owner)).json()["jobs"]
            assert (await http.post(kill, headers=owner)).json()["status"] == "ERROR"
            whoami = (await http.get("/whoami", headers=anna)).json()
            assert whoami["tags"] == ["interventions"]
            assert whoami["email"]


async def test_without_a_key_there_is_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, api=with_key(OWNER)) as node:
        chat = frozenset({Scope.CHAT})
        _, other = await asyncio.to_thread(node.keys.create, "carl", chat, Quota(), SystemClock())
        async with httpx.AsyncClient(base_url=node.url, trust_env=False) as http:
            for headers, code in (
                ({}, 401),
                ({"ndif-api-key": "x"}, 401),
                ({"ndif-api-key": other}, 403),
            ):
                for path in (
                    "/status",
                    "/env",
                    "/whoami",
                    "/response/x",
                    "/mesh/v1/jobs",
                    "//status",
                ):
                    assert (await http.get(node.url + path, headers=headers)).status_code == code, (
                        path
                    )
                refused = await http.post("/request", headers=headers | VERSION, **parts())  # type: ignore[arg-type]
                assert refused.status_code == code
                assert refused.json()["detail"]
                with pytest.raises(InvalidStatus) as told:
                    async with connect(
                        node.url.replace("http", "ws") + "/subscribe",
                        proxy=None,
                        additional_headers=headers,
                    ):
                        pass
                assert told.value.response.status_code == code
                assert json.loads(told.value.response.body) == refused.json()
        assert not node.runner.specs


async def test_trust_is_the_keys(tmp_path: Path) -> None:
    async with serving(tmp_path, api=with_key(OWNER)) as node:
        result, _ = await in_thread(client.ask_with_key, node.url, "mine", OWNER)
        assert result["words"] == "mine"
        scopes = frozenset({Scope.INTERVENTIONS})
        _, key = await asyncio.to_thread(node.keys.create, "anna", scopes, Quota(), SystemClock())
        await in_thread(client.ask_with_key, node.url, "hers", key)
        assert [spec.trusted for spec in node.runner.specs] == [True, False]


async def test_sockets_are_counted_like_every_open_request(tmp_path: Path) -> None:
    accounts = ResourceLedger(SystemClock(), {Resource.OPEN_REQUESTS: Limit(2)})
    async with serving(tmp_path, api=replace(with_key(OWNER), accounts=accounts)) as node:
        scopes = frozenset({Scope.INTERVENTIONS})
        _, key = await asyncio.to_thread(node.keys.create, "anna", scopes, Quota(), SystemClock())
        url = node.url.replace("http", "ws") + "/subscribe"

        def subscribed(whose: str) -> connect:
            return connect(url, proxy=None, additional_headers={"ndif-api-key": whose})

        async with subscribed(key), subscribed(key):
            with pytest.raises(InvalidStatus):
                async with subscribed(key):
                    pass
            async with subscribed(OWNER):
                pass


async def test_a_revoked_key_s_socket_ends_and_its_job_with_it(tmp_path: Path) -> None:
    async with serving(tmp_path, api=with_key(OWNER)) as node:
        scopes = frozenset({Scope.INTERVENTIONS})
        made, key = await asyncio.to_thread(
            node.keys.create, "anna", scopes, Quota(), SystemClock()
        )
        headers = {"ndif-api-key": key, **VERSION}
        url = node.url.replace("http", "ws") + "/subscribe"
        async with (
            httpx.AsyncClient(base_url=node.url, trust_env=False, timeout=20) as http,
            connect(url, proxy=None, additional_headers=headers) as socket,
            asyncio.timeout(60),
        ):
            session = json.loads(await socket.recv())["session_id"]
            blob = parts(b"script = 'wait'", session_id=session)
            job = (await http.post("/request", headers=headers, **blob)).json()["id"]  # type: ignore[arg-type]
            await node.runner.began.get()
            await asyncio.to_thread(node.keys.revoke, made.id)
            told = [json.loads(frame) async for frame in socket]
        assert (told[-1]["id"], told[-1]["status"]) == (job, "ERROR")
        assert told[-1]["description"] == "The API key was revoked."
        assert node.runner.ended_by_cancel == [job]


async def test_a_revoked_key_s_jobs_end_also_those_that_nobody_waits_for(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=QueueSettings(concurrent=1), api=with_key(OWNER)) as node:
        scopes = frozenset({Scope.INTERVENTIONS})
        made, key = await asyncio.to_thread(
            node.keys.create, "anna", scopes, Quota(), SystemClock()
        )
        async with (
            httpx.AsyncClient(base_url=node.url, trust_env=False, timeout=20) as http,
            asyncio.timeout(10),
        ):
            jobs = []
            for whose in (key, key, OWNER):
                headers, asked = {"ndif-api-key": whose, **VERSION}, parts(b"script = 'wait'")
                jobs.append((await http.post("/request", headers=headers, **asked)).json()["id"])  # type: ignore[arg-type]
            first = await node.runner.began.get()
            revoked = asyncio.Event()

            async def late() -> AsyncIterator[bytes]:
                yield body[:-1]
                await revoked.wait()
                yield body[-1:]

            written = http.build_request("POST", "/request", **parts())  # type: ignore[arg-type]
            body = written.read()
            headers = {
                "content-type": written.headers["content-type"], "ndif-api-key": key, **VERSION
            }  # fmt: skip
            sending = asyncio.create_task(http.post("/request", headers=headers, content=late()))
            await until(lambda: any(node.queue.spool.root.glob("incoming/*")))
            await http.post(
                "/mesh/v1/keys/revoke",
                json={"key_id": made.id},
                headers={"authorization": f"Bearer {OWNER}"},
            )
            revoked.set()
            assert (await sending).status_code == 401
            assert [first, await node.runner.began.get()] == [jobs[0], jobs[2]]
            for job_id in jobs[:2]:
                ended = await node.queue.find(job_id, None)
                assert (ended.status, ended.description) == ("ERROR", "The API key was revoked.")


async def test_what_is_being_sent_counts_as_what_waits(tmp_path: Path) -> None:
    """Else one key fills the disk with payloads that never end."""
    async with serving(tmp_path, api=with_key(OWNER)) as node:
        node.queue.spool.budget_bytes = 4000
        scopes = frozenset({Scope.INTERVENTIONS})
        anna, ben = [
            (
                await asyncio.to_thread(node.keys.create, name, scopes, Quota(), SystemClock())
            )[1]
            for name in ("anna", "ben")
        ]  # fmt: skip
        asked = httpx.Request("POST", node.url, **parts(b"script = 'x'" + b" " * 1400))  # type: ignore[arg-type]
        body = asked.read()

        async def begin(key: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            """All but the end."""
            fields = {
                **VERSION, "host": asked.url.netloc.decode(), "ndif-api-key": key,
                "content-type": asked.headers["content-type"], "content-length": str(len(body)),
            }  # fmt: skip
            head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
            ends = await asyncio.open_connection(asked.url.host, asked.url.port)
            ends[1].write(f"POST /request HTTP/1.1\r\n{head}\r\n".encode() + body[:-10])
            return ends

        async with asyncio.timeout(10):
            begun = [await begin(anna)]
            await until(lambda: sum(each.size_bytes for each in node.queue.uploads) > 1400)
            refused, writer = await begin(anna)
            assert b" 507 " in await refused.readline()
            writer.close()
            begun.append(await begin(ben))
            for reader, writer in begun:
                writer.write(body[-10:])
                assert b" 200 " in await reader.readline()
                writer.close()
        assert node.queue.uploads == {}


async def test_a_web_page_cannot_subscribe(node: Node) -> None:
    with pytest.raises(InvalidStatus):
        async with connect(
            node.url.replace("http", "ws") + "/subscribe", proxy=None, origin="https://evil.example"
        ):
            pass


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no part|one part `data`"),
        (b"--b\r\n\r\n", "as nnsight 0.8 sends it"),
        (b'--b\r\nContent-Disposition: form-data; name="data"\r\n\r\n{}\r\n--b--\r\n', "one part"),
        (b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n{}\r\n--b--\r\n', "a part 'x'"),
        (b'--b\r\nContent-Disposition: form-data; name="blob"\r\n\r\nabc', "and an end"),
        (b"--b\r\n" + b"H" * 10_000 + b": x\r\n\r\n", "as nnsight 0.8 sends it"),
    ],
)
async def test_bodies_that_are_no_request(
    node: Node, http: httpx.AsyncClient, content: bytes, said: str
) -> None:
    headers = {**VERSION, "content-type": "multipart/form-data; boundary=b"}
    answer = await http.post("/request", headers=headers, content=content)
    assert answer.status_code == 400
    assert any(each in answer.json()["detail"] for each in said.split("|"))
    assert not list((node.root / "jobs/incoming").iterdir())
    assert node.queue.spool.used_bytes == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model_key": 5}, "model_key"),
        ({"model_key": "gpt2"}, "model_key"),
        ({"compress": "yes"}, "compress"),
        ({"env": []}, "env"),
        ({"session_id": "x" * 65}, "session_id"),
        ({"session_id": "unknown"}, "session_id"),
    ],
)
async def test_envelopes_that_are_refused(
    node: Node, http: httpx.AsyncClient, fields: dict[str, object], param: str
) -> None:
    answer = await http.post("/request", headers=VERSION, **parts(**fields))  # type: ignore[arg-type]
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not list((node.root / "jobs/incoming").iterdir())
    assert node.queue.spool.used_bytes == 0


async def test_a_payload_over_the_limit_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=QueueSettings(max_payload_bytes=100_000)) as node:
        async with httpx.AsyncClient(base_url=node.url, trust_env=False, timeout=20) as http:
            fits = await http.post("/request", headers=VERSION, **parts(bytes(100_000)))  # type: ignore[arg-type]
            assert fits.json()["status"] == "RECEIVED"
            for size in (100_001, 5_000_000):
                answer = await http.post("/request", headers=VERSION, **parts(bytes(size)))  # type: ignore[arg-type]
                assert answer.status_code == 413
                assert "100000 bytes" in answer.json()["detail"]
        await until(lambda: node.queue.counts() == (0, 0))
        assert not list((tmp_path / "jobs/incoming").iterdir())


async def test_a_body_that_does_not_come_is_refused(tmp_path: Path) -> None:
    settings = ApiSettings(body_timeout_s=0.3)
    async with serving(tmp_path, api=settings) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", node.server.port)
        writer.write(
            b"POST /request HTTP/1.1\r\nHost: 127.0.0.1\r\nnnsight-version: 0.8.1\r\n"
            b"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 1000\r\n\r\n--b\r\n"
        )
        for _ in range(2):  # also while what is left of it is awaited, this machine stands still
            await asyncio.sleep(0.5)
            time.sleep(2.5)  # noqa: ASYNC251 - it does
        async with asyncio.timeout(30):
            head = await reader.readuntil(b"\r\n\r\n")
        assert b" 400 " in head
        writer.close()
        await until(lambda: not list((tmp_path / "jobs/incoming").iterdir()))


class MovingView(OwnView):
    """A node whose model lies where `directory` says."""

    directory = Path()

    def models(self) -> list[dict[str, Any]]:
        return [{**row, "directory": str(self.directory)} for row in super().models()]


async def test_a_model_that_lies_elsewhere_now_goes_by_what_is_there(tmp_path: Path) -> None:
    """Another revision that was deployed by the same name, for instance."""
    moving = MovingView()
    async with (
        serving(tmp_path, view=moving) as node,
        httpx.AsyncClient(base_url=node.url, trust_env=False) as http,
    ):
        for commit in ("a" * 40, "b" * 40):
            moving.directory = tmp_path / "models--some--model/snapshots" / commit
            moving.directory.mkdir(parents=True)
            key = client.KEY.replace("null", f'"{commit}"')
            answer = await http.post("/request", headers=VERSION, **parts(model_key=key))  # type: ignore[arg-type]
            assert answer.status_code == 200, answer.text


async def test_what_is_stored_is_for_this_user_only(node: Node) -> None:
    await in_thread(client.submit, node.url, "wait 0")
    await node.runner.began.get()
    via = await in_thread(client.submit, node.url, "big 10")
    await in_thread(client.wait_for, via)
    root = node.root / "jobs"
    for path in (root, *root.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    assert len(list((root / "payloads").iterdir())) == 1


async def test_a_socket_outlives_the_limits_of_requests(tmp_path: Path) -> None:
    settings = ApiSettings(body_timeout_s=1.0, head_timeout_s=1.0)
    async with serving(tmp_path, api=settings) as node:
        asking = in_thread(client.ask, node.url, "wait")
        await node.runner.began.get()
        await asyncio.sleep(3.5)  # a body is cut 2 s after its limit
        node.runner.proceed.set()
        result, _ = await asking
        assert result["words"] == "wait"
