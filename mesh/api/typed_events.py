"""An answer as typed events, streamed or whole: what the forms of an API that tell an answer
item by item have in common. A writer makes the events; `mesh.api.sse` sends them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mesh.api.auth import Caller
from mesh.api.field_names import FieldNames
from mesh.api.openai.streaming import Bill, unfinished
from mesh.api.sse import encode, unless_gone
from mesh.errors import MeshError
from mesh.types import Done, StreamFrame

Event = dict[str, Any]
"""As clients read it; its `type` is also the name of the server-sent event."""


class EventWriter(Protocol):
    """Writes one answer, frame by frame, in one API's form."""

    answer: dict[str, Any]
    """The whole answer, once it has ended."""

    def take(self, frame: StreamFrame) -> list[Event]:
        """The events of a frame."""

    def fail(self, error: MeshError) -> list[Event]:
        """The events that end an answer so."""


class TypedAnswer:
    """One answer: either its `chunks` are sent or it is told `whole`."""

    def __init__(
        self,
        frames: AsyncGenerator[StreamFrame, None],
        writer: EventWriter,
        caller: Caller,
        names: FieldNames,
    ) -> None:
        """Its tokens are charged to the caller; errors have the API's own `names`."""
        self._frames = frames
        self._writer = writer
        self._caller = caller
        self._names = names

    async def whole(self, request: Request) -> Response:
        """The whole answer. Raises MeshError; the generation ends with the client."""
        return JSONResponse(await unless_gone(request.receive, self._written()))

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The server-sent events, whole ones. Raises MeshError."""
        async with aclosing(self._events()) as events:
            async for some in events:
                for chunk in _encoded(some):
                    yield chunk

    def failure(self, error: MeshError) -> Sequence[bytes]:
        """The last events of a stream that has begun and fails."""
        return _encoded(self._writer.fail(error))

    async def _written(self) -> dict[str, Any]:
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass
        return self._writer.answer

    async def _events(self) -> AsyncGenerator[list[Event], None]:
        bill = Bill(self._caller)
        with self._names.in_errors():
            async with aclosing(self._frames):
                async for frame in self._frames:
                    bill.take(frame)
                    yield self._writer.take(frame)
                    if isinstance(frame, Done):
                        return
            raise unfinished()


def _encoded(events: Sequence[Event]) -> list[bytes]:
    return [encode(event, event=event["type"]) for event in events]
