"""Who may talk to the API: the Host, Origin and key checks, before anything else looks.

On loopback a page in a browser can reach us by rebinding its own name to 127.0.0.1, so the Host
must be a loopback name. A request that names an Origin comes from a web page; only pages of this
very server may ask. `/healthz` is open to all.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mesh.api.faults import error_response
from mesh.api.services import ApiSettings
from mesh.config import is_loopback
from mesh.errors import Forbidden, MeshError, Unauthorized

_OPEN = frozenset({"/healthz"})


class Gate:
    """ASGI middleware that refuses requests the settings do not admit."""

    def __init__(self, app: ASGIApp, settings: ApiSettings) -> None:
        self._app = app
        self._loopback = is_loopback(settings.host)
        self._key = settings.api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then pass on."""
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            refusal = self._refusal(Headers(scope=scope))
            if refusal is not None:
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> MeshError | None:
        hosts = headers.getlist("host")
        if self._loopback and not (len(hosts) == 1 and is_loopback(_host_name(hosts[0]))):
            return Forbidden(
                "The Host header does not name this machine's loopback address.",
                fix="Use http://127.0.0.1:PORT or http://localhost:PORT.",
                param="Host",
            )
        origin = headers.get("origin")
        if origin is not None and origin not in {f"{s}://{h}" for h in hosts for s in _SCHEMES}:
            return Forbidden(
                "Web pages of another origin may not use this API.",
                fix="Ask from a program, or from a page that this server serves.",
                param="Origin",
            )
        if self._key is not None and not _same(headers.get("authorization", ""), self._key):
            return Unauthorized(
                "The API key is missing or wrong.",
                fix="Send `Authorization: Bearer KEY` (for clients: HEARTHNET_API_KEY).",
            )
        return None


_SCHEMES = ("http", "https")


def _host_name(host: str) -> str:
    """The name in ``name``, ``name:port``, ``[v6]`` or ``[v6]:port``; empty when malformed."""
    if host.startswith("["):
        name, bracket, rest = host[1:].partition("]")
        return name if bracket and (not rest or rest[1:].isdecimal()) else ""
    name, colon, port = host.partition(":")
    return name.lower() if not colon or port.isdecimal() else ""


def _same(authorization: str, key: str) -> bool:
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode())
