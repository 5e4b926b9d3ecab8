"""What the endpoints for embeddings of all APIs share: texts in, their vectors out.

Each text is a generation of nothing, so that it waits, is counted and survives a lost hop as a chat
does; a few run at a time.
"""

from __future__ import annotations

import math
import secrets
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from mesh.api.auth import Caller
from mesh.api.openai.several import frames_of, heard
from mesh.api.openai.streaming import Bill, collected
from mesh.api.services import Generations
from mesh.errors import BadRequest, InternalError
from mesh.types import GenerationRequest, ModelId, SamplingParams, StreamFrame

MAX_TEXTS = 2048
"""Of one request, as OpenAI has it."""
MAX_DIMENSIONS = 1 << 16

Vector: TypeAlias = "array[float]"
"""In fp32."""


@dataclass(frozen=True, slots=True)
class EmbeddedTexts:
    """The vectors of all texts, in their order, and how many tokens those had together."""

    vectors: tuple[Vector, ...]
    prompt_tokens: int


async def embed_texts(
    generations: Generations,
    caller: Caller,
    model: ModelId,
    texts: Sequence[Any],
    *,
    dimensions: int | None = None,
    truncates: bool = False,
    hear: Callable[[StreamFrame], None] = lambda _: None,
) -> EmbeddedTexts:
    """What the model makes of each of `texts`, which are text or lists of token ids: vectors one
    long, of which the first `dimensions` are kept where that is said. Of a text that is too long
    the end is left out where it `truncates`. Of no text it waits until the model is up. `hear` is
    told each frame of them. Raises MeshError."""
    name, several = f"embd-{secrets.token_hex(16)}", len(texts) > 1
    one = GenerationRequest(
        name,
        model,
        sampling=SamplingParams(max_tokens=0),
        principal=caller.principal,
        may_wake=caller.may_wake,
        draft=False,
        truncates=truncates,
        embeds=True,
    )
    if not texts:
        await generations.load(one)
        return EmbeddedTexts((), 0)
    asked = [
        replace(
            one,
            request_id=f"{name}-{number}" if several else name,
            prompt=text if isinstance(text, str) else None,
            prompt_ids=None if isinstance(text, str) else tuple(text),
        )
        for number, text in enumerate(texts)
    ]
    frames = heard(frames_of(generations, asked), hear)
    ended = await collected(frames, len(asked), Bill(caller))
    vectors = tuple(_vector(done.embedding, dimensions) for _, done in ended)
    return EmbeddedTexts(vectors, sum(done.prompt_tokens for _, done in ended))


def _vector(values: bytes, dimensions: int | None) -> Vector:
    """As many of them as are wanted, one long again: models that were trained for that put what
    matters first (https://arxiv.org/abs/2205.13147)."""
    vector = array("f", values)
    if sys.byteorder == "big":
        vector.byteswap()
    if not vector:
        raise InternalError("No embedding came.", fix="See the node's log.")
    if dimensions is None or dimensions == len(vector):
        return vector
    if dimensions > len(vector):
        raise BadRequest(
            f"dimensions: {dimensions} is more than the {len(vector)} that this model's embeddings"
            " have.",
            fix="Ask for fewer, or leave it out.",
            param="dimensions",
        )
    kept = vector[:dimensions]
    length = math.hypot(*kept)
    return array("f", (each / length for each in kept)) if length else kept
