"""`GET /v1/models` and `/v1/models/ID`: the models that a chat can be asked of.

Besides those that answer now these are the ones that a chat waits for: what is deployed on other
machines, whose ends come when it is asked, what is on its way up, and, for callers who may wake it,
what rests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.auth import Caller, caller_of
from mesh.api.services import DeploymentControl, MeshView
from mesh.errors import nobody_asks
from mesh.types import ModelId

_COLD = "COLD"
_COMING = frozenset({"QUEUED", "PROVISIONING", "DEPLOYING"})
"""The states of deployments that are on their way up."""


def routes(
    view: MeshView, deployments: DeploymentControl | None, named: Callable[[str], ModelId]
) -> list[Route]:
    """The endpoints' routes; `named` gives the id that a client means by a name."""

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
        """One of them."""
        wanted = named(request.path_params["model_id"])
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
    """What is deployed and cannot answer here now, each model once: of several deployments one that
    is up, or else on its way."""
    runnable = {model["id"] for model in view.models() if model["runnable"]}
    rows = deployments.view() if deployments is not None else []
    up, coming, cold = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    for row in rows:
        if not row["resting"] and not row["missing"]:
            up.append(_deployed(row, row["level"]))
        elif row["state"] in _COMING:
            coming.append(_deployed(row, row["state"]))
        elif row["resting"] and caller.may_wake:
            cold.append(_deployed(row, _COLD))
    found = {each["id"]: each for each in (*cold, *coming, *up)}
    return [each for name, each in found.items() if name not in runnable]


def _deployed(row: dict[str, Any], state: str) -> dict[str, Any]:
    nodes = sorted({span["node"] for span in row["spans"] if span["phase"] == "READY"})
    return _model(
        row["model_id"], state=state, total_layers=row["total_layers"], nodes=nodes,
        context=row["context"],
    )  # fmt: skip


def _model(name: str, **facts: Any) -> dict[str, Any]:
    owner = {"object": "model", "created": 0, "owned_by": "hearthnet"}
    return {"id": name, **owner, "hearthnet": facts}
