"""Requests that name what they want in another form than the usual one: with its host before it, as
those to a proxy do, or with a slash too many, as clients do that put paths together.

RFC 9112, 3.2.2: a server takes the first form as well, and the host in it counts, whatever the Host
header says. Knows nothing of which hosts and paths there are.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

_SLASHES = re.compile(r"/+")
_ABSOLUTE = re.compile(rb"https?://([^/]+)(/.*)?", re.IGNORECASE | re.DOTALL)


class OriginForm:
    """ASGI middleware: ``GET http://HOST/PATH`` is ``GET /PATH`` of that host."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Bring it into the usual form, then pass on."""
        absolute = _ABSOLUTE.fullmatch(scope.get("raw_path", b""))
        if absolute is not None:
            raw_path = absolute[2] or b"/"
            headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
            scope = {
                **scope,
                "raw_path": raw_path,
                "path": unquote(raw_path.decode("ascii")),
                "headers": [(b"host", absolute[1]), *headers],
            }
        await self._app(scope, receive, send)


class OneSlash:
    """ASGI middleware: ``//v1//models/`` is ``/v1/models``.

    A redirection would do for few: most programs lose the body, or the key, on the way.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Shorten, then pass on."""
        if "path" in scope:
            scope = {**scope, "path": _SLASHES.sub("/", scope["path"]).rstrip("/") or "/"}
        await self._app(scope, receive, send)
