"""An answer with choices, streamed or whole, the same for chats and completions.

The order of a stream: the opening (chat's role), the text, the finish reason, with `include_usage`
the token counts, ``[DONE]``. Chunks without news of the text carry an empty piece, never an empty
list of choices, which some clients cannot read. Where there are several choices their chunks come
as they are ready, each choice's in order.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mesh.api.auth import Caller
from mesh.api.openai.answers import (
    Diagnostic,
    Head,
    ThoughtTokens,
    diagnostic,
    extension,
    usage,
)
from mesh.api.openai.schemas import MAX_LOGPROBS
from mesh.api.openai.several import Frames, Of
from mesh.api.resumable import KeptStreams
from mesh.api.services import ApiSettings
from mesh.api.sse import (
    DONE,
    EventStream,
    FailureEvents,
    encode,
    plain_failure,
    unless_gone,
)
from mesh.errors import BadRequest, InternalError
from mesh.types import Done, PromptPiece, StreamFrame, TokenDelta, TokenLogprob, ToolCallDelta

_NOTHING = TokenDelta("", ())


@dataclass(slots=True)
class Said:
    """All that was said for one choice, as far as it has come."""

    prompt: list[PromptPiece] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)
    thought: ThoughtTokens = field(default_factory=ThoughtTokens)
    done: Done | None = None

    def take(self, frame: StreamFrame) -> None:
        """Add a frame."""
        self.thought.take(frame)
        if isinstance(frame, TokenDelta):
            self.texts.append(frame.text)
            self.thoughts.append(frame.reasoning)
            self.logprobs += frame.logprobs
            self.calls += frame.tool_calls
        elif isinstance(frame, PromptPiece):
            self.prompt.append(frame)
        elif isinstance(frame, Done):
            self.done = frame

    @property
    def answer(self) -> TokenDelta:
        """What followed the prompt, as one delta."""
        said, thought = "".join(self.texts), "".join(self.thoughts)
        return TokenDelta(said, (), tuple(self.logprobs), 0, thought, tuple(self.calls))


class Style(Protocol):
    """One endpoint's form of a choice. One instance per choice."""

    def opening(self, first: StreamFrame) -> dict[str, Any] | None:
        """The first choice of a stream, before what comes `first`."""

    def piece(self, delta: TokenDelta | PromptPiece) -> dict[str, Any]:
        """A choice with more text, reasoning or calls."""

    def ending(self, finish_reason: str) -> dict[str, Any]:
        """The last choice of a stream."""

    def whole(self, said: Said, finish_reason: str) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""


async def whole(
    request: Request, frames: Frames, styles: Sequence[Style], head: Head, caller: Caller
) -> Response:
    """The whole answer as one object, with a choice for each of `styles`. Raises MeshError; the
    generation ends with the client."""
    bill = Bill(caller, head.per_prompt)
    ended = await unless_gone(request.receive, collected(frames, len(styles), bill))
    all_done = [done for _, done in ended]
    body = head.whole(
        [
            style.whole(said, done.finish_reason)
            for style, (said, done) in zip(styles, ended, strict=True)
        ]
    )
    used = usage(all_done, sum(said.thought.count for said, _ in ended), head.per_prompt)
    return JSONResponse({**body, "usage": used, "hearthnet": extension(all_done)})


def streamed(
    chunks: AsyncGenerator[bytes, None],
    answer_id: str,
    settings: ApiSettings,
    caller: Caller,
    streams: KeptStreams | None = None,
    *,
    failure: FailureEvents = plain_failure,
) -> Response:
    """The events of an answer for a caller, who can resume them where `streams` keep them."""
    if streams is None:
        return EventStream(chunks, ping_s=settings.ping_s, failure=failure)
    owner = caller.principal.account
    streams.keep(owner, answer_id, chunks, failure=failure)
    kept = streams.follow(owner, answer_id, -1)
    # The id is in every chunk, but a connection may break before the first.
    named = {"X-Stream-Id": answer_id}
    return EventStream(kept, headers=named, ping_s=settings.ping_s, failure=failure)


async def events(
    frames: Frames, styles: Sequence[Style], head: Head, caller: Caller, *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events, whole ones; its tokens are charged to the caller."""
    pending: dict[str, Any] = {"usage": None} if include_usage else {}
    unopened = set(range(len(styles)))
    all_done: dict[int, Done] = {}
    thought = [ThoughtTokens() for _ in styles]
    bill = Bill(caller, head.per_prompt)
    last: dict[str, Any] = {}
    async with aclosing(frames):
        async for item in frames:
            index, frame = (item.index, item.frame) if isinstance(item, Of) else (0, item)
            style = styles[index]
            bill.take(frame, index)
            thought[index].take(frame)
            if isinstance(frame, TokenDelta | PromptPiece) and is_empty(frame):
                continue
            if index in unopened and (opening := style.opening(frame)) is not None:
                yield encode(head.whole([opening]) | pending)
            unopened.discard(index)
            if isinstance(frame, Done):
                all_done[index] = frame
                last = head.whole([style.ending(frame.finish_reason)])
                if len(all_done) == len(styles):
                    break
                yield encode(last | pending)
            else:
                yield encode(_more(head, style, frame) | pending)
    if len(all_done) < len(styles):
        raise unfinished()
    in_order = [all_done[index] for index in range(len(styles))]
    if include_usage:
        yield encode(last | pending)
        used = usage(in_order, sum(each.count for each in thought), head.per_prompt)
        last = head.whole([]) | {"usage": used}
    yield encode(last | {"hearthnet": extension(in_order)})
    yield DONE


def _more(head: Head, style: Style, frame: TokenDelta | PromptPiece | Diagnostic) -> dict[str, Any]:
    """A chunk with more of a choice, or of what happens to its route."""
    if isinstance(frame, TokenDelta | PromptPiece):
        return head.whole([style.piece(frame)])
    return head.whole([style.piece(_NOTHING)]) | {"hearthnet": diagnostic(frame)}


async def collected(frames: Frames, count: int, bill: Bill) -> list[tuple[Said, Done]]:
    """All that was said for each choice, and its end."""
    said = [Said() for _ in range(count)]
    async with aclosing(frames):
        async for item in frames:
            index, frame = (item.index, item.frame) if isinstance(item, Of) else (0, item)
            bill.take(frame, index)
            said[index].take(frame)
            if isinstance(frame, Done) and all(each.done is not None for each in said):
                break
    ended = [(each, each.done) for each in said if each.done is not None]
    if len(ended) < count:
        raise unfinished()
    return ended


class Bill:
    """Counts tokens against the caller's quota as they come, and what an answer keeps of them.

    The prompt's are charged with the first token: whoever leaves after that has had it computed.
    """

    def __init__(self, caller: Caller, per_prompt: int = 1) -> None:
        """`caller` pays: for a prompt once, as `usage` counts it, with `per_prompt` answers."""
        self._caller = caller
        self._per_prompt = per_prompt
        self._left = MAX_LOGPROBS

    def take(self, frame: StreamFrame, index: int = 0) -> None:
        """Count a frame of the answer number `index`. Raises BadRequest for more than
        `MAX_LOGPROBS`, and what charging does."""
        is_first = index % self._per_prompt == 0
        if isinstance(frame, TokenDelta):
            self._caller.charge(is_first * frame.prompt_tokens + len(frame.token_ids))
        elif isinstance(frame, PromptPiece):
            self._caller.charge(is_first * len(frame.token_ids))
            self._left -= sum(1 + len(each.top) for each in frame.logprobs)
            if self._left < 0:
                raise BadRequest(
                    f"The prompts have more log-probabilities than the {MAX_LOGPROBS} that one"
                    " answer takes, alternatives included.",
                    fix="Send fewer prompts in one request, or ask for fewer `logprobs`.",
                    param="logprobs",
                )


def is_empty(frame: TokenDelta | PromptPiece) -> bool:
    """Whether a frame has nothing that a client is shown."""
    if isinstance(frame, PromptPiece):
        return not (frame.text or frame.logprobs)
    return not (frame.text or frame.reasoning or frame.tool_calls or frame.logprobs)


def unfinished() -> InternalError:
    """The error for frames that end without `Done`."""
    return InternalError("The generation ended without a result.", fix="Try again.")
