"""An answer to a completion request, streamed or whole, the same for both endpoints.

The order of a stream: the opening (chat's role), the text, the finish reason, with `include_usage`
the token counts, ``[DONE]``. Chunks without news of the text carry an empty piece, never an empty
list of choices, which some clients cannot read.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mesh.api.auth import Caller
from mesh.api.openai.answers import Head, diagnostic, extension, usage
from mesh.api.resumable import KeptStreams
from mesh.api.services import ApiSettings
from mesh.api.sse import DONE, PING, EventStream, encode, paced, unless_gone
from mesh.errors import InternalError
from mesh.types import Done, StreamFrame, TokenDelta, TokenLogprob


class Style(Protocol):
    """How one endpoint writes a choice. One instance per answer."""

    def opening(self) -> dict[str, Any] | None:
        """The first choice of a stream, before any text."""

    def piece(self, text: str, logprobs: tuple[TokenLogprob, ...]) -> dict[str, Any]:
        """A choice with more text."""

    def ending(self, finish_reason: str) -> dict[str, Any]:
        """The last choice of a stream."""

    def whole(
        self, text: str, logprobs: tuple[TokenLogprob, ...], finish_reason: str
    ) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""


async def charged(
    frames: AsyncIterator[StreamFrame], caller: Caller
) -> AsyncGenerator[StreamFrame, None]:
    """The same frames; their tokens count against the caller's quota as they come.

    The prompt's do with the first token: whoever leaves after that has had it computed.
    """
    try:
        async for frame in frames:
            if isinstance(frame, TokenDelta):
                caller.charge(frame.prompt_tokens + len(frame.token_ids))
            yield frame
    finally:
        if isinstance(frames, AsyncGenerator):
            await frames.aclose()


async def whole(
    request: Request, frames: AsyncIterator[StreamFrame], style: Style, head: Head
) -> Response:
    """The whole answer as one object. Raises MeshError; the generation ends with the client."""
    collected = await unless_gone(request.receive, _collect(frames))
    if collected is None:
        return Response(status_code=499)  # nobody reads it
    text, logprobs, done = collected
    body = head.whole([style.whole(text, logprobs, done.finish_reason)])
    return JSONResponse({**body, "usage": usage(done), "hearthnet": extension(done)})


def streamed(
    frames: AsyncIterator[StreamFrame],
    style: Style,
    head: Head,
    settings: ApiSettings,
    *,
    include_usage: bool,
    kept: tuple[KeptStreams, Caller] | None = None,
) -> Response:
    """The answer as server-sent events; with `kept`, one that the caller can resume."""
    chunks = _chunks(paced(frames, settings.ping_s), style, head, include_usage)
    if kept is None:
        return EventStream(chunks)
    streams, caller = kept
    owner = caller.principal.account
    streams.keep(owner, head.id, chunks)
    # The id is in every chunk, but a connection may break before the first.
    events = streams.follow(owner, head.id, -1)
    return EventStream(events, headers={"X-Request-Id": head.id})


async def _chunks(
    frames: AsyncGenerator[StreamFrame | None, None],
    style: Style,
    head: Head,
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    pending: dict[str, Any] = {"usage": None} if include_usage else {}
    opening = style.opening()
    done: Done | None = None
    async with aclosing(frames):
        async for frame in frames:
            if frame is None:
                yield PING
                continue
            if opening is not None:
                yield encode(head.whole([opening]) | pending)
                opening = None
            if isinstance(frame, Done):
                done = frame
                break
            if isinstance(frame, TokenDelta):
                if frame.text or frame.logprobs:
                    yield encode(head.whole([style.piece(frame.text, frame.logprobs)]) | pending)
            else:
                body = head.whole([style.piece("", ())]) | pending
                yield encode(body | {"hearthnet": diagnostic(frame)})
    if done is None:
        raise _unfinished()
    last = head.whole([style.ending(done.finish_reason)])
    if include_usage:
        yield encode(last | pending)
        last = head.whole([]) | {"usage": usage(done)}
    yield encode(last | {"hearthnet": extension(done)})
    yield DONE


async def _collect(
    frames: AsyncIterator[StreamFrame],
) -> tuple[str, tuple[TokenLogprob, ...], Done]:
    texts: list[str] = []
    logprobs: list[TokenLogprob] = []
    try:
        async for frame in frames:
            if isinstance(frame, TokenDelta):
                texts.append(frame.text)
                logprobs += frame.logprobs
            elif isinstance(frame, Done):
                return "".join(texts), tuple(logprobs), frame
    finally:
        if isinstance(frames, AsyncGenerator):
            await frames.aclose()
    raise _unfinished()


def _unfinished() -> InternalError:
    return InternalError("The generation ended without a result.", fix="Try again.")
