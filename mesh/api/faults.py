"""Errors as HTTP responses, in OpenAI's shape: the only place that translates them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from mesh.errors import Busy, InternalError, MeshError, MethodNotAllowed, NotFound

_V1 = "/v1/"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
_RETRY_AFTER_S = {429: 1, 503: 5}
"""Where the error does not say how long to wait."""


class RefusedRoute(Route):
    """A path that clients know from other servers, and that is refused."""


def error_body(error: MeshError) -> dict[str, Any]:
    """``{"error": {"message", "type", "param", "code", "fix"}, "detail"}``.

    `detail` is where clients of NDIF look.
    """
    default = "invalid_request_error" if error.http_status < 500 else "server_error"
    return {
        "error": {
            "message": error.message,
            "type": _TYPES.get(error.http_status, default),
            "param": error.param,
            "code": error.code,
            "fix": error.fix,
        },
        "detail": str(error),
    }


def error_response(error: MeshError) -> Response:
    """The response for an error that ends a request."""
    headers = {}
    wait_s = error.retry_after_s if isinstance(error, Busy) else None
    if wait_s is None:
        wait_s = _RETRY_AFTER_S.get(error.http_status)
    if wait_s is not None:
        headers["Retry-After"] = str(wait_s)
    if error.http_status == 501:
        headers["X-Should-Retry"] = (
            "false"  # OpenAI's clients try again after most errors above 500
        )
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_code=error.http_status, headers=headers)


def unforeseen() -> MeshError:
    """What a client is told of an exception that nobody translated; the log has the rest."""
    return InternalError(
        "The daemon failed in a way nobody foresaw.", fix="Its log has the details; try again."
    )


def on_mesh_error(_request: Request, error: Exception) -> Response:
    """Handler for MeshError."""
    return error_response(error if isinstance(error, MeshError) else unforeseen())


def on_http_exception(request: Request, error: Exception) -> Response:
    """Handler for what Starlette's router raises: unknown paths and methods."""
    path = request.url.path
    if isinstance(error, HTTPException) and error.status_code == 405:
        headers = error.headers or {}
        refusal = MethodNotAllowed(
            f"{path} does not take {request.method}.",
            fix=f"Use {headers.get('Allow', 'another')}.",
        )
        response = error_response(refusal)
        response.headers.update(headers)
        return response
    fix, known = "Check the path's spelling.", _asked_without_an_id(request.app.routes)
    if f"{path}/".startswith(_V1):
        fix = f"Use one of: {', '.join(known)}."
    elif _V1 + path.strip("/") in known:
        fix = "End the client's base URL in /v1, as `hearthnet up` prints it."
    return error_response(NotFound(f"There is no {path} here.", fix=fix))


def _asked_without_an_id(routes: Sequence[BaseRoute]) -> list[str]:
    """The paths of OpenAI's API that are here."""
    here = [each for each in routes if isinstance(each, Route)]
    paths = [each.path for each in here if not isinstance(each, RefusedRoute)]
    return [path for path in paths if path.startswith(_V1) and "{" not in path]


def on_exception(request: Request, _error: Exception) -> Response:
    """Handler for everything else; Starlette raises it again and uvicorn logs it."""
    response = error_response(unforeseen())
    response.headers["X-Request-Id"] = request.state.request_id  # it answers around all middleware
    return response
