"""`POST /v1/messages`, and what of a prompt's tokens it counts beforehand.

A third form of what `/v1/chat/completions` does: another body for the same generation, other words
for its frames.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.anthropic.bodies import AskedBody, MessagesBody
from mesh.api.anthropic.output import Event, MessageWriter
from mesh.api.auth import Caller, caller_of
from mesh.api.bodies import read_body
from mesh.api.field_names import FieldNames
from mesh.api.openai.streaming import Bill, unfinished
from mesh.api.services import ApiSettings, Generations
from mesh.api.sse import EventStream, encode, unless_gone
from mesh.errors import MeshError
from mesh.types import Done, GenerationRequest, StreamFrame

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
        writer = MessageWriter(asked.request_id, body.model, body.max_tokens)
        events = _events(frames, writer, caller_of(request))
        if not body.stream:
            return await _whole(request, events, writer)

        def failure(error: MeshError) -> Sequence[bytes]:
            return _encoded(writer.fail(error))

        return EventStream(_chunks(events), ping_s=settings.ping_s, failure=failure)

    async def count(request: Request) -> Response:
        """`{"input_tokens": how many tokens the prompt of such a message has}`: those of the
        model's own chat template and tokenizer, tools included. Waits until the model is up.
        """
        body = await read_body(request, AskedBody, settings)
        asked = asked_by(request, body, f"count_{secrets.token_hex(16)}")
        with _NAMES.in_errors():
            return JSONResponse({"input_tokens": await generations.count(asked)})

    return [
        Route("/v1/messages", create, methods=["POST"]),
        Route("/v1/messages/count_tokens", count, methods=["POST"]),
    ]


async def _whole(
    request: Request, events: AsyncGenerator[list[Event], None], writer: MessageWriter
) -> Response:
    """The whole answer. Raises MeshError; the generation ends with the client."""

    async def write() -> MessageWriter:
        async with aclosing(events):
            async for _ in events:
                pass
        return writer

    written = await unless_gone(request.receive, write())
    return Response(status_code=499) if written is None else JSONResponse(written.answer)


async def _chunks(events: AsyncGenerator[list[Event], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for some in events:
            for chunk in _encoded(some):
                yield chunk


def _encoded(events: Sequence[Event]) -> list[bytes]:
    return [encode(event, event=event["type"]) for event in events]


async def _events(
    frames: AsyncGenerator[StreamFrame, None], writer: MessageWriter, caller: Caller
) -> AsyncGenerator[list[Event], None]:
    """The events of each frame; the tokens are charged to the caller."""
    bill = Bill(caller)
    with _NAMES.in_errors():
        async with aclosing(frames):
            async for frame in frames:
                bill.take(frame)
                yield writer.take(frame)
                if isinstance(frame, Done):
                    return
        raise unfinished()
