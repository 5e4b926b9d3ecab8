"""`/mesh/v1/...`: the mesh as this node sees it, for the CLI, the TUI and scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.services import ApiSettings, MeshView
from mesh.api.sse import PING, EventStream, encode, last_event_id


def routes(view: MeshView, settings: ApiSettings, closing: asyncio.Event) -> list[Route]:
    """The endpoints' routes; event streams end when `closing` is set."""

    async def status(_request: Request) -> Response:
        return JSONResponse(view.status())

    async def peers(_request: Request) -> Response:
        return JSONResponse({"peers": view.peers()})

    async def models(_request: Request) -> Response:
        return JSONResponse({"models": view.models()})

    async def privacy(_request: Request) -> Response:
        return JSONResponse(view.privacy())

    async def events(request: Request) -> Response:
        after = last_event_id(request)
        return EventStream(_events(view, after), closing, ping_s=settings.ping_s)

    return [
        Route("/mesh/v1/status", status),
        Route("/mesh/v1/peers", peers),
        Route("/mesh/v1/models", models),
        Route("/mesh/v1/privacy", privacy),
        Route("/mesh/v1/events", events),
    ]


async def _events(view: MeshView, after: int | None) -> AsyncGenerator[bytes, None]:
    # The first bytes go out at once, so that a client knows that it is connected.
    yield PING
    async with aclosing(view.events(after)) as news:
        async for event in news:
            yield encode(event, event=event["type"], id_=event["id"])
