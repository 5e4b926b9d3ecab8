"""docs/reference/api.md says every path, who may use it, and what it is for."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from starlette.routing import Route, WebSocketRoute

from mesh.api.auth import needed_of
from mesh.api.faults import RefusedRoute
from mesh.identity.api_keys import Scope

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import api_page  # noqa: E402

PAGE = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
HEADINGS = {
    call for line in PAGE.splitlines() if line.startswith("### ") for call in line.split("`")[1::2]
}


def test_no_route_is_missing() -> None:
    routes = api_page.app_routes()
    assert len(routes) > 60
    refused = {route.path for route in routes if isinstance(route, RefusedRoute)}
    assert all(f"`{path}`" in PAGE for path in refused if "{" not in path)
    here = {
        call
        for route in routes
        if not isinstance(route, RefusedRoute)
        for call in api_page.calls(route)
    }
    assert here == HEADINGS


def test_the_page_is_of_everything_that_makes_routes() -> None:
    """A family that a daemon has only under some condition would be left out unseen."""
    makers = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "mesh/api").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("Route", "WebSocketRoute", "RefusedRoute")
    }
    assert {"mesh.api.keys", "mesh.api.page", "mesh.api.openai.elsewhere"} <= makers
    found = {route.endpoint.__module__ for route in api_page.app_routes()}
    assert makers - {"mesh.api.ndif.routes"} <= found
    assert "mesh.api.ndif.sessions" in found


@pytest.mark.parametrize("route", api_page.app_routes(), ids=lambda route: route.path)
def test_every_endpoint_says_what_it_does(route: Route | WebSocketRoute) -> None:
    assert (route.endpoint.__doc__ or "").strip()


def test_who_may_is_said() -> None:
    said = {"POST /mesh/v1/keys": Scope.ADMIN, "POST /v1/completions": Scope.CHAT}
    for route in api_page.app_routes():
        for call in api_page.calls(route):
            if call in said:
                assert needed_of(route) is said.pop(call)
    assert not said
    assert "### `POST /mesh/v1/keys`\n\n*Admin.*" in PAGE
    assert "### `GET /healthz`\n\n*Everybody.*" in PAGE
    assert "### `GET /mesh/v1/status`\n\n*Any caller.*" in PAGE


def test_bodies_are_those_that_are_read() -> None:
    section = PAGE.partition("### `POST /mesh/v1/keys`")[2].partition("### ")[0]
    assert "| `requests_per_minute` | integer (at least 1) |  |" in section
    assert "| `name` | string (1 to 64 characters) | required |" in section
