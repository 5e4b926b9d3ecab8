"""`POST /v1/messages`, and what of a prompt's tokens it counts beforehand.

A third form of what `/v1/chat/completions` does: another body for the same generation, other words
for its frames.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.anthropic.bodies import AskedBody, MessagesBody
from mesh.api.anthropic.output import MessageWriter
from mesh.api.auth import caller_of
from mesh.api.bodies import read_body
from mesh.api.field_names import FieldNames
from mesh.api.services import ApiSettings, Generations
from mesh.api.sse import EventStream, unless_gone
from mesh.api.typed_events import TypedAnswer
from mesh.types import GenerationRequest

_NAMES = FieldNames(
    (
        (re.compile(r"\bresponse_format\.json_schema\.schema\b"), "output_config.format.schema"),
        (re.compile(r"\bresponse_format\b"), "output_config.format"),
        (re.compile(r"\b(tools\.\d+)\.function\.parameters\b"), r"\1.input_schema"),
        (re.compile(r"\b(tools\.\d+)\.function\b"), r"\1"),
    ),
    said="messages",
)


def routes(generations: Generations, settings: ApiSettings) -> list[Route]:
    """The endpoints' routes."""

    def asked_by(request: Request, body: AskedBody, message_id: str) -> GenerationRequest:
        caller = caller_of(request)
        return replace(body.to_request(message_id, caller.principal), may_wake=caller.may_wake)

    async def create(request: Request) -> Response:
        """Answer a chat, as Anthropic's Messages API has it: a `message`, or with `stream` its
        typed events. What a model thinks is in blocks of the type `thinking`, without a signature.
        The `hearthnet` object of the answer, in a stream of its `message_delta`, says what ran
        where and how fast; events `ping` with one tell what happens to the route.
        """
        body = await read_body(request, MessagesBody, settings)
        asked = asked_by(request, body, f"msg_{secrets.token_hex(16)}")
        frames = generations.generate(asked)
        tells_thoughts = body.thinking is None or body.thinking.display != "omitted"
        writer = MessageWriter(
            asked.request_id, body.model, body.max_tokens, tells_thoughts=tells_thoughts
        )
        answer = TypedAnswer(frames, writer, caller_of(request), _NAMES)
        if not body.stream:
            return await answer.whole(request)
        return EventStream(answer.chunks(), ping_s=settings.ping_s, failure=answer.failure)

    async def count(request: Request) -> Response:
        """`{"input_tokens": how many tokens the prompt of such a message has}`: those of the
        model's own chat template and tokenizer, tools included. Waits until the model is up.
        """
        body = await read_body(request, AskedBody, settings)
        asked = asked_by(request, body, f"count_{secrets.token_hex(16)}")
        with _NAMES.in_errors():
            tokens = await unless_gone(request.receive, generations.count(asked))
        return JSONResponse({"input_tokens": tokens})

    return [
        Route("/v1/messages", create, methods=["POST"]),
        Route("/v1/messages/count_tokens", count, methods=["POST"]),
    ]
