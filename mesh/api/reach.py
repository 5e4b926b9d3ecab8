"""`POST /mesh/v1/reach`: who can open connections to whom, tried now."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.services import ReachView


def routes(reach: ReachView) -> list[Route]:
    """It has every peer connect, so it is no reading: for the owner, and by POST."""

    async def look(_request: Request) -> Response:
        """Who can open connections to whom. Answers as `ReachView.look`."""
        return JSONResponse(await reach.look())

    return [Route("/mesh/v1/reach", look, methods=["POST"])]
