"""No account takes all connections of the API, whatever it leaves open."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import httpx
import pytest

from mesh.accounts import allowances
from mesh.accounts.ledger import Limit, Resource, ResourceLedger
from mesh.api.services import ApiSettings
from mesh.clock import SystemClock
from mesh.identity.api_keys import Scope
from tests.api.conftest import SETTINGS, Served, serving
from tests.api.test_keys import OWNERS, bearer, code, make

EACH, ALL = 5, 15

Owned = tuple[Served, httpx.AsyncClient]


@pytest.fixture
async def small() -> AsyncIterator[Owned]:
    accounts = ResourceLedger(SystemClock(), {Resource.OPEN_REQUESTS: Limit(EACH, total=ALL)})
    settings = replace(SETTINGS, api_key=OWNERS, max_connections=20, accounts=accounts)
    async with (
        serving(settings) as api,
        httpx.AsyncClient(base_url=api.url, trust_env=False, timeout=10) as http,
    ):
        yield api, http


async def follow(http: httpx.AsyncClient, stack: AsyncExitStack, key: str) -> httpx.Response:
    """A stream of events, open for as long as the stack is."""
    stream = http.stream("GET", "/mesh/v1/events", headers=bearer(key))
    return await stack.enter_async_context(stream)


async def test_one_account_s_streams_leave_room_for_others(small: Owned) -> None:
    api, http = small
    phone, other = make(api, Scope.CHAT), make(api, Scope.CHAT)
    async with AsyncExitStack() as stack:
        for _ in range(EACH):
            assert (await follow(http, stack, phone)).status_code == 200
        refused = await http.get("/mesh/v1/events", headers=bearer(phone))
        assert code(refused) == (429, "limit_reached")
        assert refused.json()["error"]["param"] == "open_requests"
        assert f"may hold {EACH} open requests" in refused.text
        for key in (other, OWNERS):
            assert (await http.get("/v1/models", headers=bearer(key))).is_success
    async with asyncio.timeout(10):  # those that left are counted until the server has seen it
        while not (await http.get("/v1/models", headers=bearer(phone))).is_success:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_all_accounts_together_leave_room_for_the_owner(small: Owned) -> None:
    api, http = small
    async with AsyncExitStack() as stack:
        for key in [make(api, Scope.CHAT) for _ in range(ALL // EACH)]:
            for _ in range(EACH):
                assert (await follow(http, stack, key)).status_code == 200
        late = await http.get("/v1/models", headers=bearer(make(api, Scope.CHAT)))
        assert code(late) == (429, "busy")
        assert (await follow(http, stack, OWNERS)).status_code == 200
        assert (await http.get("/mesh/v1/keys", headers=bearer(OWNERS))).is_success


async def test_what_needs_no_key_is_on_the_user_s_account(small: Owned) -> None:
    api, http = small
    assert api.app.state.settings.keyless
    async with AsyncExitStack() as stack:
        for _ in range(EACH):
            assert (await follow(http, stack, "unused")).status_code == 200
        assert code(await http.get("/result/any/x")) == (429, "limit_reached")
        assert (await http.get("/healthz")).is_success


async def test_what_changes_nothing_is_not_kept_as_long_as_the_answer_takes(small: Owned) -> None:
    api, http = small
    # of 4 MB that can be a million lists, and of a hundred requests the memory of a machine
    body = (
        '{"model":"silent","messages":[{"role":"user","content":"hi"}],"metadata":{"nobodys":[]}}'
    )
    asking = asyncio.create_task(http.post("/v1/chat/completions", content=body))
    await api.generations.started.wait()
    assert not any(type(each) is dict and "nobodys" in each for each in gc.get_objects())
    api.generations.proceed.set()
    assert (await asking).is_success


def test_the_numbers_leave_the_owner_an_eighth() -> None:
    places = ApiSettings().max_connections
    limit = allowances.DAEMON[Resource.OPEN_REQUESTS]
    assert limit.each == places / 4
    assert limit.total == places * 7 / 8
