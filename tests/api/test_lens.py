"""`POST /mesh/v1/lens`: who may, what is asked, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from mesh.clock import SystemClock
from mesh.identity.api_keys import Quota, Scope
from mesh.types import Steer
from tests.api.conftest import SETTINGS, Served, serving

CLOCK = SystemClock()
HELLO = [{"role": "user", "content": "hello"}]


async def post(api: Served, body: dict[str, Any], key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=api.url, headers=headers) as client:
        return await client.post("/mesh/v1/lens", json=body)


async def test_a_chat_begun_and_steered(api: Served) -> None:
    steer = {"steer": [{"name": "calm", "strength": 2}]}
    body = {"model": "m", "messages": HELLO, "begun": "so it", "top": 2, "hearthnet": steer}
    answer = (await post(api, body)).json()
    assert answer["model"] == "m"
    assert [layer["layer"] for layer in answer["layers"]] == [0, 1]
    assert [one["token"] for one in answer["layers"][1]["top"]] == [" it", " it"]
    (request,) = api.generations.requests
    assert (request.messages, request.begun) == (tuple(HELLO), "so it")
    assert request.steer == (Steer("calm", 2.0),)


async def test_a_text(api: Served) -> None:
    await post(api, {"model": "m", "prompt": "Once upon"})
    (request,) = api.generations.requests
    assert (request.prompt, request.messages) == ("Once upon", None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "either messages or a prompt"),
        ({"messages": HELLO, "prompt": "x"}, "either messages or a prompt"),
        ({"prompt": "x", "begun": "y"}, "begun belongs to messages"),
        ({"prompt": "x", "top": 21}, "top"),
        ({"prompt": "x", "top": 0}, "top"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x", "temperature": 1}, "temperature"),
    ],
)
async def test_what_is_refused(api: Served, fields: dict[str, Any], words: str) -> None:
    answer = await post(api, {"model": "m", **fields})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert not api.generations.requests


async def test_an_error_of_the_mesh_is_told(api: Served) -> None:
    assert (await post(api, {"model": "missing", "prompt": "x"})).status_code == 404


async def test_it_takes_the_scope_of_a_chat_and_is_charged() -> None:
    async with serving(replace(SETTINGS, api_key="owner", keyless=False)) as api:
        _, other = api.keys.create("jobs", frozenset({Scope.INTERVENTIONS}), Quota(), CLOCK)
        _, chat = api.keys.create("chat", frozenset({Scope.CHAT}), Quota(tokens_per_day=5), CLOCK)
        body = {"model": "m", "prompt": "x"}
        assert (await post(api, body)).status_code == 401
        assert (await post(api, body, other)).status_code == 403
        assert (await post(api, body, chat)).status_code == 200
        assert (await post(api, body, chat)).status_code == 429, "its 5 tokens are used up"
