"""An embedding whose rows stay in the blocks of a GGUF file until somebody asks for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mesh.models.filling import mapped_file
from mesh.models.gguf.container import BLOCK_TYPES
from mesh.models.gguf.decoding import decode_rows, stored_rows
from mesh.models.header import TensorEntry

_SCALE = "embed_scale"
"""What transformers calls the factor of an embedding that multiplies what it gives."""


class StoredEmbedding(nn.Module):
    """As an embedding of transformers. Of a vocabulary a prompt has few words: no others are
    decoded, and none is kept."""

    def __init__(self, entry: TensorEntry, dtype: torch.dtype, scale: float | None) -> None:
        """`entry` is in blocks; what comes out is in `dtype`. Raises BadCheckpoint."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = entry.shape
        self._entry = entry
        self._dtype = dtype
        self._scale = scale
        self._rows = stored_rows(mapped_file(entry.file, [entry]), entry, self.embedding_dim)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids (…) as rows (…, columns)."""
        words, places = torch.unique(ids, return_inverse=True)
        rows = decode_rows(self._rows[words], self._entry).to(self._dtype)
        if self._scale is not None:
            rows = rows * torch.tensor(self._scale, dtype=self._dtype)
        return rows[places]


def stored_embedding(
    module: Any, entry: TensorEntry | None, dtype: torch.dtype
) -> StoredEmbedding | None:
    """What can stand for `module`; None where it does more than look rows up and scale them, or
    `entry` is not in blocks."""
    if entry is None or entry.coding or entry.dtype not in BLOCK_TYPES or entry.unlike is not None:
        return None
    if entry.shape != tuple(module.weight.shape):
        return None
    if type(module) is nn.Embedding:
        return StoredEmbedding(entry, dtype, None)
    scale = getattr(module, f"scalar_{_SCALE}", None)
    if not isinstance(module, nn.Embedding) or not isinstance(scale, float):
        return None
    return StoredEmbedding(entry, dtype, scale)
