"""Server-sent events: chunks pulled as fast as the client reads, and no faster.

At most one item is in flight between their source and the socket, so a slow reader slows its own
stream and nothing else. When the client leaves, the source is closed at once. Knows nothing of
what the events say.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mesh.api.faults import error_body, error_response, unforeseen
from mesh.errors import BadRequest, MeshError, NodeStopped
from mesh.types import is_whole

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


def encode(payload: dict[str, Any], *, event: str | None = None, id_: int | None = None) -> bytes:
    """One event. ASCII only: some clients split lines at every character Unicode calls a break."""
    head = "" if id_ is None else f"id: {id_}\n"
    if event is not None:
        head += f"event: {event}\n"
    return f"{head}data: {json.dumps(payload, separators=(',', ':'))}\n\n".encode("ascii")


FailureEvents = Callable[[MeshError], Sequence[bytes]]
"""The last events of a stream that has begun and fails."""


def plain_failure(error: MeshError) -> Sequence[bytes]:
    """One event that carries the error."""
    return [encode(error_body(error))]


def last_event_id(request: Request) -> int | None:
    """The number of the last event that a reader who comes back has; None when it has none.

    Raises BadRequest for what is no number of an event.
    """
    text = request.headers.get("last-event-id")
    if text is None:
        return None
    if not is_whole(text, 18):
        raise BadRequest(
            "Last-Event-ID is not an event's number.",
            fix="Send the last `id:` you read, or leave the header out.",
            param="Last-Event-ID",
        )
    return int(text)


async def unless_gone(
    receive: Receive, work: Coroutine[Any, Any, _T], closing: asyncio.Event | None = None
) -> _T:
    """The result of `work`, which has ended in any case when this does. The request's body must
    have been read.

    Raises what `work` does, ClientDisconnect when the client left first, and NodeStopped when
    `closing` was set or the server waits for the request no longer.
    """
    task = asyncio.create_task(work, name="api-answer")
    watchers = {asyncio.create_task(_disconnected(receive), name="api-disconnect")}
    if closing is not None:
        watchers.add(asyncio.create_task(_set(closing), name="api-closing"))
    try:
        await asyncio.wait({task, *watchers}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if closing is not None and closing.is_set():
            raise _stopped()
        raise ClientDisconnect
    except asyncio.CancelledError:  # a request is cancelled by a server that closes, and only then
        raise _stopped() from None
    finally:
        abandoned = not task.done()
        for each in (task, *watchers):
            each.cancel()
        outcome, *_ = await asyncio.gather(task, *watchers, return_exceptions=True)
        if abandoned and isinstance(outcome, Exception):
            logger.warning("closing an abandoned answer failed", exc_info=outcome)


def _stopped() -> NodeStopped:
    return NodeStopped(
        "This node was stopped before the answer had ended.",
        fix="Ask again when it is up, or ask another node.",
    )


class Chunks(Protocol):
    """Where an answer's bytes come from, as a generator has it."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Itself."""

    def aclose(self) -> Awaitable[None]:
        """Nobody wants more."""


class EventStream(Response):
    """A response of server-sent events, with a comment whenever none came for `ping_s` seconds.

    `chunks` are whole events. What it raises before its first chunk becomes an ordinary error
    response; later, the last events that `failure` makes of the error.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: Chunks,
        closing: asyncio.Event | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        ping_s: float | None = None,
        failure: FailureEvents = plain_failure,
    ) -> None:
        always = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers={**always, **(headers or {})})
        del self.headers["content-length"]
        self._chunks = chunks
        self._closing = closing
        self._ping_s = ping_s
        self._failure = failure
        self._sending = asyncio.Lock()
        self._sent = 0
        self._started = False
        self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the chunks end, the client leaves or the server closes."""
        try:
            await unless_gone(receive, self._run(scope, receive, send), self._closing)
        except ClientDisconnect:
            pass
        except NodeStopped as error:
            is_endless = self._closing is not None
            if self._started and is_endless:  # nothing is missing
                await send({"type": "http.response.body", "body": b""})
            else:
                await self._end_with(error, scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._ping_s is None:
            await self._pass_on(scope, receive, send)
            return
        # Beside the chunks: a wait for the next one that could be left would be a task for each.
        pinging = asyncio.create_task(self._ping(send, self._ping_s), name="api-ping")
        try:
            await self._pass_on(scope, receive, send)
        finally:
            pinging.cancel()
            await asyncio.wait({pinging})

    async def _ping(self, send: Send, ping_s: float) -> None:
        while True:
            sent = self._sent
            await asyncio.sleep(ping_s)
            if sent == self._sent and not self._sending.locked():
                await self._send(send, PING)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._chunks):
                async for chunk in self._chunks:
                    await self._send(send, chunk)
        except MeshError as error:
            await self._end_with(error, scope, receive, send)
            return
        except Exception:
            await self._end_pings()
            if self._started:
                await self._fail(send, unforeseen())
                await send({"type": "http.response.body", "body": b""})
            raise
        await self._end_pings()
        if not self._started:
            await self._send(send, b"")  # a stream without a single event is a stream as well
        await send({"type": "http.response.body", "body": b""})

    async def _end_with(self, error: MeshError, scope: Scope, receive: Receive, send: Send) -> None:
        await self._end_pings()
        if not self._started:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        await self._fail(send, error)
        await send({"type": "http.response.body", "body": b""})

    async def _fail(self, send: Send, error: MeshError) -> None:
        for event in self._failure(error):
            await self._send(send, event)

    async def _end_pings(self) -> None:
        async with self._sending:  # one may be on its way
            self._ended = True

    async def _send(self, send: Send, chunk: bytes) -> None:
        async with self._sending:
            if not (self._ended and chunk == PING):
                await self._write(send, chunk)

    async def _write(self, send: Send, chunk: bytes) -> None:
        self._sent += 1
        if not self._started:
            self._started = True
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
        await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _set(event: asyncio.Event) -> None:
    await event.wait()
