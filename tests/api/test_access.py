"""Who gets in: Host, Origin and key, on loopback and as if bound to the LAN."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from mesh.api.app import create_app
from mesh.api.server import serve_api
from mesh.api.tls import api_tls
from mesh.config import Config
from mesh.errors import BadValue, PortInUse
from tests.api.conftest import SETTINGS, SHARED_LOOP, Served, serving, with_key
from tests.fakes import ScriptedGenerations, ScriptedView

KEY = "k" * 20
ANYWHERE = "0.0.0.0"  # noqa: S104 - only the settings say so
PATHS = ["/v1/models", "/mesh/v1/status", "/mesh/v1/events", "/readyz", "/metrics", "/nothing"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8420", 200),
        ("127.0.0.1:1", 200),
        ("127.0.0.9", 200),
        ("[::1]:8420", 200),
        ("[::1]", 200),
        ("evil.example", 403),
        ("evil.example:8420", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost:x", 403),
        ("[::1", 403),
        ("192.0.2.7:8420", 403),
        ("", 403),
    ],
)
@SHARED_LOOP
async def test_loopback_answers_to_loopback_names_only(
    http: httpx.AsyncClient, host: str, status: int
) -> None:
    response = await http.get("/v1/models", headers={"Host": host})
    assert response.status_code == status
    if status == 403:
        assert response.json()["error"]["param"] == "Host"
        assert response.json()["error"]["type"] == "permission_error"
    assert (await http.get("/healthz", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        (b"http://127.0.0.1:1/v1/models?a=b", "evil.example", 200),
        (b"HTTP://localhost/healthz", "localhost", 200),
        (b"http://127.0.0.1", "127.0.0.1", 200),
        (b"http://evil.example/v1/models", "127.0.0.1", 403),
        (b"ftp://127.0.0.1/v1/models", "127.0.0.1", 404),
    ],
)
@SHARED_LOOP
async def test_a_host_in_the_target_counts_instead_of_the_header(
    http: httpx.AsyncClient, target: bytes, host: str, status: int
) -> None:
    response = await http.get("/", headers={"Host": host}, extensions={"target": target})
    assert response.status_code == status


async def test_web_pages_of_other_origins_are_refused(http: httpx.AsyncClient, api: Served) -> None:
    for origin, status in [
        (api.url, 200),
        ("https://evil.example", 403),
        ("http://127.0.0.1:1", 403),
        ("null", 403),
    ]:
        for path in ("/v1/models", "/readyz"):
            response = await http.get(path, headers={"Origin": origin})
            assert response.status_code == status, origin
            assert "access-control-allow-origin" not in response.headers


async def test_what_a_foreign_page_loads_without_naming_its_origin_is_refused(
    http: httpx.AsyncClient,
) -> None:
    for site, status in [("same-origin", 200), ("none", 200), ("cross-site", 403), ("", 403)]:
        response = await http.get("/v1/models", headers={"Sec-Fetch-Site": site})
        assert response.status_code == status, site


@pytest.mark.parametrize("host", ["127.0.0.1", ANYWHERE])
async def test_key_guards_everything_but_healthz(host: str) -> None:
    async with (
        serving(with_key(KEY, host)) as api,
        httpx.AsyncClient(base_url=api.url, trust_env=False) as http,
    ):
        assert (await http.get("/healthz")).status_code == 200
        for path in PATHS:
            for authorization in ("", KEY, f"Bearer {KEY}x", "Bearer", f"Basic {KEY}", "Bearer é"):
                headers = {"Authorization": authorization.encode()}
                response = await http.get(path, headers=headers)
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.json()["error"]["code"] == "unauthorized"
        headers = {"Authorization": f"bearer {KEY}"}
        assert (await http.get("/v1/models", headers=headers)).status_code == 200


async def test_results_need_their_url_and_no_key() -> None:
    async with (
        serving(with_key(KEY)) as api,
        httpx.AsyncClient(base_url=api.url, trust_env=False) as http,
    ):
        assert (await http.get("/result/x")).status_code == 404  # nobody serves results here
        foreign = {"Origin": "http://evil.example"}
        assert (await http.get("/result/x", headers=foreign)).status_code == 403
        assert (await http.get("/results")).status_code == 401


async def test_lan_bind_answers_to_any_host_name_with_the_key() -> None:
    async with (
        serving(with_key(KEY, ANYWHERE)) as api,
        httpx.AsyncClient(base_url=api.url, trust_env=False) as http,
    ):
        headers = {"Authorization": f"Bearer {KEY}", "Host": "attic.local:8420"}
        assert (await http.get("/v1/models", headers=headers)).status_code == 200
        evil = headers | {"Origin": "http://evil.example"}
        assert (await http.get("/v1/models", headers=evil)).status_code == 403


async def test_lan_bind_without_a_key_is_refused() -> None:
    app = create_app(ScriptedGenerations(), ScriptedView(), SETTINGS)
    with pytest.raises(BadValue, match="open to everybody") as refused:
        await serve_api(app, ANYWHERE, 0)
    assert "key" in refused.value.fix


async def test_lan_bind_without_tls_is_refused() -> None:
    app = create_app(ScriptedGenerations(), ScriptedView(), with_key(KEY, ANYWHERE))
    with pytest.raises(BadValue, match="in the clear"):
        await serve_api(app, ANYWHERE, 0)


async def test_taken_port_is_named(api: Served) -> None:
    app = create_app(ScriptedGenerations(), ScriptedView(), SETTINGS)
    with pytest.raises(PortInUse, match=f"Port {api.server.port}"):
        await serve_api(app, "127.0.0.1", api.server.port)


async def test_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    app = create_app(ScriptedGenerations(), ScriptedView(), with_key(KEY))
    config = await asyncio.to_thread(Config, state_dir=tmp_path, api_host="192.0.2.7")
    tls = await asyncio.to_thread(api_tls, config, [])
    with pytest.raises(BadValue, match=r"has no address 192\.0\.2\.7 now"):
        await serve_api(app, "192.0.2.7", 0, tls)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "/v1//chat/completions", "//v1/chat/completions"]
)
async def test_a_slash_too_many_changes_nothing(
    http: httpx.AsyncClient, api: Served, path: str
) -> None:
    body = {"model": "echo", "messages": [{"role": "user", "content": "Hello"}]}
    assert (await http.post(api.url + path, json=body)).status_code == 200
    assert (await http.get(api.url + "/v1/models/echo/")).json()["id"] == "echo"


async def test_readiness_models_status_and_metrics(http: httpx.AsyncClient, api: Served) -> None:
    ready = await http.get("/readyz")
    assert (ready.status_code, ready.json()) == (200, {"ready": True, "missing": [], "codes": []})
    api.view.missing = ["layers 8-11 of org/half"]
    ready = await http.get("/readyz")
    assert ready.status_code == 503
    missing = ["layers 8-11 of org/half"]
    assert ready.json() == {"ready": False, "missing": missing, "codes": ["layers"]}
    models = (await http.get("/v1/models")).json()
    assert [m["id"] for m in models["data"]] == ["echo"]
    facts = {"state": "HOT", "total_layers": 12, "nodes": ["attic", "here"], "context": 2048}
    assert models["data"][0]["hearthnet"] == facts
    for name in ("echo", "echo:latest"):
        assert (await http.get(f"/v1/models/{name}")).json() == models["data"][0]
    assert (await http.get("/mesh/v1/status")).json() == api.view.status()
    assert (await http.get("/mesh/v1/peers")).json() == {"peers": api.view.peers()}
    assert (await http.get("/mesh/v1/models")).json() == {"models": api.view.models()}
    metrics = await http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b"hearthnet_test 1" in metrics.content
