"""The most bytes that one token stands for: a bound that refuses a text before it is tokenised.

Looks at a tokenizer's own tables only and knows nothing of models or requests.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import models, pre_tokenizers

_COMPOSING = 4
"""NFC makes text shorter: three Hangul letters of nine bytes become a syllable of three."""


WHITE_SPACE = tuple(sign for sign in map(chr, range(0x3001)) if sign.isspace())
"""What a tokenizer may leave out: at the ends of a text, in rows, beside special tokens."""


def longest_token_bytes(backend: Any) -> int | None:
    """The most UTF-8 bytes of text, white space left out, that one token can stand for.

    None when that cannot be said: a tokenizer that puts one token in the place of any length of
    unknown text, or that drops text. `backend` is a `tokenizers.Tokenizer`. Takes a tenth of a
    second for a large vocabulary.
    """
    if backend is None or not isinstance(backend.model, models.BPE):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not backend.model.byte_fallback and not vocabulary.keys() >= _ALPHABET:
        return None
    shrinks = _shrinks(backend)
    if shrinks is None:
        return None
    return shrinks * max(len(token.encode()) for token in vocabulary)


_ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())
"""One sign for each byte: with all of them no text is unknown."""


def _shrinks(backend: Any) -> int | None:
    """By how much a text can become shorter before its tokens are looked up; None: at will."""
    if backend.pre_tokenizer is not None and b'"Removed"' in backend.pre_tokenizer.__getstate__():
        return None
    if backend.normalizer is None:
        return 1
    normalizer = json.loads(backend.normalizer.__getstate__())
    factor = 1
    for step in normalizer.get("normalizers", [normalizer]):
        match step:
            case {"type": "Prepend"}:
                pass
            case {"type": "NFC"}:
                factor *= _COMPOSING
            case {"type": "Replace", "pattern": {"String": " "}}:
                pass
            case _:
                return None
    return factor
