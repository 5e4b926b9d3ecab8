"""`POST /mesh/v1/plan`: what deploying a model would need and give, without doing it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.bodies import Strict, read_body
from mesh.api.services import ApiSettings, PlanControl


class PlanBody(Strict):
    """The body of `POST /mesh/v1/plan`.

    `nodes` are the only ones that may be used, `without` are not; those `with` are used as if they
    were here and trusted: nodes by name or id, or ``NAME=GIB`` and ``NAME=GIB:GB_S`` for a machine
    that there is not, with so much free memory, read at that speed or at this machine's. `layers`
    are pins, ``NODE=LO-HI``. Without a `quant` it is as this node's settings have it.
    """

    model: str = Field(min_length=1, max_length=512)
    replicas: int = Field(default=1, ge=1, le=16)
    dedicated: bool = False
    quant: Literal["auto", "none", "int8", "int4"] | None = None
    context: int = Field(default=4096, ge=1, le=1 << 24)
    streams: int = Field(default=1, ge=1, le=1024)
    nodes: list[str] = Field(default=[], max_length=256)
    with_: list[str] = Field(default=[], max_length=64, alias="with")
    without: list[str] = Field(default=[], max_length=256)
    layers: list[str] = Field(default=[], max_length=256)


def routes(plans: PlanControl, settings: ApiSettings) -> list[Route]:
    """The endpoint."""

    async def plan(request: Request) -> Response:
        """What deploying a model would need and give. Answers as `PlanControl.plan`."""
        body = await read_body(request, PlanBody, settings)
        return JSONResponse(await plans.plan(body.model_dump(by_alias=True)))

    return [Route("/mesh/v1/plan", plan, methods=["POST"])]
