"""`GET /mesh/v1/coordination` over a real socket, in front of real records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import pytest

from mesh.api.app import create_app
from mesh.api.server import ApiServer, serve_api
from mesh.api.services import ApiSettings, ReadyQuestion, Services
from mesh.clock import SystemClock
from mesh.coordination.coordinator import Coordinator
from mesh.coordination.layered import LayeredRecords
from mesh.coordination.ready import ReadyFlags, ReadySignal
from tests.coordination.holders import MODEL, Told, worker
from tests.fakes import ScriptedGenerations, ScriptedView

PATH = "/mesh/v1/coordination"
READY = ReadySignal(ready=True, stability_verified=True)


@dataclass
class Records:
    """The coordinator alone, of a node that knows no model's number of layers."""

    coordinator: Coordinator
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def view(self) -> dict[str, Any]:
        return await self.coordinator.view()

    async def when_ready(self, question: ReadyQuestion) -> dict[str, Any]:
        self.asked.set()
        ready = await self.coordinator.wait_ready(
            question.model,
            timeout_s=question.wait_s,
            weights_sha256=question.weights_sha256,
            layers=lambda _: question.layers,
        )
        return self.coordinator.row(ready)


@dataclass
class Served:
    coordinator: Coordinator
    asked: asyncio.Event
    server: ApiServer
    http: httpx.AsyncClient


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    flags = ReadyFlags(SystemClock())
    coordinator = Coordinator(LayeredRecords(None, flags, Told()), flags)
    nobody, records = cast("Any", None), Records(coordinator)
    services = Services(nobody, nobody, nobody, nobody, records, nobody, nobody)
    app = create_app(ScriptedGenerations(), ScriptedView(), ApiSettings(), services=services)
    server = await serve_api(app, "127.0.0.1", 0, None)
    async with httpx.AsyncClient(base_url=server.url(), trust_env=False, timeout=40) as client:
        yield Served(coordinator, records.asked, server, client)
    await server.close()


async def test_who_waits_is_answered_when_it_is_ready(served: Served) -> None:
    await served.coordinator.publish(MODEL, [worker(1, "0-3"), worker(2, "4-7")])
    await served.coordinator.mark_ready(MODEL, 1, READY)
    known = {"model": MODEL.name, "weights_sha256": MODEL.weights_sha256}
    refused = await served.http.get(PATH, params=known)
    assert refused.status_code == 504
    assert refused.json()["error"]["code"] == "not_ready"
    assert "worker 2 of deepseek" in refused.json()["error"]["message"]
    some = await served.http.get(PATH, params={**known, "layers": "1-3"})
    assert [each["worker_rank"] for each in some.json()["workers"]] == [1]
    waiting = asyncio.create_task(served.http.get(PATH, params={**known, "wait": 30}))
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done
    await served.coordinator.mark_ready(MODEL, 2, READY)
    found = (await waiting).json()
    assert found["weights_sha256"] == MODEL.weights_sha256
    assert [(each["layers"], each["ready"]) for each in found["workers"]] == [
        ("0-3", True),
        ("4-7", True),
    ]


async def test_who_waits_keeps_no_node_from_stopping(served: Served) -> None:
    query = {"model": "nobody/has-it", "wait": "30"}
    waiting = asyncio.create_task(served.http.get(PATH, params=query))
    async with asyncio.timeout(20):
        await served.asked.wait()
    async with asyncio.timeout(10):
        await served.server.close()
        answer = await waiting
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "not_ready")


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("wait=1", "model"), ("layers=0-3", "model"), ("weights_sha256=" + "a" * 64, "model"),
        ("model=", "model"), ("model=" + "m" * 257, "model"), ("model=m&wait=31", "wait"),
        ("model=m&wait=-1", "wait"), ("model=m&wait=1e1", "wait"), ("model=m&wait=", "wait"),
        ("model=m&wait=%D9%A3", "wait"), ("model=m&layers=3-0", "layers"),
        ("model=m&layers=x", "layers"), ("model=m&weights_sha256=AB", "weights_sha256"),
    ],
)  # fmt: skip
async def test_parameters_are_checked(served: Served, query: str, field: str) -> None:
    answer = await served.http.get(f"{PATH}?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
