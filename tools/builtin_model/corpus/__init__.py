"""Seeded generators of the text on which the built-in model is trained.

Pure Python: the same seed gives the same text everywhere. Knows nothing of tokenizers or torch.
"""

from __future__ import annotations

from tools.builtin_model.corpus.document import (
    ASSISTANT,
    CHAT_TEMPLATE,
    END,
    END_OF_TEXT,
    PAD,
    SPECIAL_TOKENS,
    SYSTEM,
    USER,
    Document,
    Message,
    render,
)
from tools.builtin_model.corpus.mixture import held_out_documents, training_documents

__all__ = [
    "ASSISTANT",
    "CHAT_TEMPLATE",
    "END",
    "END_OF_TEXT",
    "PAD",
    "SPECIAL_TOKENS",
    "SYSTEM",
    "USER",
    "Document",
    "Message",
    "held_out_documents",
    "render",
    "training_documents",
]
