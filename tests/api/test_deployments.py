"""`/mesh/v1/deployments` over a real socket: who may, and bodies that are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest

from mesh.api.app import create_app
from mesh.api.server import serve_api
from mesh.api.services import ApiSettings, Services
from tests.fakes import ScriptedGenerations, ScriptedView

KEY = "owner-key-of-this-test"


class Deployments:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.rows: list[dict[str, Any]] = [{"deployment": "d", "model_id": "m"}]

    def view(self) -> list[dict[str, Any]]:
        return self.rows

    async def deploy(self, order: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(order)
        return {"deployment": "d"}

    async def wake(self, model: str, *, may_wake: bool) -> bool:
        return False

    async def scale(self, model: str, replicas: int) -> dict[str, Any]:
        self.asked.append((model, replicas))
        return {"deployment": "d"}

    async def evict(self, model: str) -> list[dict[str, Any]]:
        self.asked.append(model)
        return [{"deployment": "d"}]


@pytest.fixture
async def served() -> AsyncIterator[tuple[Deployments, httpx.AsyncClient]]:
    deployments = Deployments()
    nobody = cast("Any", None)
    services = Services(nobody, nobody, deployments, nobody, nobody, nobody, nobody)
    settings = ApiSettings(api_key=KEY)
    app = create_app(ScriptedGenerations(), ScriptedView(), settings, services=services)
    server = await serve_api(app, "127.0.0.1", 0, None)
    async with httpx.AsyncClient(base_url=server.url(), trust_env=False, timeout=10) as client:
        yield deployments, client
    await server.close()


OWNER = {"Authorization": f"Bearer {KEY}"}
PATH = "/mesh/v1/deployments"


async def test_everybody_reads_and_the_owner_changes(
    served: tuple[Deployments, httpx.AsyncClient],
) -> None:
    deployments, client = served
    assert (await client.get(PATH)).json()["deployments"][0]["model_id"] == "m"
    for method, path, body in (
        ("POST", PATH, {"model": "m"}),
        ("PATCH", f"{PATH}/m", {"replicas": 2}),
        ("DELETE", f"{PATH}/m", None),
    ):
        refused = await client.request(method, path, json=body)
        assert refused.status_code == 401
        assert deployments.asked == []
    await asyncio.sleep(0)
    for method, path, body in (
        ("POST", PATH, {"model": "org/m", "replicas": 2, "layers": ["a=0-3"]}),
        ("PATCH", f"{PATH}/org%2Fm", {"replicas": 0}),
        ("DELETE", f"{PATH}/org%2Fm", None),
    ):
        done = await client.request(method, path, json=body, headers=OWNER)
        assert done.status_code in {200, 202}
    order = {"model": "org/m", "replicas": 2, "layers": ["a=0-3"]}
    assert deployments.asked == [order, ("org/m", 0), "org/m"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "model"), ({"model": "m", "replicas": 17}, "replicas"),
        ({"model": "m", "quant": "int3"}, "quant"), ({"model": "m", "wat": 1}, "wat"),
        ({"model": "m", "nodes": "attic"}, "nodes"), ({"model": "m", "context": -1}, "context"),
    ],
)  # fmt: skip
async def test_a_body_that_is_wrong_is_refused_by_field(
    served: tuple[Deployments, httpx.AsyncClient], body: dict[str, Any], field: str
) -> None:
    deployments, client = served
    refused = await client.post(PATH, json=body, headers=OWNER)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == field
    assert deployments.asked == []


def deployed(model: str, state: str) -> dict[str, Any]:
    """What is asked of a row of the deployments."""
    spans = [{"node": node, "phase": state} for node in ("sofa", "attic", "sofa")]
    return {
        "model_id": model, "state": state, "resting": state == "RESTING", "level": "WARM",
        "missing": [] if state == "READY" else ["0-7"], "total_layers": 8, "context": 9,
        "spans": spans,
    }  # fmt: skip


async def test_models_that_a_chat_waits_for_are_listed_for_those_who_may(
    served: tuple[Deployments, httpx.AsyncClient],
) -> None:
    deployments, http = served
    deployments.rows = [
        deployed("cold", "RESTING"), deployed("coming", "PROVISIONING"), deployed("bad", "FAILED"),
        deployed("twice", "RESTING"), deployed("twice", "QUEUED"), deployed("twice", "RESTING"),
        deployed("echo", "RESTING"),
    ]  # fmt: skip

    async def states(**headers: str) -> dict[str, str]:
        listed = (await http.get("/v1/models", headers=headers)).json()["data"]
        assert len({model["id"] for model in listed}) == len(listed)
        return {model["id"]: model["hearthnet"]["state"] for model in listed}

    elsewhere = [deployed("far", "READY"), deployed("twice", "READY"), deployed("twice", "QUEUED")]
    deployments.rows, before = elsewhere, deployments.rows
    assert await states() == {"echo": "HOT", "far": "WARM", "twice": "WARM"}
    far = (await http.get("/v1/models/far")).json()["hearthnet"]
    assert far == {"state": "WARM", "total_layers": 8, "nodes": ["attic", "sofa"], "context": 9}
    deployments.rows = before
    come = {"echo": "HOT", "coming": "PROVISIONING", "twice": "QUEUED"}
    assert await states() == come
    assert await states(**OWNER) == come | {"cold": "COLD"}
    cold = (await http.get("/v1/models/cold", headers=OWNER)).json()
    facts = {"state": "COLD", "total_layers": 8, "nodes": [], "context": 9}
    assert cold["hearthnet"] == facts
    assert (await http.get("/v1/models/cold")).status_code == 404


async def test_of_a_model_on_its_way_clients_of_ollama_are_told_what_is_known(
    served: tuple[Deployments, httpx.AsyncClient],
) -> None:
    deployments, client = served
    deployments.rows = [
        {"deployment": "d", "model_id": "big", "state": "DEPLOYING", "resting": False,
         "total_layers": 80, "context": 0, "weights_sha256": "cd" * 32, "rests_at": None,
         "missing": ["0-79"], "spans": []}
    ]  # fmt: skip
    big = (await client.get("/api/tags")).json()["models"][-1]
    assert (big["name"], big["digest"], big["size"]) == ("big:latest", "cd" * 32, 0)
    assert big["modified_at"].startswith("0001-")  # as Ollama has it; Zed needs one
    shown = (await client.post("/api/show", json={"name": "big:latest"})).json()
    assert shown["capabilities"] == ["completion"]
    assert shown["model_info"] == {"general.basename": "big"}
    running = (await client.get("/api/ps")).json()["models"]
    assert [each["name"] for each in running] == ["echo:latest"]
