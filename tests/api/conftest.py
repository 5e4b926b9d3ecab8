"""A real server on a real socket, in front of scripted generations."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.applications import Starlette

from mesh.api.app import create_app
from mesh.api.server import ApiServer, serve_api
from mesh.api.services import ApiSettings, HearthControl
from mesh.api.tls import ApiTls
from mesh.identity.api_keys import ApiKeys
from tests.fakes import ScriptedGenerations, ScriptedView

SETTINGS = ApiSettings(ping_s=0.05, max_body_bytes=20_000)


SHARED_LOOP = pytest.mark.asyncio(loop_scope="module")
"""Such tests of a module ask one server, in one event loop: for many small questions."""


@dataclass
class Served:
    """The parts of a running API."""

    generations: ScriptedGenerations = field(default_factory=ScriptedGenerations)
    view: ScriptedView = field(default_factory=ScriptedView)
    keys: ApiKeys = field(default_factory=ApiKeys)
    app: Starlette = field(init=False)
    server: ApiServer = field(init=False)

    @property
    def url(self) -> str:
        return self.server.url()


@asynccontextmanager
async def serving(
    settings: ApiSettings = SETTINGS,
    tls: ApiTls | None = None,
    host: str = "127.0.0.1",
    control: HearthControl | None = None,
) -> AsyncIterator[Served]:
    """Run an API with these settings on a free loopback port."""
    served = Served()
    served.app = create_app(served.generations, served.view, settings, control, served.keys)
    # What a bind beyond loopback does to the checks is in the settings; the socket stays local.
    served.server = await serve_api(served.app, host, 0, tls)
    try:
        yield served
    finally:
        served.generations.proceed.set()
        await served.server.close()


@pytest.fixture
async def own_api() -> AsyncIterator[Served]:
    async with serving() as served:
        yield served


@pytest.fixture
async def own_http(api: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(api) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_api() -> AsyncIterator[Served]:
    async with serving() as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_http(shared_api: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(shared_api) as client:
        yield client


@pytest.fixture
def api(request: pytest.FixtureRequest) -> Served:
    """A server: the test's own, or that of its module where it bears `SHARED_LOOP`."""
    served: Served = request.getfixturevalue(f"{whose(request)}_api")
    return served


@pytest.fixture
def http(request: pytest.FixtureRequest) -> httpx.AsyncClient:
    """A client of that server."""
    client: httpx.AsyncClient = request.getfixturevalue(f"{whose(request)}_http")
    return client


def whose(request: pytest.FixtureRequest) -> str:
    mark = request.node.get_closest_marker("asyncio")
    return "shared" if mark is not None and mark.kwargs == SHARED_LOOP.kwargs else "own"


def client_of(served: Served) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=served.url, trust_env=False, timeout=10)


def typed_events(response: httpx.Response) -> list[Any]:
    """The data of each event of a stream whose events are called by their types."""
    events = []
    for block in response.text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line[0] != ":")
        if fields:
            events.append(json.loads(fields["data"]))
            assert fields["event"] == events[-1]["type"]
    return events


def with_key(key: str, host: str = "127.0.0.1") -> ApiSettings:
    """Settings with a key, as if bound to `host`."""
    return replace(SETTINGS, api_key=key, host=host, keyless=False)
