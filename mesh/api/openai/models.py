"""`GET /v1/models` and `/v1/models/ID`: the models that a chat can be asked of.

Besides those that answer now these are the ones that a chat waits for: what is on its way up, and,
for callers who may wake it, what rests.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.auth import Caller, caller_of
from mesh.api.services import DeploymentControl, MeshView
from mesh.errors import nobody_asks

_COLD = "COLD"
_COMING = frozenset({"QUEUED", "PROVISIONING", "DEPLOYING"})
"""The states of deployments that are on their way up."""


def routes(view: MeshView, deployments: DeploymentControl | None = None) -> list[Route]:
    """The endpoints' routes."""

    def known(request: Request) -> list[dict[str, Any]]:
        return listed(view, deployments, caller_of(request))

    async def listing(request: Request) -> Response:
        """The models that a chat can be asked of, as OpenAI lists them. The `hearthnet` object of
        each has `state` (`HOT`, `WARM`; on its way up `QUEUED`, `PROVISIONING` or `DEPLOYING`; at
        rest `COLD`, for callers that may wake it), `total_layers`, `nodes` and `context`. Requests
        with the header `anthropic-version` get the list in Anthropic's form.
        """
        return JSONResponse({"object": "list", "data": known(request)})

    async def one(request: Request) -> Response:
        """One of them. A slash behind its id is as none."""
        wanted = request.path_params["model_id"].rstrip("/")
        if not wanted:  # the list's own path with a slash behind it
            return await listing(request)
        models = {model["id"]: model for model in known(request)}
        if wanted not in models:
            raise nobody_asks(wanted, models)
        return JSONResponse(models[wanted])

    return [Route("/v1/models", listing), Route("/v1/models/{model_id:path}", one)]


def listed(
    view: MeshView, deployments: DeploymentControl | None, caller: Caller
) -> list[dict[str, Any]]:
    """The models that the caller may ask, as OpenAI's API has them."""
    return _runnable(view) + _waited_for(view, deployments, caller)


def _runnable(view: MeshView) -> list[dict[str, Any]]:
    return [
        _model(
            model["id"],
            state=model["level"],
            total_layers=model["total_layers"],
            nodes=model["nodes"],
            context=model["context"],
        )
        for model in view.models()
        if model["runnable"]
    ]


def _waited_for(
    view: MeshView, deployments: DeploymentControl | None, caller: Caller
) -> list[dict[str, Any]]:
    """What is deployed and cannot answer now, each model once: of several deployments the state of
    one that is on its way."""
    found: dict[str, dict[str, Any]] = {}
    runnable = {model["id"] for model in view.models() if model["runnable"]}
    for row in deployments.view() if deployments is not None else []:
        name, is_coming = row["model_id"], row["state"] in _COMING
        if name in runnable or not (is_coming or (row["resting"] and caller.may_wake)):
            continue
        if is_coming or name not in found:
            found[name] = _model(
                name,
                state=row["state"] if is_coming else _COLD,
                total_layers=row["total_layers"],
                nodes=[],
                context=row["context"],
            )
    return list(found.values())


def _model(name: str, **facts: Any) -> dict[str, Any]:
    owner = {"object": "model", "created": 0, "owned_by": "hearthnet"}
    return {"id": name, **owner, "hearthnet": facts}
