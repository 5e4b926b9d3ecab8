"""The versions of nnsight clients that are served, and the refusal of the others.

Clients before 0.8 speak Socket.IO first and send their job only then; they are led as far as
sending it, because its answer is the one sentence of ours that they show to people.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from mesh.api.sockets import MAX_BYTES
from mesh.errors import UnsupportedClient

_VERSION = re.compile(r"(\d+)\.(\d+)(\D|$)")
_SERVED = ("0", "8")
_INSTALL = "Install one that works: pip install 'nnsight>=0.8.1,<0.9'."
_SOCKET_IO = "/ws/socket.io"
_PATIENCE_S = 30.0
_ENGINE = {"upgrades": [], "pingInterval": 25_000, "pingTimeout": 20_000, "maxPayload": MAX_BYTES}


def require_served(version: str | None) -> None:
    """Check the header ``nnsight-version``. Raises UnsupportedClient."""
    if not version:
        raise UnsupportedClient(
            "This node serves nnsight 0.8 clients; this one does not say its version.",
            fix=_INSTALL,
            param="nnsight-version",
        )
    match = _VERSION.match(version)
    if match is None or match.groups()[:2] != _SERVED:
        raise UnsupportedClient(
            f"This node serves nnsight 0.8 clients; this one is {version[:32]!r}.",
            fix=_INSTALL,
            param="nnsight-version",
        )


def routes() -> list[Route | WebSocketRoute]:
    """Where older clients connect first."""
    return [
        Route(_SOCKET_IO, _refuse, methods=["GET", "POST"]),
        WebSocketRoute(_SOCKET_IO, _lead_on),
    ]


async def _refuse(_request: Request) -> Response:
    """Where clients of nnsight before 0.8 hear that they are too old."""
    raise UnsupportedClient(
        "Clients that speak Socket.IO (nnsight before 0.8) are not served here.", fix=_INSTALL
    )


async def _lead_on(socket: WebSocket) -> None:
    """Engine.IO's and Socket.IO's opening packets, then silence until the client leaves."""
    await socket.accept()
    await socket.send_text("0" + json.dumps({"sid": secrets.token_hex(10), **_ENGINE}))
    try:
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                packet = await socket.receive_text()
                if packet.startswith("40"):
                    await socket.send_text("40" + json.dumps({"sid": secrets.token_hex(10)}))
    except TimeoutError:
        await socket.close()
    except (WebSocketDisconnect, KeyError):  # it left, or sent bytes
        return
