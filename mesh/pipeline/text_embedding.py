"""One vector for a whole text, as a model that was trained to makes it: an embedding.

The text goes through the hops like a prompt that nothing follows. What leaves the last one comes
here anyway; of it the rows that the model's pooling wants go through the final norm, which the last
hop runs for an asker without the ends, and what they come to is made one long.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import torch
import torch.nn.functional as F

from mesh.errors import NotSupported
from mesh.pipeline.completion import Completion
from mesh.pipeline.model import AskerModel, Text
from mesh.pipeline.prefill import TokenFeed
from mesh.types import StreamFrame


def require_embeds(model: AskerModel) -> None:
    """Raise NotSupported for a model that makes no embeddings."""
    if not model.pooling.kind:
        raise NotSupported(
            f"{model.model_id} makes no embeddings: {model.pooling.why_not}.",
            fix="Ask an embedding model, such as Qwen/Qwen3-Embedding-0.6B"
            " (`hearthnet deploy Qwen/Qwen3-Embedding-0.6B`).",
        )


def shortened(prompt: list[int], most: int, text: Text) -> list[int]:
    """As much of a prompt as `most` tokens are, without the end of its text: the token that ends
    every text, which models that read the last one were trained to read, stays."""
    if len(prompt) <= most:
        return prompt
    end = prompt[-1:] if prompt[-1] in text.eos_ids else []
    return [*prompt[: most - len(end)], *end]


async def embed_text(
    model: AskerModel, feed: TokenFeed, answer: Completion
) -> AsyncGenerator[StreamFrame, None]:
    """Have the answer bear the embedding of its whole prompt. Yields and raises as
    `TokenFeed.advance`."""
    norm = _as_it_came if model.ends is None else model.ends.norm
    total, last = torch.zeros(model.hidden_size), torch.zeros(0)
    async for read in feed.read(answer.prompt):
        if not isinstance(read, range):
            yield read
            continue
        last = feed.rows(read.start, read.stop)
        if model.pooling.kind == "mean":
            total += norm(last)[0].float().sum(dim=0).cpu()
    if model.pooling.kind == "last":
        total = norm(last[:, -1:])[0, 0].float().cpu()
    # The length takes care of what a mean is divided by.
    vector = F.normalize(total, dim=0)
    answer.embedding = vector.numpy().astype("<f4").tobytes()


def _as_it_came(rows: torch.Tensor) -> torch.Tensor:
    return rows
