"""`GET /v1/models` and `/v1/models/ID`: the models that can answer now."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.services import MeshView
from mesh.errors import ModelNotFound


def routes(view: MeshView) -> list[Route]:
    """The endpoints' routes."""

    async def listing(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": _runnable(view)})

    async def one(request: Request) -> Response:
        wanted = request.path_params["model_id"]
        for model in _runnable(view):
            if model["id"] == wanted:
                return JSONResponse(model)
        raise ModelNotFound(
            f"No model {wanted!r} can answer now.",
            fix="See `hearthnet models` for the models and what each misses.",
            param="model",
        )

    return [Route("/v1/models", listing), Route("/v1/models/{model_id:path}", one)]


def _runnable(view: MeshView) -> list[dict[str, Any]]:
    return [
        {
            "id": model["id"],
            "object": "model",
            "created": 0,
            "owned_by": "hearthnet",
            "hearthnet": {
                "total_layers": model["total_layers"],
                "nodes": model["nodes"],
                "context": model["context"],
            },
        }
        for model in view.models()
        if model["runnable"]
    ]
