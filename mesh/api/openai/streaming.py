"""An answer to a completion request, streamed or whole, the same for both endpoints.

The order of a stream: the opening (chat's role), the text, the finish reason, with `include_usage`
the token counts, ``[DONE]``. Chunks without news of the text carry an empty piece, never an empty
list of choices, which some clients cannot read.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mesh.api.auth import Caller
from mesh.api.openai.answers import Head, diagnostic, extension, usage
from mesh.api.resumable import KeptStreams
from mesh.api.services import ApiSettings
from mesh.api.sse import DONE, EventStream, encode, unless_gone
from mesh.errors import InternalError
from mesh.types import Done, StreamFrame, TokenDelta, TokenLogprob, ToolCallDelta

Frames = AsyncGenerator[StreamFrame, None]
_NOTHING = TokenDelta("", ())


class Style(Protocol):
    """One endpoint's form of a choice. One instance per answer."""

    def opening(self) -> dict[str, Any] | None:
        """The first choice of a stream, before any text."""

    def piece(self, delta: TokenDelta) -> dict[str, Any]:
        """A choice with more text, reasoning or calls."""

    def ending(self, finish_reason: str) -> dict[str, Any]:
        """The last choice of a stream."""

    def whole(self, answer: TokenDelta, finish_reason: str) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""


async def whole(
    request: Request, frames: Frames, style: Style, head: Head, caller: Caller
) -> Response:
    """The whole answer as one object. Raises MeshError; the generation ends with the client."""
    collected = await unless_gone(request.receive, _collect(frames, caller))
    if collected is None:
        return Response(status_code=499)  # nobody reads it
    answer, done = collected
    body = head.whole([style.whole(answer, done.finish_reason)])
    return JSONResponse({**body, "usage": usage(done), "hearthnet": extension(done)})


def streamed(
    chunks: AsyncGenerator[bytes, None],
    head: Head,
    settings: ApiSettings,
    caller: Caller,
    streams: KeptStreams | None = None,
) -> Response:
    """`events` for a caller, who can resume them where `streams` keep them."""
    if streams is None:
        return EventStream(chunks, ping_s=settings.ping_s)
    owner = caller.principal.account
    streams.keep(owner, head.id, chunks)
    kept = streams.follow(owner, head.id, -1)
    # The id is in every chunk, but a connection may break before the first.
    return EventStream(kept, headers={"X-Request-Id": head.id}, ping_s=settings.ping_s)


async def events(
    frames: Frames, style: Style, head: Head, caller: Caller, *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events, whole ones; its tokens are charged to the caller."""
    pending: dict[str, Any] = {"usage": None} if include_usage else {}
    opening = style.opening()
    done: Done | None = None
    async with aclosing(frames):
        async for frame in frames:
            _charge(caller, frame)
            if opening is not None:
                yield encode(head.whole([opening]) | pending)
                opening = None
            if isinstance(frame, Done):
                done = frame
                break
            if isinstance(frame, TokenDelta):
                if frame.text or frame.reasoning or frame.tool_calls or frame.logprobs:
                    yield encode(head.whole([style.piece(frame)]) | pending)
            else:
                body = head.whole([style.piece(_NOTHING)]) | pending
                yield encode(body | {"hearthnet": diagnostic(frame)})
    if done is None:
        raise _unfinished()
    last = head.whole([style.ending(done.finish_reason)])
    if include_usage:
        yield encode(last | pending)
        last = head.whole([]) | {"usage": usage(done)}
    yield encode(last | {"hearthnet": extension(done)})
    yield DONE


async def _collect(frames: Frames, caller: Caller) -> tuple[TokenDelta, Done]:
    """All that was said, as one delta, and the end."""
    texts: list[str] = []
    thoughts: list[str] = []
    logprobs: list[TokenLogprob] = []
    calls: list[ToolCallDelta] = []
    async with aclosing(frames):
        async for frame in frames:
            _charge(caller, frame)
            if isinstance(frame, TokenDelta):
                texts.append(frame.text)
                thoughts.append(frame.reasoning)
                logprobs += frame.logprobs
                calls += frame.tool_calls
            elif isinstance(frame, Done):
                said, thought = "".join(texts), "".join(thoughts)
                whole = TokenDelta(said, (), tuple(logprobs), 0, thought, tuple(calls))
                return whole, frame
    raise _unfinished()


def _charge(caller: Caller, frame: StreamFrame) -> None:
    """Count tokens against the caller's quota as they come.

    The prompt's do with the first token: whoever leaves after that has had it computed.
    """
    if isinstance(frame, TokenDelta):
        caller.charge(frame.prompt_tokens + len(frame.token_ids))


def _unfinished() -> InternalError:
    return InternalError("The generation ended without a result.", fix="Try again.")
