"""What each caller may do: keyless, with a key of some scope, as the owner; and how much of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mesh.accounts import allowances
from mesh.accounts.ledger import Resource, ResourceLedger
from mesh.api.app import create_app
from mesh.api.auth import caller_of, needed_of
from mesh.api.page import PATHS as PAGE_FILES
from mesh.api.services import HearthControl
from mesh.clock import SystemClock
from mesh.identity.api_keys import ApiKeys, Quota, Scope, new_owner_key
from mesh.types import OWNER, Principal, PrincipalKind
from tests.api.conftest import SETTINGS, Served, serving
from tests.fakes import ScriptedGenerations, ScriptedView
from tests.waiting import until

OWNERS = new_owner_key()
WITH_OWNER = replace(SETTINGS, api_key=OWNERS)
CHAT = {"model": "echo", "messages": [{"role": "user", "content": "a b c"}]}


@pytest.fixture
async def owned() -> AsyncIterator[tuple[Served, httpx.AsyncClient]]:
    async with (
        serving(WITH_OWNER) as api,
        httpx.AsyncClient(base_url=api.url, trust_env=False, timeout=10) as http,
    ):
        yield api, http


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def make(api: Served, *scopes: Scope, quota: Quota = Quota(), trusted: bool = False) -> str:  # noqa: B008
    return api.keys.create("test", frozenset(scopes), quota, SystemClock(), trusted=trusted)[1]


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def test_keyless_callers_chat_and_administer_nothing(
    owned: tuple[Served, httpx.AsyncClient],
) -> None:
    _, http = owned
    for headers in ({}, bearer("unused"), {"ndif-api-key": "anything"}):
        assert (await http.post("/v1/chat/completions", json=CHAT, headers=headers)).is_success
        assert (await http.get("/mesh/v1/status", headers=headers)).is_success
        for method, path in ADMINISTRATION:
            refused = await http.request(method, path, json={}, headers=headers)
            assert code(refused) == (401, "unauthorized"), path
            assert "`hearthnet keys create --scope admin`" in refused.json()["error"]["fix"]


async def test_a_stale_or_foreign_key_is_refused_even_where_none_is_needed(
    owned: tuple[Served, httpx.AsyncClient],
) -> None:
    _, http = owned
    for key in (new_owner_key(), OWNERS + "x", OWNERS[:-1], "hn_00000000_" + "a" * 43, "hn_"):
        assert code(await http.get("/v1/models", headers=bearer(key))) == (401, "unauthorized")


@pytest.mark.parametrize("scope", [Scope.CHAT, Scope.INTERVENTIONS])
async def test_a_key_is_good_for_its_scopes_only(
    scope: Scope, owned: tuple[Served, httpx.AsyncClient]
) -> None:
    api, http = owned
    http.headers.update(bearer(make(api, scope)))
    for method, path in ADMINISTRATION:
        assert code(await http.request(method, path, json={})) == (403, "forbidden"), path
    chat = await http.post("/v1/chat/completions", json=CHAT)
    assert chat.status_code == (200 if scope is Scope.CHAT else 403)
    listing = await http.get("/v1/models")
    assert listing.status_code == (200 if scope is Scope.CHAT else 403)


ADMINISTRATION = [
    ("GET", "/mesh/v1/keys"),
    ("POST", "/mesh/v1/keys"),
    ("POST", "/mesh/v1/keys/revoke"),
]
HEARTH = [
    ("GET", "/mesh/v1/hearth"),
    *(("POST", f"/mesh/v1/hearth/{v}") for v in ("invite", "join", "promote", "demote", "revoke")),
]


def test_every_path_is_behind_a_scope_or_known_to_show_only_the_mesh() -> None:
    """A new path that nobody thought about is found here."""
    nobody_asks = cast("HearthControl", object())
    app = create_app(ScriptedGenerations(), ScriptedView(), SETTINGS, nobody_asks, ApiKeys())
    scopes: dict[str, set[Scope | None]] = {}
    for route in app.routes:
        assert isinstance(route, Route)
        needed = needed_of(route)
        scopes.setdefault(route.path, set()).add(needed)
    shows_the_mesh = {
        "/healthz", "/readyz", "/metrics",
        "/mesh/v1/status", "/mesh/v1/peers", "/mesh/v1/models", "/mesh/v1/events",
        "/mesh/v1/privacy",
        *PAGE_FILES,  # which hold nothing of it
    }  # fmt: skip
    for path, needed in scopes.items():
        if path.startswith("/v1/"):
            assert needed == {Scope.CHAT}, path
        elif path.startswith(("/mesh/v1/hearth", "/mesh/v1/keys")):
            assert needed == {Scope.ADMIN}, path
        else:
            assert None not in needed or path in shows_the_mesh, path
    assert {path for _, path in [*ADMINISTRATION, *HEARTH]} <= set(scopes)


async def test_a_revoked_key_s_answers_end(owned: tuple[Served, httpx.AsyncClient]) -> None:
    api, http = owned
    key = make(api, Scope.CHAT)
    (made,) = api.keys.keys
    body = {**CHAT, "model": "silent", "stream": True}
    async with http.stream(
        "POST", "/v1/chat/completions", json=body, headers=bearer(key)
    ) as response:
        lines = response.aiter_lines()
        assert await anext(lines) == ": ping"
        api.keys.revoke(made.id)
        api.generations.proceed.set()
        told = "".join([line async for line in lines])
    assert "late" not in told
    assert '"code":"unauthorized"' in told
    await asyncio.wait_for(api.generations.ended["silent"].wait(), 5)


async def test_the_owner_makes_lists_and_revokes_keys(
    owned: tuple[Served, httpx.AsyncClient],
) -> None:
    _, http = owned
    wish = {"name": "sofa", "scopes": ["chat"], "trusted": True, "requests_per_minute": 5}
    made = (await http.post("/mesh/v1/keys", json=wish, headers=bearer(OWNERS))).json()
    key = made.pop("key")
    listed = (await http.get("/mesh/v1/keys", headers=bearer(OWNERS))).json()["keys"]
    assert listed == [made]
    assert made["name"] == "sofa"
    assert made["trusted"]
    assert key not in str(listed)
    assert (await http.get("/v1/models", headers=bearer(key))).is_success
    gone = {"key_id": made["id"]}
    revoked = await http.post("/mesh/v1/keys/revoke", json=gone, headers=bearer(OWNERS))
    assert revoked.json() == made
    assert code(await http.get("/v1/models", headers=bearer(key))) == (401, "unauthorized")
    again = await http.post("/mesh/v1/keys/revoke", json=gone, headers=bearer(OWNERS))
    assert code(again) == (404, "not_found")
    for each in ({"scopes": ["root"]}, {"tokens_per_day": 10**400}, {"requests_per_minute": 2**53}):
        refused = await http.post("/mesh/v1/keys", json=wish | each, headers=bearer(OWNERS))
        assert refused.status_code == 400, each


async def test_an_admin_key_does_what_the_owner_does(
    owned: tuple[Served, httpx.AsyncClient],
) -> None:
    api, http = owned
    http.headers.update(bearer(make(api, Scope.ADMIN)))
    assert (await http.get("/mesh/v1/keys")).is_success
    assert (await http.post("/v1/chat/completions", json=CHAT)).is_success


async def test_a_request_that_is_being_sent_when_its_key_is_revoked_is_refused() -> None:
    """Else whoever has an admin key, and always has such a request under way, makes the next."""
    accounts = ResourceLedger(SystemClock(), allowances.API)
    async with (
        serving(replace(WITH_OWNER, accounts=accounts)) as api,
        httpx.AsyncClient(base_url=api.url, trust_env=False, timeout=10) as http,
    ):
        headers, revoked = bearer(make(api, Scope.ADMIN)), asyncio.Event()
        (admins,) = api.keys.keys
        account = Principal(PrincipalKind.KEY, admins.id)

        async def late() -> AsyncIterator[bytes]:
            yield b'{"name": "again", '
            await revoked.wait()
            yield b'"scopes": ["admin"]}'

        asking = asyncio.create_task(http.post("/mesh/v1/keys", content=late(), headers=headers))
        await until(lambda: accounts.held(account, Resource.OPEN_REQUESTS) > 0)
        api.keys.revoke(admins.id)
        revoked.set()
        assert code(await asking) == (401, "unauthorized")
        assert api.keys.keys == ()


async def test_requests_over_the_quota_get_429_and_reading_is_free(
    owned: tuple[Served, httpx.AsyncClient],
) -> None:
    api, http = owned
    http.headers.update(bearer(make(api, Scope.CHAT, quota=Quota(requests_per_minute=2))))
    for _ in range(3):
        assert (await http.get("/v1/models")).is_success
    for _ in range(2):
        assert (await http.post("/v1/chat/completions", json=CHAT)).is_success
    over = await http.post("/v1/chat/completions", json=CHAT)
    assert code(over) == (429, "quota_exceeded")
    assert over.json()["error"]["type"] == "rate_limit_error"
    assert over.json()["error"]["fix"] == f"Try again in {over.headers['retry-after']} s."
    assert int(over.headers["retry-after"]) > 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "asked"),
    [("/v1/chat/completions", CHAT), ("/v1/responses", {"model": "echo", "input": "a b c"})],
)
async def test_tokens_over_the_quota_get_429(
    path: str, asked: dict[str, Any], stream: bool, owned: tuple[Served, httpx.AsyncClient]
) -> None:
    api, http = owned
    http.headers.update(bearer(make(api, Scope.CHAT, quota=Quota(tokens_per_day=6))))
    body: dict[str, Any] = {**asked, "stream": stream}
    assert (await http.post(path, json=body)).is_success  # 5 of the prompt, 3 more
    over = await http.post(path, json=body)
    assert code(over) == (429, "quota_exceeded")
    assert over.json()["error"]["param"] == "tokens_per_day"


async def test_the_prompt_counts_for_whoever_leaves_after_the_first_token(
    owned: tuple[Served, httpx.AsyncClient],
) -> None:
    api, http = owned
    http.headers.update(bearer(make(api, Scope.CHAT, quota=Quota(tokens_per_day=6))))
    body: dict[str, Any] = {**CHAT, "model": "stuck", "stream": True}
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if '"one"' in line:
                break
    async with asyncio.timeout(5):
        await api.generations.ended["stuck"].wait()
    over = await http.post("/v1/chat/completions", json=CHAT)  # 5 of the prompt, 1 more
    assert code(over) == (429, "quota_exceeded")


async def test_a_whole_answer_counts_its_prompt_once(
    owned: tuple[Served, httpx.AsyncClient],
) -> None:
    api, http = owned
    http.headers.update(bearer(make(api, Scope.CHAT, quota=Quota(tokens_per_day=9))))
    for stream in (False, True):  # 5 of the prompt, 3 more
        body: dict[str, Any] = {**CHAT, "stream": stream}
        assert (await http.post("/v1/chat/completions", json=body)).is_success
    assert code(await http.post("/v1/chat/completions", json=CHAT)) == (429, "quota_exceeded")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_of_several_answers_counts_once_as_in_their_usage(
    stream: bool, owned: tuple[Served, httpx.AsyncClient]
) -> None:
    api, http = owned
    http.headers.update(bearer(make(api, Scope.CHAT, quota=Quota(tokens_per_day=12))))
    body: dict[str, Any] = {**CHAT, "n": 2, "stream": stream}
    for _ in range(2):  # 5 of the prompt, 3 more of each
        assert (await http.post("/v1/chat/completions", json=body)).is_success
    assert code(await http.post("/v1/chat/completions", json=body)) == (429, "quota_exceeded")


async def test_handlers_see_who_calls() -> None:
    seen: dict[str, tuple[Principal, bool]] = {}
    async with serving(WITH_OWNER) as api:

        async def show(request: Request) -> Response:
            caller = caller_of(request)
            seen[request.headers["x-case"]] = (caller.principal, caller.trusted)
            return Response()

        api.app.router.routes.append(Route("/show", show))
        trusted = make(api, Scope.INTERVENTIONS, trusted=True)
        cases = {
            "keyless": {}, "owner": bearer(OWNERS), "nnsight": {"ndif-api-key": trusted},
        }  # fmt: skip
        async with httpx.AsyncClient(base_url=api.url, trust_env=False) as http:
            for name, headers in cases.items():
                await http.get("/show", headers={**headers, "X-Case": name})
        key_id = api.keys.keys[0].id
    keyless, trusted_so = seen.pop("keyless")
    assert (keyless.kind, trusted_so) == (PrincipalKind.LOCAL, False)
    owner, key = (Principal(PrincipalKind.KEY, name) for name in (OWNER, key_id))
    assert seen == {"owner": (owner, True), "nnsight": (key, True)}


async def test_on_the_lan_nobody_is_keyless() -> None:
    lan = replace(WITH_OWNER, host="0.0.0.0", keyless=True)  # noqa: S104 - only the settings say so
    async with (
        serving(lan) as api,
        httpx.AsyncClient(base_url=api.url, trust_env=False) as http,
    ):
        for headers in ({}, bearer("unused")):
            assert code(await http.get("/v1/models", headers=headers)) == (401, "unauthorized")
        assert (await http.get("/v1/models", headers=bearer(OWNERS))).is_success
