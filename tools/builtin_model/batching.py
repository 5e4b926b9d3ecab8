"""Turn a stream of texts into batches of token ids, each text in a row of its own.

A row begins where its text begins, as a prompt does, and holds nothing else: what was said in
another chat must never be a hint. Texts of about the same length share a batch, so little is
padding. Knows a tokenizer and the special ids. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch

from tools.builtin_model.corpus import END, END_OF_TEXT, PAD, SPECIAL_TOKENS, SYSTEM, USER, Document

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TEXTS_PER_CALL = 256
_END, _PAD = SPECIAL_TOKENS.index(END), SPECIAL_TOKENS.index(PAD)
_OTHERS = (SPECIAL_TOKENS.index(USER), SPECIAL_TOKENS.index(SYSTEM))
# What the user writes is mostly chance. The model sees it all, and guesses one token in ten of it:
# the output head and its gradient are a fifth of the work.
_OTHERS_EVERY = 10
# A row may be padded by a quarter of its batch's length; lengths are multiples of this, because a
# matrix product of a size that was not met before costs its preparation.
_SHORTEST = 0.75
_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts of about one length: `ids` (rows, length) int64; `scored` (rows, length - 1) bool.

    `scored` says whether the prediction of the token at the next position counts.
    """

    ids: torch.Tensor
    scored: torch.Tensor


def token_ids(tokenizer: Tokenizer, documents: Iterator[Document]) -> Iterator[list[int]]:
    """The ids of each text, end-of-text included."""
    while batch := list(islice(documents, _TEXTS_PER_CALL)):
        texts = [document.text + END_OF_TEXT for document in batch]
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            yield encoding.ids


def take(texts: Iterator[list[int]], tokens: int, longest: int) -> list[list[int]]:
    """The next texts, until they have that many tokens. What is beyond `longest` is cut off."""
    taken: list[list[int]] = []
    while tokens > 0:
        taken.append(next(texts)[:longest])
        tokens -= len(taken[-1])
    return taken


def batches(texts: Sequence[list[int]], tokens: int) -> list[Batch]:
    """The texts, ordered by length and cut into batches of at most `tokens` tokens or one row."""
    made: list[Batch] = []
    rows: list[list[int]] = []
    for text in sorted(texts, key=len, reverse=True):
        length = len(rows[0]) if rows else 0
        if rows and (len(text) < _SHORTEST * length or (len(rows) + 1) * length > tokens):
            made.append(_batch(rows))
            rows = []
        rows.append(text)
    return [*made, _batch(rows)] if rows else made


def _batch(rows: list[list[int]]) -> Batch:
    length = 1 + -(-(len(rows[0]) - 1) // _MULTIPLE) * _MULTIPLE
    ids = torch.full((len(rows), length), _PAD)
    scored = torch.zeros(len(rows), length - 1, dtype=torch.bool)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = torch.tensor(row)
        scored[at, : len(row) - 1] = torch.tensor(_scored(row)[1:])
    return Batch(ids, scored)


def _scored(row: list[int]) -> list[bool]:
    """Which tokens of a text count: all that the assistant or a narrator says, a few of others'."""
    scored, theirs = [], False
    for at, token in enumerate(row):
        if token == _END:
            theirs = False
        scored.append(not theirs or at % _OTHERS_EVERY == 0)
        if token in _OTHERS:
            theirs = True
    return scored
