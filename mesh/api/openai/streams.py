"""`GET /v1/streams/{id}`: the rest of a stream whose connection broke.

The id is that of the answer (``chatcmpl-...``, ``cmpl-...``); ``Last-Event-ID`` says which event
came last. Only streams that were asked for with ``resumable: true`` are kept, each for whoever
asked.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mesh.api.auth import caller_of
from mesh.api.resumable import KeptStreams
from mesh.api.services import ApiSettings
from mesh.api.sse import EventStream, last_event_id


def routes(kept: KeptStreams, settings: ApiSettings) -> list[Route]:
    """The endpoint's route."""

    async def resume(request: Request) -> Response:
        """The rest of a stream that was asked for with `resumable`, for two minutes after its end,
        behind the event that the header `Last-Event-ID` names. The id is that of the answer.
        """
        last, owner = last_event_id(request), caller_of(request).principal.account
        after = -1 if last is None else last
        rest = kept.follow(owner, request.path_params["stream_id"], after)
        return EventStream(rest, ping_s=settings.ping_s)

    return [Route("/v1/streams/{stream_id}", resume, methods=["GET"])]
