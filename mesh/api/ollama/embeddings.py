"""`POST /api/embed`, and its older form `POST /api/embeddings`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mesh.api.auth import caller_of
from mesh.api.bodies import Strict, read_body
from mesh.api.ollama.answers import Stopwatch
from mesh.api.ollama.models import Catalogue
from mesh.api.ollama.options import Options
from mesh.api.openai.embeddings import written_out
from mesh.api.openai.prompts import texts_of
from mesh.api.openai.sampling import Hint
from mesh.api.services import ApiSettings, Generations
from mesh.api.sse import unless_gone
from mesh.api.text_embedding import MAX_DIMENSIONS, MAX_TEXTS, embed_texts


class _EmbeddingBody(Strict):
    """What both have. `options` and `keep_alive` have no effect: nothing is sampled, and how long a
    model stays is its deployment's."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    options: Options | None = None
    keep_alive: Hint = None


class OllamaEmbedBody(_EmbeddingBody):
    """The body of `POST /api/embed`: `input` is a text or several. With `dimensions` that many
    numbers of each vector are kept, made one long again, which is for models that were trained for
    it. The end of a text that is too long for the model is left out, as in Ollama, unless
    `truncate` is false. Of no text, or an empty one, there is no vector, once the model is up.
    `options` and `keep_alive` have no effect.
    """

    input: str | Annotated[list[str], Field(max_length=MAX_TEXTS, fail_fast=True)]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None


class OllamaEmbeddingBody(_EmbeddingBody):
    """The body of `POST /api/embeddings`: one text, as `prompt`. `options` and `keep_alive` have no
    effect."""

    prompt: str


def routes(generations: Generations, catalogue: Catalogue, settings: ApiSettings) -> list[Route]:
    """The endpoints' routes."""

    async def embed_all(request: Request) -> Response:
        """What an embedding model makes of texts, as Ollama has it: `{"model", "embeddings",
        "total_duration" in nanoseconds, "load_duration", "prompt_eval_count"}`. Vectors are one
        long. Models that were not made for it refuse with `not_supported`.
        """
        watch = Stopwatch()
        body = await read_body(request, OllamaEmbedBody, settings)
        work = embed_texts(
            generations,
            caller_of(request),
            catalogue.named(body.model),
            texts_of(body.input, "input") if body.input else (),
            dimensions=body.dimensions,
            truncates=body.truncate is not False,
            hear=watch.take,
        )
        found = await unless_gone(request.receive, work)
        took = watch.durations()
        vectors = [*map(msgspec.Raw, await written_out(found))]
        return _json(
            model=body.model,
            embeddings=vectors,
            total_duration=took["total_duration"],
            load_duration=took["load_duration"],
            prompt_eval_count=found.prompt_tokens,
        )

    async def embed_one(request: Request) -> Response:
        """The older form of `POST /api/embed`, for one text: `{"embedding"}`."""
        body = await read_body(request, OllamaEmbeddingBody, settings)
        texts = texts_of(body.prompt, "prompt")
        named = catalogue.named(body.model)
        work = embed_texts(generations, caller_of(request), named, texts, truncates=True)
        (vector,) = await written_out(await unless_gone(request.receive, work))
        return _json(embedding=msgspec.Raw(vector))

    return [
        Route("/api/embed", embed_all, methods=["POST"]),
        Route("/api/embeddings", embed_one, methods=["POST"]),
    ]


def _json(**fields: Any) -> Response:
    return Response(msgspec.json.encode(fields), media_type="application/json")
