"""Calls as Gemma 4 writes them: ``call:NAME{key:<|"|>text<|"|>,other:[1,true]}``. FunctionGemma has
another mark around texts."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from mesh.models.splitting import overlap
from mesh.models.written_calls import Schemas, WrittenCall

_LEAD = "call:"
_HEAD = re.compile(r"call:([\w.-]{1,256})(?=\{)")
_HEAD_BEGUN = re.compile(r"call:[\w.-]{0,256}")
_WORD = re.compile(r"([^\s{}\[\],:<]++)\s*+(?=(\S))")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null"}
"""With what its template makes of nothing."""
_SIGNS = {"{": "{", "[": "[", "}": "}", "]": "]", ",": ", ", ":": ": "}


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """A call with bare keys, and texts between tokens of their own."""

    quote: str = '<|"|>'

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts in it that a tokenizer may have special tokens for."""
        return (self.quote,)

    def begun(self, held: str, schemas: Schemas) -> tuple[int, WrittenCall] | None:
        """The call that `held` begins, and how many characters of that it does not read."""
        del schemas
        head = _HEAD.match(held)
        return None if head is None else (head.end(), GemmaCall(head[1], self.quote))

    def may_begin(self, held: str) -> bool:
        """Whether more text may make a call of what begins so, which is none yet."""
        return _LEAD.startswith(held) or _HEAD_BEGUN.fullmatch(held) is not None

    def around(self, name: str) -> tuple[str, str] | None:
        """None: the arguments are no JSON."""
        del name
        return None


class GemmaCall(WrittenCall):
    """One such call from the brace on that opens its arguments. It has ended with its last brace,
    or where a mark begins."""

    def __init__(self, name: str, quote: str) -> None:
        super().__init__(name)
        self._quote = quote
        self._left = ""
        self._depth = 0
        self._in_text = False

    def found(self) -> tuple[str, str] | None:
        """Name and arguments of a call that has ended, if it may be one."""
        return self.name, self.arguments

    def take(self, text: str) -> str:
        """Read on; what of `text` stands behind the call."""
        self.text += text
        self._left += text
        while not self.is_ended and (self._text() if self._in_text else self._sign()):
            pass
        if not self.is_ended:
            return ""
        rest, self._left = self._left, ""
        self.text = self.text[: len(self.text) - len(rest)]
        return rest

    def _text(self) -> bool:
        """More of a text; whether to go on."""
        said, mark, rest = self._left.partition(self._quote)
        if not mark:
            certain = len(said) - overlap(said, self._quote)
            said, rest = said[:certain], said[certain:]
        self.arguments += json.dumps(said, ensure_ascii=False)[1:-1] + ('"' if mark else "")
        self._left, self._in_text = rest, not mark
        return bool(mark)

    def _sign(self) -> bool:
        """What stands next outside of texts; whether to go on."""
        left = self._left = self._left.lstrip()
        if not left or (self._quote.startswith(left) and left != self._quote):
            return False
        if left.startswith(self._quote):
            self.arguments, self._in_text = self.arguments + '"', True
            self._left = left[len(self._quote) :]
            return True
        if left[0] == "<":
            self.is_ended = True
            return False
        if (sign := _SIGNS.get(left[0])) is not None:
            self.arguments += sign
            self._depth += (left[0] in "{[") - (left[0] in "}]")
            self._left, self.is_ended = left[1:], self._depth <= 0
            return True
        word = _WORD.match(left)
        if word is None:
            return False
        is_key = word[2] == ":"
        plain = None if is_key else _WORDS.get(word[1], _NUMBER.fullmatch(word[1]) and word[1])
        self.arguments += plain or json.dumps(word[1], ensure_ascii=False)
        self._left = left[word.end() :]
        return True
