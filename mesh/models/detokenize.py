"""Text from token ids as they arrive, never half a character.

All parts that an `IncrementalDecoder` emits, joined, equal the decoding of all its ids at once,
behind a text where they go on with one.
What that takes depends on how the tokenizer turns tokens into text, hence three kinds; each costs a
bounded number of operations per token however long the text grows. Nothing here knows what a model
is.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LONGEST_WAIT = 32
"""Ids that may wait for the character they begin; only bytes that make none wait that long."""


class IncrementalDecoder(Protocol):
    """Feed ids in order, one at a time; then `flush`, and where something stands between them."""

    def push(self, token_id: int) -> str:
        """The text that is certain now; empty while a character is incomplete."""

    def flush(self) -> str:
        """What was held back, with U+FFFD for bytes that never became a character."""


def decoder_for(
    backend: Any, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()
) -> IncrementalDecoder:
    """The decoder that suits a tokenizer.

    `backend` is its `tokenizers.Tokenizer`, or None when it has none; `decode` is what the parts
    joined must equal, special tokens left out. `before` are ids of some text, where the parts are
    to go on with a text and not to begin one.
    """
    window = _Window(decode, before)
    if backend is None:
        return _GuessingDecoder(window)
    kinds = _decoder_kinds(_description(backend))
    tokens = _Tokens(backend)
    if kinds == ["ByteLevel"]:
        return _ByteLevelDecoder(tokens)
    return _RunDecoder(window, tokens, byte_fallback="ByteFallback" in kinds)


class TokenSpelling:
    """The bytes that each token stands for in the middle of a text, be they half a character."""

    def __init__(
        self, backend: Any, decode: Callable[[Sequence[int]], str], before: Sequence[int]
    ) -> None:
        """`decode` leaves special tokens in; `before` are ids that a text may begin with."""
        self._backend = backend
        self._kinds = [] if backend is None else _decoder_kinds(_description(backend))
        self._decode = decode
        self._before = before
        self._skipped = len(decode(before))

    def of(self, token_id: int) -> bytes:
        """Those of a token, special or not; none for an id that the tokenizer does not know."""
        token = None if self._backend is None else self._backend.id_to_token(token_id)
        if token is not None and self._kinds == ["ByteLevel"]:
            return _bytes_of(token)
        if token is not None and "ByteFallback" in self._kinds and _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(token[3:5])
        # Alone it would lose the space that many tokenizers drop at the start of a text.
        return self._decode([*self._before, token_id])[self._skipped :].encode()


class _Tokens:
    """The spelling of the tokens that make text; special and unknown ids make none."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}

    def spelling(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, or None."""
        if token_id in self._special:
            return None
        token: str | None = self._backend.id_to_token(token_id)
        return token


class _ByteLevelDecoder:
    """Byte-level BPE: every token is bytes, and text is their UTF-8 decoding."""

    def __init__(self, tokens: _Tokens) -> None:
        self._tokens = tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        token = self._tokens.spelling(token_id)
        return "" if token is None else self._utf8.decode(_bytes_of(token))

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class _Window:
    """Decodes new ids behind the one before them, and cuts that one's text off.

    The id before keeps what a tokenizer does to the start of a text from happening in the middle.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int]) -> None:
        self._decode = decode
        self._before = list(before)
        self._before_text = decode(self._before)
        self.pending: list[int] = []

    def text(self) -> str:
        """What the pending ids add to the text so far."""
        return self._decode([*self._before, *self.pending])[len(self._before_text) :]

    def take(self) -> str:
        """The same, and the pending ids are done with."""
        if not self.pending:
            return ""
        text = self.text()
        if text or not self._before:
            self._before = self.pending[-1:]
            self._before_text = self._decode(self._before)
        self.pending = []
        return text


class _RunDecoder:
    """Tokenizers that decode token by token, but runs of single-byte tokens as a whole.

    One wrong byte turns all of its run into U+FFFD, so nothing of a run is certain before its end.
    """

    def __init__(self, window: _Window, tokens: _Tokens, *, byte_fallback: bool) -> None:
        self._window = window
        self._tokens = tokens
        self._byte_fallback = byte_fallback

    def push(self, token_id: int) -> str:
        token = self._tokens.spelling(token_id)
        if token is None:
            return ""
        self._window.pending.append(token_id)
        in_run = self._byte_fallback and _BYTE_TOKEN.fullmatch(token)
        return "" if in_run else self._window.take()

    def flush(self) -> str:
        return self._window.take()


class _GuessingDecoder:
    """Tokenizers whose inside is not known: a last U+FFFD may still become a character."""

    def __init__(self, window: _Window) -> None:
        self._window = window

    def push(self, token_id: int) -> str:
        self._window.pending.append(token_id)
        unfinished = self._window.text().endswith("\ufffd")
        wait = unfinished and len(self._window.pending) < _LONGEST_WAIT
        return "" if wait else self._window.take()

    def flush(self) -> str:
        return self._window.take()


def _bytes_of(token: str) -> bytes:
    table = _byte_table()
    try:
        return bytes(table[character] for character in token)
    except KeyError:  # an added token, stored as plain text
        return token.encode()


@cache
def _byte_table() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE (GPT-2) uses for bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


def _description(backend: Any) -> dict[str, Any] | None:
    # The decoder alone: the whole tokenizer as JSON would be megabytes.
    if backend.decoder is None:
        return None
    description: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return description


def _decoder_kinds(decoder: dict[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [kind for part in decoder["decoders"] for kind in _decoder_kinds(part)]
    return [str(decoder["type"])]
