"""`/mesh/v1/...`: the mesh as this node sees it, for the CLI, the TUI and scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.auth import Caller, caller_of
from mesh.api.feed import DashboardFeed
from mesh.api.services import ApiSettings, MeshView
from mesh.api.sse import PING, EventStream, encode, last_event_id
from mesh.errors import BadRequest


def routes(
    view: MeshView, settings: ApiSettings, closing: asyncio.Event, feed: DashboardFeed
) -> list[Route]:
    """The endpoints' routes; event streams end when `closing` is set."""

    async def status(_request: Request) -> Response:
        """The mesh as this node sees it. Answers as `MeshView.status`."""
        return JSONResponse(view.status())

    async def peers(_request: Request) -> Response:
        """The nodes around, as `peers`. Each as in `MeshView.peers`."""
        return JSONResponse({"peers": view.peers()})

    async def models(_request: Request) -> Response:
        """Each model that anybody holds, as `models`. Each as in `MeshView.models`."""
        return JSONResponse({"models": view.models()})

    async def privacy(_request: Request) -> Response:
        """Who can see what of prompts and answers. Answers as `MeshView.privacy`."""
        return JSONResponse(view.privacy())

    async def events(request: Request) -> Response:
        """What happens, as server-sent events without end; the header `Last-Event-ID` resumes. With
        `?with=status` the status and its changes, for dashboards: [the feed](feed.md).
        """
        after = last_event_id(request)
        wanted = request.query_params.get("with")
        if wanted not in (None, "status"):
            raise BadRequest(
                "with= is not `status`.", fix="Leave it out for events alone.", param="with"
            )
        caller = caller_of(request)
        chunks = (_events if wanted is None else _updates)(feed, caller, after)
        return EventStream(chunks, closing, ping_s=settings.ping_s)

    return [
        Route("/mesh/v1/status", status),
        Route("/mesh/v1/peers", peers),
        Route("/mesh/v1/models", models),
        Route("/mesh/v1/privacy", privacy),
        Route("/mesh/v1/events", events),
    ]


async def _events(
    feed: DashboardFeed, caller: Caller, after: int | None
) -> AsyncGenerator[bytes, None]:
    # The first bytes go out at once, so that a client knows that it is connected.
    yield PING
    async with aclosing(feed.events(caller, after)) as news:
        async for event in news:
            yield encode(event, event=event["type"], id_=event["id"])


async def _updates(
    feed: DashboardFeed, caller: Caller, after: int | None
) -> AsyncGenerator[bytes, None]:
    async with aclosing(feed.follow(caller, after)) as updates:
        async for update in updates:
            yield encode(update, event="update", id_=update["last_id"])
