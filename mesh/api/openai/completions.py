"""`POST /v1/completions`: continues a text or a list of token ids, without a chat template."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mesh.api.auth import caller_of
from mesh.api.bodies import read_body
from mesh.api.openai.answers import Head, characters, completion_logprobs
from mesh.api.openai.schemas import CompletionBody
from mesh.api.openai.streaming import events, streamed, whole
from mesh.api.resumable import KeptStreams
from mesh.api.services import ApiSettings, Generations
from mesh.types import TokenDelta, TokenLogprob


def routes(generations: Generations, settings: ApiSettings, kept: KeptStreams) -> list[Route]:
    """The endpoint's route."""

    async def create(request: Request) -> Response:
        body = await read_body(request, CompletionBody, settings)
        request_id = f"cmpl-{secrets.token_hex(16)}"  # who has it may resume the stream
        caller = caller_of(request)
        asked = replace(body.to_request(request_id, caller.principal), may_wake=caller.may_wake)
        frames = generations.generate(asked)
        style = _TextStyle(with_logprobs=body.logprobs is not None)
        head = Head(request_id, "text_completion", body.model)
        if not body.stream:
            return await whole(request, frames, style, head, caller)
        chunks = events(frames, style, head, caller, include_usage=body.include_usage)
        return streamed(chunks, head, settings, caller, kept if body.resumable else None)

    return [Route("/v1/completions", create, methods=["POST"])]


class _TextStyle:
    """Choices with a text. Counts characters for the log-probabilities' offsets."""

    def __init__(self, *, with_logprobs: bool) -> None:
        self._with_logprobs = with_logprobs
        self._offset = 0

    def opening(self) -> None:
        return None

    def piece(self, delta: TokenDelta) -> dict[str, Any]:
        return self._choice(delta.text, delta.logprobs, None)

    def ending(self, finish_reason: str) -> dict[str, Any]:
        return self._choice("", (), finish_reason)

    def whole(self, answer: TokenDelta, finish_reason: str) -> dict[str, Any]:
        return self._choice(answer.text, answer.logprobs, finish_reason)

    def _choice(
        self, text: str, logprobs: tuple[TokenLogprob, ...], finish_reason: str | None
    ) -> dict[str, Any]:
        shown = None
        if self._with_logprobs and (logprobs or finish_reason is None):
            shown = completion_logprobs(logprobs, self._offset)
            self._offset += sum(characters(entry.token) for entry in logprobs)
        return {"index": 0, "text": text, "logprobs": shown, "finish_reason": finish_reason}
