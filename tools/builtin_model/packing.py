"""Turn a stream of texts into rows of token ids of one length.

Knows a tokenizer and the end-of-text id. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import torch

from tools.builtin_model.corpus import END_OF_TEXT, Document

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TEXTS_PER_CALL = 256


def token_ids(tokenizer: Tokenizer, documents: Iterator[Document]) -> Iterator[list[int]]:
    """The ids of each text, end-of-text included."""
    while batch := list(islice(documents, _TEXTS_PER_CALL)):
        texts = [document.text + END_OF_TEXT for document in batch]
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            yield encoding.ids


class Packer:
    """Fills rows from a stream of texts.

    A row starts where a text starts, as a prompt does. The rest of a text that did not fit starts
    every second row instead, so that the model also meets texts whose beginning it cannot see.
    """

    def __init__(self, texts: Iterator[list[int]]) -> None:
        self._texts = texts
        self._rest: list[int] = []
        self._rows = 0

    def batch(self, rows: int, length: int) -> torch.Tensor:
        """A (rows, length + 1) tensor: inputs and targets overlap by all but one."""
        return torch.tensor([self._row(length + 1) for _ in range(rows)])

    def _row(self, length: int) -> list[int]:
        self._rows += 1
        row = self._rest if self._rows % 2 else []
        while len(row) < length:
            row = row + next(self._texts)
        self._rest = row[length:]
        return row[:length]
