"""`POST /v1/responses`: a chat in the form of OpenAI's Responses API, of which nothing is stored.

A second form of what `/v1/chat/completions` does: another body for the same generation, other words
for its frames.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.api.auth import caller_of
from mesh.api.bodies import read_body
from mesh.api.field_names import FieldNames
from mesh.api.openai.response_body import ResponseBody
from mesh.api.openai.response_output import ResponseWriter
from mesh.api.openai.streaming import streamed
from mesh.api.resumable import KeptStreams
from mesh.api.services import ApiSettings, Generations
from mesh.api.sse import unless_gone
from mesh.api.typed_events import TypedAnswer

_NAMES = FieldNames(
    (
        (re.compile(r"\bresponse_format\.json_schema\.schema\b"), "text.format.schema"),
        (re.compile(r"\bresponse_format\b"), "text.format"),
        (re.compile(r"\b(tools\.\d+)\.function\b"), r"\1"),
        (re.compile(r"\bmax_tokens\b"), "max_output_tokens"),
        (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
    ),
    said="input",
)


def routes(generations: Generations, settings: ApiSettings, kept: KeptStreams) -> list[Route]:
    """The endpoint's route."""

    async def create(request: Request) -> Response:
        """Answer a chat, as OpenAI's Responses API has it: a `response`, or with `stream` its
        typed events. Nothing is stored: `store` is false in every answer, and what was said before
        comes as `input`. What a model thinks is an item of the type `reasoning`, whole as its
        `summary`. The `hearthnet` object of the answer says what ran where and how fast; events
        `hearthnet.event` with one tell what happens to the route.
        """
        body = await read_body(request, ResponseBody, settings)
        response_id = f"resp_{secrets.token_hex(16)}"  # who has it may resume the stream
        caller = caller_of(request)
        asked = body.to_request(response_id, caller.principal)
        frames = generations.generate(replace(asked, may_wake=caller.may_wake))
        writer = ResponseWriter(response_id, body.echo())
        answer = TypedAnswer(frames, writer, caller, _NAMES)
        if not body.stream:
            return await answer.whole(request)
        streams = kept if body.resumable else None
        return streamed(
            answer.chunks(), response_id, settings, caller, streams, failure=answer.failure
        )

    async def count(request: Request) -> Response:
        """`{"input_tokens": how many tokens the prompt of such a response has}`: those of the
        model's own chat template and tokenizer, tools included. Waits until the model is up.
        """
        body, caller = await read_body(request, ResponseBody, settings), caller_of(request)
        asked = body.to_request(f"count_{secrets.token_hex(16)}", caller.principal)
        with _NAMES.in_errors():
            counting = generations.count(replace(asked, may_wake=caller.may_wake))
            tokens = await unless_gone(request.receive, counting)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

    return [
        Route("/v1/responses", create, methods=["POST"]),
        Route("/v1/responses/input_tokens", count, methods=["POST"]),
    ]
