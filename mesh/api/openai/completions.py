"""`POST /v1/completions`: continues texts or lists of token ids, without a chat template.

Evaluation harnesses ask it how likely a text is: `echo` with `logprobs`, and no token more.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mesh.api.auth import caller_of
from mesh.api.bodies import read_body
from mesh.api.openai.answers import Head, completion_logprobs
from mesh.api.openai.schemas import CompletionBody
from mesh.api.openai.several import frames_of
from mesh.api.openai.streaming import Said, events, streamed, whole
from mesh.api.resumable import KeptStreams
from mesh.api.services import ApiSettings, Generations
from mesh.types import PromptPiece, StreamFrame, TokenDelta, TokenLogprob
from mesh.units import characters


def routes(generations: Generations, settings: ApiSettings, kept: KeptStreams) -> list[Route]:
    """The endpoint's route."""

    async def create(request: Request) -> Response:
        """Continue texts, without a chat template: a `text_completion` with a choice for each
        prompt, or with `stream` its chunks. With several choices `usage` is of all together, and
        `hearthnet.choices` of each.
        """
        body = await read_body(request, CompletionBody, settings)
        request_id = f"cmpl-{secrets.token_hex(16)}"  # who has it may resume the stream
        caller = caller_of(request)
        asked = [
            replace(each, may_wake=caller.may_wake)
            for each in body.to_requests(request_id, caller.principal)
        ]
        frames = frames_of(generations, asked)
        told = body.logprobs is not None
        styles = [_TextStyle(number, with_logprobs=told) for number in range(len(asked))]
        head = Head(request_id, "text_completion", body.model, body.per_prompt)
        if not body.stream:
            return await whole(request, frames, styles, head, caller)
        chunks = events(frames, styles, head, caller, include_usage=body.include_usage)
        return streamed(chunks, request_id, settings, caller, kept if body.resumable else None)

    return [Route("/v1/completions", create, methods=["POST"])]


class _TextStyle:
    """Choices with a text. Counts characters for the log-probabilities' offsets."""

    def __init__(self, index: int, *, with_logprobs: bool) -> None:
        self._index = index
        self._with_logprobs = with_logprobs
        self._offset = 0

    def opening(self, first: StreamFrame) -> None:
        return None

    def piece(self, delta: TokenDelta | PromptPiece) -> dict[str, Any]:
        if isinstance(delta, PromptPiece):
            shown = self._given_back(delta)
        else:
            shown = self._told(delta.logprobs)
        return self._choice(delta.text, shown if self._with_logprobs else None, None)

    def ending(self, finish_reason: str) -> dict[str, Any]:
        return self._choice("", None, finish_reason)

    def whole(self, said: Said, finish_reason: str) -> dict[str, Any]:
        answer, shown = said.answer, None
        if self._with_logprobs:
            parts = [self._given_back(piece) for piece in said.prompt]
            parts.append(self._told(answer.logprobs))
            shown = {key: [one for part in parts for one in part[key]] for key in parts[0]}
        text = "".join(piece.text for piece in said.prompt) + answer.text
        return self._choice(text, shown, finish_reason)

    def _given_back(self, piece: PromptPiece) -> dict[str, list[Any]]:
        self._offset += len(piece.text)  # what follows begins behind the whole prompt
        return completion_logprobs(piece.logprobs, piece.offsets)

    def _told(self, entries: tuple[TokenLogprob, ...]) -> dict[str, list[Any]]:
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += 0 if entry.is_hidden else characters(entry.token)
        return completion_logprobs(entries, offsets)

    def _choice(
        self, text: str, logprobs: dict[str, list[Any]] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
