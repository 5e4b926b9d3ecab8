"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mesh.api.auth import caller_of
from mesh.api.bodies import read_body
from mesh.api.openai.answers import Head, chat_logprobs
from mesh.api.openai.schemas import ChatBody
from mesh.api.openai.several import frames_of
from mesh.api.openai.streaming import Said, events, streamed, whole
from mesh.api.openai.tools import call_chunks, whole_calls
from mesh.api.resumable import KeptStreams
from mesh.api.services import ApiSettings, Generations
from mesh.types import PromptPiece, StreamFrame, TokenDelta, TokenLogprob


def routes(generations: Generations, settings: ApiSettings, kept: KeptStreams) -> list[Route]:
    """The endpoint's route."""

    async def create(request: Request) -> Response:
        """Answer a chat, as OpenAI's API has it: a `chat.completion`, or with `stream` its chunks
        as server-sent events. The `hearthnet` object of the answer says what ran where and how
        fast; chunks with one tell what happens to the route. With several choices `usage` is of all
        together, and `hearthnet.choices` of each.
        """
        body = await read_body(request, ChatBody, settings)
        request_id = f"chatcmpl-{secrets.token_hex(16)}"  # who has it may resume the stream
        caller = caller_of(request)
        asked = body.to_requests(request_id, caller.principal)
        frames = frames_of(generations, [replace(each, may_wake=caller.may_wake) for each in asked])
        told = bool(body.logprobs)
        styles = [_ChatStyle(number, with_logprobs=told) for number in range(len(asked))]
        if not body.stream:
            head = Head(request_id, "chat.completion", body.model, body.per_prompt)
            return await whole(request, frames, styles, head, caller)
        head = Head(request_id, "chat.completion.chunk", body.model, body.per_prompt)
        chunks = events(frames, styles, head, caller, include_usage=body.include_usage)
        return streamed(chunks, request_id, settings, caller, kept if body.resumable else None)

    return [Route("/v1/chat/completions", create, methods=["POST"])]


class _ChatStyle:
    """Choices with a message, or with a delta of it."""

    def __init__(self, index: int, *, with_logprobs: bool) -> None:
        self._index = index
        self._with_logprobs = with_logprobs

    def opening(self, first: StreamFrame) -> dict[str, Any]:
        # Vercel's AI SDK takes an empty text before a call for one that was said.
        is_silent = isinstance(first, TokenDelta) and bool(first.reasoning or first.tool_calls)
        return self._delta({"role": "assistant"} | ({} if is_silent else {"content": ""}))

    def piece(self, delta: TokenDelta | PromptPiece) -> dict[str, Any]:
        if isinstance(delta, PromptPiece):  # a chat is not given back
            return self._delta({})
        calls = {"tool_calls": call_chunks(delta.tool_calls)} if delta.tool_calls else {}
        is_text = delta.text or not (delta.reasoning or calls)
        said = {"content": delta.text} if is_text else {}
        return self._delta(_reasoning(delta) | said | calls, delta.logprobs)

    def ending(self, finish_reason: str) -> dict[str, Any]:
        return self._delta({}) | {"finish_reason": finish_reason}

    def whole(self, said: Said, finish_reason: str) -> dict[str, Any]:
        answer = said.answer
        calls = {"tool_calls": whole_calls(answer.tool_calls)} if answer.tool_calls else {}
        text = answer.text if answer.text or not calls else None
        message = {"role": "assistant", "content": text, "refusal": None, **calls}
        return {
            "index": self._index,
            "message": message | _reasoning(answer),
            "logprobs": chat_logprobs(answer.logprobs) if self._with_logprobs else None,
            "finish_reason": finish_reason,
        }

    def _delta(
        self, delta: dict[str, Any], logprobs: tuple[TokenLogprob, ...] = ()
    ) -> dict[str, Any]:
        shown = chat_logprobs(logprobs) if self._with_logprobs and logprobs else None
        return {"index": self._index, "delta": delta, "logprobs": shown, "finish_reason": None}


def _reasoning(delta: TokenDelta) -> dict[str, str]:
    """The field that DeepSeek's API and its followers have for it; OpenAI's own has none."""
    return {"reasoning_content": delta.reasoning} if delta.reasoning else {}
