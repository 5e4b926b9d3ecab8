"""`/mesh/v1/coordination`: who holds which model, and which of them are ready."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.services import CoordinationView


def routes(coordination: CoordinationView) -> list[Route]:
    """The endpoint's route; it only reads."""

    async def view(_request: Request) -> Response:
        return JSONResponse(await coordination.view())

    return [Route("/mesh/v1/coordination", view)]
