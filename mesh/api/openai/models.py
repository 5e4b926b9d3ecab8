"""`GET /v1/models` and `/v1/models/ID`: the models that can answer now."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.services import MeshView
from mesh.errors import nobody_asks


def routes(view: MeshView) -> list[Route]:
    """The endpoints' routes."""

    async def listing(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": _runnable(view)})

    async def one(request: Request) -> Response:
        wanted = request.path_params["model_id"].rstrip("/")
        if not wanted:  # the list's own path with a slash behind it
            return await listing(request)
        models = {model["id"]: model for model in _runnable(view)}
        if wanted not in models:
            raise nobody_asks(wanted, models)
        return JSONResponse(models[wanted])

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
