"""`GET /v1/streams/{id}`: the rest of a stream whose connection broke.

The id is that of the answer (``chatcmpl-...``, ``cmpl-...``); ``Last-Event-ID`` says which event
came last. Only streams that were asked for with ``resumable: true`` are kept.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mesh.api.resumable import KeptStreams
from mesh.api.sse import EventStream
from mesh.errors import BadRequest


def routes(kept: KeptStreams) -> list[Route]:
    """The endpoint's route."""

    async def resume(request: Request) -> Response:
        last = request.headers.get("last-event-id", "-1")
        if not last.removeprefix("-").isdecimal():
            raise BadRequest(
                f"Last-Event-ID is {last!r}, not a number.",
                fix="Send the id of the last event you got.",
                param="Last-Event-ID",
            )
        return EventStream(kept.follow(request.path_params["stream_id"], int(last)))

    return [Route("/v1/streams/{stream_id}", resume, methods=["GET"])]
