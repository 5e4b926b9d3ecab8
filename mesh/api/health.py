"""`/healthz` (the process answers), `/readyz` (requests can be answered), `/metrics`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from mesh.api.services import MeshView

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def routes(view: MeshView) -> list[Route]:
    """The endpoints' routes."""

    async def healthz(_request: Request) -> Response:
        """`ok`: the process answers."""
        return PlainTextResponse("ok\n")

    async def readyz(_request: Request) -> Response:
        """Whether requests can be answered: ``{"ready", "missing": [in words], "codes": [of each:
        loading, layers, which nobody serves, or failed]}``; 503 while something is missing.
        """
        missing = view.readiness()
        told = {
            "ready": not missing,
            "missing": [each.said for each in missing],
            "codes": [each.code for each in missing],
        }
        return JSONResponse(told, status_code=503 if missing else 200)

    async def metrics(_request: Request) -> Response:
        """[Metrics](metrics.md) in Prometheus' text format."""
        return Response(view.metrics(), media_type=_PROMETHEUS)

    return [Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)]
