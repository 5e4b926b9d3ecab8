"""Measure the loss of a model on the held-out texts.

Each text is scored alone, from its first token on, as a reader meets it. Knows nothing of
training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from tools.builtin_model.batching import token_ids
from tools.builtin_model.corpus import Document

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def held_out_loss(model: Any, tokenizer: Tokenizer, documents: Sequence[Document]) -> float:
    """Mean negative log likelihood per token, in nats."""
    total, count = 0.0, 0
    with torch.inference_mode():
        for ids in token_ids(tokenizer, iter(documents)):
            row = torch.tensor([ids])
            logits = model(input_ids=row[:, :-1]).logits[0].float()  # (length - 1, vocabulary)
            total += functional.cross_entropy(logits, row[0, 1:], reduction="sum").item()
            count += len(ids) - 1
    return total / count
