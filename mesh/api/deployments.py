"""`/mesh/v1/deployments`: what the hearth wishes to have loaded, and the verbs that change it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.bodies import Strict, read_body
from mesh.api.services import ApiSettings, DeploymentControl

PATH = "/mesh/v1/deployments"


class DeployBody(Strict):
    """The body of `POST /mesh/v1/deployments`; what is left out stays as it is.

    `layers` are pins, ``NODE=LO-HI``.
    """

    model: str = Field(min_length=1, max_length=512)
    replicas: int | None = Field(default=None, ge=1, le=16)
    dedicated: bool | None = None
    quant: Literal["auto", "none", "int8", "int4"] | None = None
    context: int | None = Field(default=None, ge=0, le=1 << 24)
    minimum_s: float | None = Field(default=None, ge=0, le=86400 * 366)
    keep_alive_s: float | None = Field(default=None, ge=0, le=86400 * 366)
    nodes: list[str] | None = Field(default=None, max_length=256)
    layers: list[str] | None = Field(default=None, max_length=256)


class ScaleBody(Strict):
    """The body of `PATCH /mesh/v1/deployments/MODEL`."""

    replicas: int = Field(ge=0, le=16)


def view_routes(deployments: DeploymentControl) -> list[Route]:
    """The endpoint that only reads."""

    async def view(_request: Request) -> Response:
        """What the hearth wishes to have loaded, as `deployments`. Each as in
        `DeploymentControl.view`.
        """
        return JSONResponse({"deployments": deployments.view()})

    return [Route(PATH, view)]


def routes(deployments: DeploymentControl, settings: ApiSettings) -> list[Route]:
    """The endpoints that change something."""

    async def deploy(request: Request) -> Response:
        """Wish for a model, or change that wish, which is answered with 202: it is brought up
        from then on. Answers as `DeploymentControl.deploy`.
        """
        body = await read_body(request, DeployBody, settings)
        given = body.model_dump(exclude_none=True)
        return JSONResponse(await deployments.deploy(given), status_code=202)

    async def scale(request: Request) -> Response:
        """Wish for so many replicas, which is answered with 202. Answers as
        `DeploymentControl.scale`.
        """
        body = await read_body(request, ScaleBody, settings)
        model = request.path_params["model"]
        return JSONResponse(await deployments.scale(model, body.replicas), status_code=202)

    async def evict(request: Request) -> Response:
        """End the wish, as `evicted`. Answers as `DeploymentControl.evict`."""
        return JSONResponse({"evicted": await deployments.evict(request.path_params["model"])})

    named = f"{PATH}/{{model:path}}"
    return [
        Route(PATH, deploy, methods=["POST"]),
        Route(named, scale, methods=["PATCH"]),
        Route(named, evict, methods=["DELETE"]),
    ]
