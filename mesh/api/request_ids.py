"""`X-Request-Id`: a name for each request, on its answer and in the log's lines about it.

A client's own name is taken over where it is one; else it is given one. It is no secret and grants
nothing: a stream is resumed by its own id.
"""

from __future__ import annotations

import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mesh.clock import loop_time
from mesh.logs import REQUEST

logger = logging.getLogger(__name__)

HEADER = "X-Request-Id"
STATE = "request_id"
"""The name in a request's state of its id."""

_SANE = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TOLD = ("/v1/", "/api/")
"""Of what is posted below these, the log tells the end: no path there names anything secret."""


class RequestIds:
    """ASGI middleware, around all others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Name the request, then pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        name = given if _SANE.fullmatch(given) else f"req-{secrets.token_hex(8)}"
        scope.setdefault("state", {})[STATE] = name
        REQUEST.set(name)  # each request has a task of its own
        ending = _Ending(scope)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                ending.status = message["status"]
                MutableHeaders(scope=message)[HEADER] = name
            elif not message.get("more_body", False):
                ending.log()
            await send(message)

        try:
            await self._app(scope, receive, named)
        finally:
            ending.log()  # of what failed, or whose client left


class _Ending:
    """How a request ends, logged once."""

    def __init__(self, scope: Scope) -> None:
        self.status = 500
        """What nobody answered is answered by what is around all middleware."""
        self._path = scope["path"]
        self._is_told = scope["method"] == "POST" and self._path.startswith(_TOLD)
        self._began_s = loop_time()

    def log(self) -> None:
        """Say it, the first time."""
        if self._is_told:
            self._is_told = False
            took_s = loop_time() - self._began_s
            logger.info("POST %s: %s in %.2f s", self._path, self.status, took_s)
