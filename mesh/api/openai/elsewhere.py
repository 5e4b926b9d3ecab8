"""What clients know from other servers and is not here: refused with what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mesh.api.faults import RefusedRoute
from mesh.errors import NotSupported

STORED = ("/v1/responses/{response_id}", "/v1/conversations")
"""Where OpenAI has what it stored."""
_NOT_STORED = (
    "Nothing is stored here: a response cannot be fetched, cancelled or deleted, and there are no"
    " conversations.",
    "Keep what `POST /v1/responses` answers, and send the whole conversation as `input` the next"
    " time. The rest of a stream that was asked for with `resumable` is at"
    " /v1/streams/RESPONSE_ID.",
)


def routes() -> list[Route]:
    """Those paths, and what other servers have below them."""
    return refused_routes(dict.fromkeys(STORED, _NOT_STORED))


def refused_routes(instead: Mapping[str, tuple[str, str]]) -> list[Route]:
    """Paths, and what other servers have below them, that are refused: by path what is not here,
    and what to use instead."""
    return [
        _route(path + below, what, fix)
        for path, (what, fix) in instead.items()
        for below in ("", "/{more:path}")
    ]


def _route(path: str, what: str, fix: str) -> Route:
    async def refuse(_request: Request) -> Response:
        """Refused with `not_supported`, which says what to use instead."""
        raise NotSupported(what, fix=fix)

    return RefusedRoute(path, refuse, methods=["GET", "POST", "DELETE"])
