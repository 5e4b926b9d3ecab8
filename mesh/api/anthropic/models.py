"""`GET /v1/models` for Anthropic's clients: the list of `mesh.api.openai.models` in their form.

The path is the same; their clients send the version of the API that they speak.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from mesh.api.auth import caller_of
from mesh.api.faults import ANTHROPIC_VERSION
from mesh.api.openai.models import listed
from mesh.api.services import DeploymentControl, MeshView
from mesh.errors import nobody_asks
from mesh.types import ModelId

_UNKNOWN_TIME = "1970-01-01T00:00:00Z"
"""What Anthropic says of a model whose release it does not know."""


class _ForItsClients(Route):
    """A route that Anthropic's clients alone take."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As a route does; nothing for a request without their header."""
        if scope["type"] != "http" or ANTHROPIC_VERSION not in Headers(scope=scope):
            return Match.NONE, {}
        return super().matches(scope)


def routes(
    view: MeshView, deployments: DeploymentControl | None, named: Callable[[str], ModelId]
) -> list[Route]:
    """The endpoints' routes, to stand before `mesh.api.openai.models`'; `named` as there."""

    def known(request: Request) -> dict[str, dict[str, Any]]:
        models = listed(view, deployments, caller_of(request))
        return {model["id"]: _model(model) for model in models}

    async def listing(request: Request) -> Response:
        """The models that a chat can be asked of, as Anthropic lists them, for requests with the
        header `anthropic-version`. All of them are on the first page.
        """
        models = list(known(request).values())
        ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]} if models else {}
        return JSONResponse({"data": models, "has_more": False, **ends})

    async def one(request: Request) -> Response:
        """One of them."""
        wanted, models = named(request.path_params["model_id"]), known(request)
        if wanted not in models:
            raise nobody_asks(wanted, models)
        return JSONResponse(models[wanted])

    return [
        _ForItsClients("/v1/models", listing),
        _ForItsClients("/v1/models/{model_id:path}", one),
    ]


def _model(row: dict[str, Any]) -> dict[str, Any]:
    named = {"id": row["id"], "display_name": row["id"], "created_at": _UNKNOWN_TIME}
    return {"type": "model", **named, "hearthnet": row["hearthnet"]}
