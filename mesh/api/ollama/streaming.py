"""Ollama's answers, whole or as lines of JSON, from the frames of a generation.

Frames that tell of the route have no place there. Lines have no comments either: while nothing is
said, nothing is sent.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mesh.api.auth import Caller
from mesh.api.faults import OLLAMA, error_body
from mesh.api.ollama.answers import Stopwatch, Wording, head
from mesh.api.openai.several import heard
from mesh.api.openai.streaming import Bill, collected, is_empty, unfinished
from mesh.api.sse import EventStream, unless_gone
from mesh.errors import MeshError
from mesh.types import Done, StreamFrame, TokenDelta

Frames = AsyncGenerator[StreamFrame, None]
_NOTHING = TokenDelta("", ())


class LineStream(EventStream):
    """A response of lines, each a JSON object; one that fails midway ends with its error."""

    media_type = "application/x-ndjson"

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        super().__init__(chunks, failure=_failure)


def line(said: dict[str, Any]) -> bytes:
    """An object as a line. ASCII only, as in `mesh.api.sse.encode`."""
    return json.dumps(said, separators=(",", ":")).encode("ascii") + b"\n"


async def whole(
    request: Request, frames: Frames, form: Wording, model: str, caller: Caller
) -> Response:
    """The whole answer as one object. Raises MeshError; the generation ends with the client."""
    watch = Stopwatch()
    work = collected(heard(frames, watch.take), 1, Bill(caller))
    ((said, done),) = await unless_gone(request.receive, work)
    return JSONResponse({**head(model), **form(said.answer), **watch.last(done)})


async def lines(
    frames: Frames, form: Wording, model: str, caller: Caller
) -> AsyncGenerator[bytes, None]:
    """The answer as lines; its tokens are charged to the caller. Raises MeshError."""
    watch, bill = Stopwatch(), Bill(caller)
    async with aclosing(frames):
        async for frame in frames:
            bill.take(frame)
            watch.take(frame)
            if isinstance(frame, Done):
                yield line({**head(model), **form(_NOTHING), **watch.last(frame)})
                return
            if isinstance(frame, TokenDelta) and not is_empty(frame):
                yield line({**head(model), **form(frame), "done": False})
    raise unfinished()


def _failure(error: MeshError) -> Sequence[bytes]:
    return [line(error_body(error, OLLAMA))]
