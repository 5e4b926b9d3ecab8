"""Calls that are written as Python's are: ``name(key="text", other=[1, True])``."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mesh.models.written_calls import Schemas, WrittenCall, as_json

_HEAD = re.compile(r"([A-Za-z_][\w.-]{0,255})\(")
_HEAD_BEGUN = re.compile(r"[A-Za-z_][\w.-]{0,255}")
_ARGUMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(.+)", re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None}
"""JSON's, which models mix in."""
_RAW = {"\n": r"\n", "\r": r"\r", "\0": r"\0"}
"""What no string of Python may have in it as it is, and small models write."""


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """A call with arguments by their names only, all of them literals, of JSON's kinds."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts in it that a tokenizer may have special tokens for."""
        return ()

    def begun(self, held: str, schemas: Schemas) -> tuple[int, WrittenCall] | None:
        """The call that `held` begins, and how many characters of that it does not read."""
        del schemas
        head = _HEAD.match(held)
        return None if head is None else (head.end(), PythonCall(head[1]))

    def may_begin(self, held: str) -> bool:
        """Whether more text may make a call of what begins so, which is none yet."""
        return _HEAD_BEGUN.fullmatch(held) is not None

    def around(self, name: str) -> tuple[str, str] | None:
        """None: the arguments are no JSON."""
        del name
        return None


def as_python(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as a model with this form writes it."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


class PythonCall(WrittenCall):
    """One such call behind its opening bracket: an argument is told when it is whole. What is no
    argument ends it, and then it is none."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "{")
        self._argument: list[str] = []
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def found(self) -> tuple[str, str] | None:
        """Name and arguments of a call that has ended, if it may be one."""
        return (self.name, self.arguments) if self.arguments.endswith("}") else None

    def take(self, text: str) -> str:
        """Read on; what of `text` stands behind the call."""
        for place, sign in enumerate(text):
            if not self._quote and not self._depth and sign in ",)]}":
                self.is_ended = not self._add() or sign != ","
                if self.is_ended and sign == ")" and not self._argument:
                    self.arguments += "}"
            else:
                self._step(sign)
            if self.is_ended:
                self.text += text[: place + 1]
                return text[place + 1 :]
        self.text += text
        return ""

    def _step(self, sign: str) -> None:
        self._argument.append(_RAW.get(sign, sign) if self._quote else sign)
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif sign == "\\":
                self._is_escaped = True
            elif sign == self._quote:
                self._quote = ""
        elif sign in "'\"":
            self._quote = sign
        elif sign in "([{":
            self._depth += 1
        elif sign in ")]}":
            self._depth -= 1

    def _add(self) -> bool:
        """The argument that has ended; whether it is one, or there is none."""
        said = "".join(self._argument)
        if said.strip():
            found = _ARGUMENT.fullmatch(said)
            value = None if found is None else json_of(found[2].strip())
            if found is None or value is None:
                return False
            separator = "" if self.arguments == "{" else ", "
            self.arguments += f"{separator}{json.dumps(found[1])}: {value}"
        self._argument.clear()
        return True


def json_of(literal: str) -> str | None:
    """The JSON of a literal; None for what is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not have
            value = _value_of(ast.parse(literal, mode="eval").body)
        return as_json(value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _value_of(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value_of(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {
                _value_of(key): _value_of(value)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
    raise ValueError("it is no literal of JSON's kinds")
