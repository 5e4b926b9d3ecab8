"""How much longer or shorter a tokenizer makes texts, read off what it says it does to them.

Both bound work before it is done: a text that stands for more tokens than a model takes is refused
unread, and so is one that a tokenizer of a stranger may blow up beyond memory, whose library ends
the process when it has none.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import models, pre_tokenizers

from mesh.errors import BadCheckpoint

MAX_GROWN_BYTES = 128 << 20
"""What a text may become before its tokens are looked up; the library takes some 17 times of it."""
_MAX_SPELT = 64
"""Times as long as its tokens a text may be."""

_COMPOSING = 4
"""NFC makes text shorter: three Hangul letters of nine bytes become a syllable of three."""
_ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())
"""One sign for each byte: with all of them no text is unknown."""


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


def most_growth(backend: Any) -> int:
    """The most bytes that one of a text can become before its tokens are looked up.

    Raises BadCheckpoint for a tokenizer that makes too much of the shortest text, or of tokens.
    """
    if backend is None:
        return 1
    grown = _grown(backend.normalizer) * _grown(backend.pre_tokenizer)
    spelt = _grown(backend.decoder)
    if grown > MAX_GROWN_BYTES or spelt > _MAX_SPELT:
        raise BadCheckpoint(
            f"The model's tokenizer makes up to {_shown(grown)} letters of one, and of one of its"
            f" tokens up to {_shown(spelt)}.",
            fix="Use another revision of the model.",
        )
    return grown


def _shown(count: int) -> str:
    return str(count) if count < 1 << 20 else "millions of"


def _grown(part: Any) -> int:
    factor = 1
    for step in _steps(part):
        factor = min(factor * _grown_by(step), MAX_GROWN_BYTES + 1)
    return factor


def _grown_by(step: Mapping[str, Any]) -> int:
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1, -(-len(new.encode()) // len(old.encode())))
        case (
            {"type": "Replace", "content": str(new)}  # wherever nothing is, too
            | {"type": "Prepend", "prepend": str(new)}
            | {"type": "Metaspace", "replacement": str(new)}
        ):
            return 1 + len(new.encode())
        case {"type": "Precompiled", "precompiled_charsmap": str(encoded)}:
            return _longest_of_charsmap(encoded)
        case {"type": "ByteLevel" | "WordPiece" | "BPEDecoder"}:
            return 2
    return 1


def _longest_of_charsmap(encoded: str) -> int:
    """The longest text that it puts in the place of a letter: they lie behind its trie, each with
    a zero behind it (https://github.com/google/sentencepiece/blob/master/src/normalizer.cc)."""
    data = base64.b64decode(encoded)
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(1, *map(len, texts.split(b"\0")))


def _shrinks(backend: Any) -> int | None:
    """By how much a text can become shorter before its tokens are looked up; None: at will."""
    if backend.pre_tokenizer is not None and b'"Removed"' in backend.pre_tokenizer.__getstate__():
        return None
    factor = 1
    for step in _steps(backend.normalizer):
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


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """What a normalizer, a pre-tokenizer or a decoder does, one step after the other."""
    left = [] if part is None else [json.loads(part.__getstate__())]
    while left:
        step = left.pop(0)
        inner = [step.get(each) for each in ("normalizers", "pretokenizers", "decoders")]
        several = next((each for each in inner if each is not None), None)
        if several is None:
            yield step
        else:
            left[:0] = several
