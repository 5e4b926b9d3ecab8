"""`POST /v1/embeddings`: vectors of texts, whose angles say how near their meanings are."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Annotated, Literal

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mesh.api.auth import caller_of
from mesh.api.bodies import Strict, read_body
from mesh.api.openai.prompts import Prompt, at_most, texts_of
from mesh.api.openai.sampling import Hint
from mesh.api.services import ApiSettings, Generations
from mesh.api.sse import unless_gone
from mesh.api.text_embedding import MAX_DIMENSIONS, MAX_TEXTS, EmbeddedTexts, Vector, embed_texts
from mesh.types import ModelId


class EmbeddingsBody(Strict):
    """The body of `POST /v1/embeddings`: `input` is a text, a list of token ids, or a list of
    either. With `dimensions` that many numbers of each vector are kept, made one long again, which
    is for models that were trained for it. What is too long for the model is refused.
    """

    model: Annotated[str, Field(min_length=1, max_length=256)]
    input: Annotated[Prompt, at_most(MAX_TEXTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    # hints
    user: Hint = None


def routes(generations: Generations, settings: ApiSettings) -> list[Route]:
    """The endpoint's route."""

    async def create(request: Request) -> Response:
        """What an embedding model makes of texts, as OpenAI has it: `{"object": "list", "data":
        [{"object": "embedding", "index", "embedding"}], "model", "usage"}`. Vectors are one long;
        in `base64` they are fp32, the lowest byte first. Models that were not made for it refuse
        with `not_supported`.
        """
        body = await read_body(request, EmbeddingsBody, settings)
        caller, texts = caller_of(request), texts_of(body.input, "input")
        work = embed_texts(
            generations, caller, ModelId(body.model), texts, dimensions=body.dimensions
        )
        found = await unless_gone(request.receive, work)
        in_base64 = body.encoding_format == "base64"
        written = await written_out(found, in_base64=in_base64)
        return Response(_whole(body.model, found, written), media_type="application/json")

    return [Route("/v1/embeddings", create, methods=["POST"])]


async def written_out(found: EmbeddedTexts, *, in_base64: bool = False) -> list[bytes]:
    """Each vector as JSON; others have their turn in between, as there may be millions of
    numbers."""
    written = []
    for vector in found.vectors:
        written.append(_in_base64(vector) if in_base64 else msgspec.json.encode(vector.tolist()))
        await asyncio.sleep(0)
    return written


def _in_base64(vector: Vector) -> bytes:
    return b'"' + base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)) + b'"'


def _whole(model: str, found: EmbeddedTexts, written: list[bytes]) -> bytes:
    data = [
        msgspec.json.encode(
            {"object": "embedding", "index": index, "embedding": msgspec.Raw(vector)}
        )
        for index, vector in enumerate(written)
    ]
    used = {"prompt_tokens": found.prompt_tokens, "total_tokens": found.prompt_tokens}
    body = {"object": "list", "data": [*map(msgspec.Raw, data)], "model": model, "usage": used}
    return msgspec.json.encode(body)
