"""Errors as HTTP responses: the only place that translates them.

They have OpenAI's shape; below `/api/` that of Ollama and below `/v1/messages` that of Anthropic,
whose clients read no other, also where both ask at one path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ExceptionHandler, Scope

from mesh.errors import Busy, ContextTooLong, InternalError, MeshError, MethodNotAllowed, NotFound

_V1 = "/v1/"
OLLAMA = "/api/"
"""How the paths of Ollama's API begin."""
ANTHROPIC = "/v1/messages"
"""How those of Anthropic's do."""
ANTHROPIC_VERSION = "anthropic-version"
"""The header of its clients, with the version of the API that they speak."""
_OF_BOTH = "/v1/models"
"""What they ask of a path that OpenAI's clients know as well."""
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_RETRY_AFTER_S = {429: 1, 503: 5}
"""Where the error does not say how long to wait."""


class RefusedRoute(Route):
    """A path that clients know from other servers, and that is refused."""


def error_body(error: MeshError, path: str = "") -> dict[str, Any]:
    """``{"error": {"message", "type", "param", "code", "fix"}, "detail"}``; for a `path` of
    Ollama's API ``{"error": message, "code"}``, of Anthropic's ``{"type": "error", "error":
    {"type", "message", "param", "code"}}``.

    Every message ends with the fix, as most clients show nothing else. `detail` is where clients of
    NDIF look.
    """
    if path.startswith(OLLAMA):
        return {"error": str(error), "code": error.code}
    if path.startswith(ANTHROPIC):
        return _as_anthropic(error)
    default = "invalid_request_error" if error.http_status < 500 else "server_error"
    return {
        "error": {
            "message": str(error),
            "type": _TYPES.get(error.http_status, default),
            "param": error.param,
            "code": error.code,
            "fix": error.fix,
        },
        "detail": str(error),
    }


def _as_anthropic(error: MeshError) -> dict[str, Any]:
    default = "invalid_request_error" if error.http_status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.http_status, default)
    # Claude Code shortens its conversation when an error begins so.
    begins = "prompt is too long: " if isinstance(error, ContextTooLong) else ""
    said: dict[str, Any] = {"type": kind, "message": f"{begins}{error}"}
    said |= {"param": error.param, "code": error.code}
    if error.param == "thread":  # Anthropic's runner of tools asks again without one then
        said["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": said}


def error_response(error: MeshError, path: str = "") -> Response:
    """The response for an error that ends a request, to this `path`."""
    headers = {}
    wait_s = error.retry_after_s if isinstance(error, Busy) else None
    if wait_s is None:
        wait_s = _RETRY_AFTER_S.get(error.http_status)
    if wait_s is not None:
        headers["Retry-After"] = str(wait_s)
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error, path), status_code=error.http_status, headers=headers)


def form_for(scope: Scope) -> str:
    """The `path` by which the form of an error is chosen that ends this request."""
    path: str = scope["path"]
    if path.startswith(_OF_BOTH) and ANTHROPIC_VERSION in Headers(scope=scope):
        return ANTHROPIC
    return path


def unforeseen() -> MeshError:
    """What a client is told of an exception that nobody translated; the log has the rest."""
    return InternalError(
        "The daemon failed in a way nobody foresaw.", fix="Its log has the details; try again."
    )


async def on_mesh_error(request: Request, error: Exception) -> Response:
    """Handler for MeshError."""
    known = error if isinstance(error, MeshError) else unforeseen()
    return error_response(known, form_for(request.scope))


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Handler for what Starlette's router raises: unknown paths and methods."""
    path = request.url.path
    if isinstance(error, HTTPException) and error.status_code == 405:
        headers = error.headers or {}
        refusal = MethodNotAllowed(
            f"{path} does not take {request.method}.",
            fix=f"Use {headers.get('Allow', 'another')}.",
        )
        response = error_response(refusal, form_for(request.scope))
        response.headers.update(headers)
        return response
    begun = OLLAMA if f"{path}/".startswith(OLLAMA) else _V1
    fix, known = "Check the path's spelling.", _asked_without_an_id(request.app.routes, begun)
    if path.removeprefix("/v1") in known:
        fix = "The client adds /v1 by itself: leave it out of its base URL."
    elif f"{path}/".startswith(begun):
        fix = f"Use one of: {', '.join(known)}."
    elif _V1 + path.strip("/") in known:
        fix = "End the client's base URL in /v1, as `hearthnet up` prints it."
    return error_response(NotFound(f"There is no {path} here.", fix=fix), path)


def _asked_without_an_id(routes: Sequence[BaseRoute], begun: str) -> list[str]:
    """The paths that begin so, of another server's API, that are here."""
    here = [each for each in routes if isinstance(each, Route)]
    # Some paths are there in two forms.
    paths = dict.fromkeys(each.path for each in here if not isinstance(each, RefusedRoute))
    return [path for path in paths if path.startswith(begun) and "{" not in path]


async def on_client_gone(_request: Request, _error: Exception) -> Response:
    """Handler for clients that leave before their request has come whole: nothing failed here."""
    return Response(status_code=499)  # nobody reads it


async def on_exception(request: Request, _error: Exception) -> Response:
    """Handler for everything else; Starlette raises it again and uvicorn logs it."""
    response = error_response(unforeseen(), form_for(request.scope))
    response.headers["X-Request-Id"] = request.state.request_id  # it answers around all middleware
    return response


HANDLERS: Mapping[Any, ExceptionHandler] = {
    MeshError: on_mesh_error,
    HTTPException: on_http_exception,
    ClientDisconnect: on_client_gone,
    Exception: on_exception,
}
"""By the class of an exception that ends a request, as Starlette wants them: coroutines, as it has
others run on a thread, for which modules are read that a process without descriptors cannot."""
