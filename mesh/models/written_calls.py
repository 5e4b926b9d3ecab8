"""One call as it is written: what all ways have in common, and JSON objects."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of the arguments, by the functions' names."""

_HEAD = re.compile(
    r'\{\s*(?:"tool_call_id"\s*:\s*"[^"\\]*"\s*,\s*)?"(?:tool_)?name"\s*:\s*"([^"\\]+)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*'
)
"""A call up to the brace that opens its arguments."""


class WrittenCall(ABC):
    """What is read of one call. `arguments` is what is certain of them, as JSON; `text` all of it
    as it was written. `call_id` is the model's own; empty where it gives none."""

    def __init__(self, name: str = "", arguments: str = "", *, call_id: str = "") -> None:
        self.name = name
        self.arguments = arguments
        self.call_id = call_id
        self.text = ""
        self.is_ended = self.is_told = False
        self.told_chars = 0

    @abstractmethod
    def take(self, text: str) -> str:
        """Read on; what of `text` stands behind the call."""

    @abstractmethod
    def found(self) -> tuple[str, str] | None:
        """Name and arguments of a call that has ended, if it may be one."""


class Writing(Protocol):
    """How a family writes one call, apart from the marks around all of them."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts in it that a tokenizer may have special tokens for."""

    def begun(self, held: str, schemas: Schemas) -> tuple[int, WrittenCall] | None:
        """The call that `held` begins, and how many characters of that it does not read."""

    def may_begin(self, held: str) -> bool:
        """Whether more text may make a call of what begins so, which is none yet."""

    def around(self, name: str) -> tuple[str, str] | None:
        """What stands before and behind the arguments in a call of this function; None where they
        are no JSON."""


@dataclass(frozen=True, slots=True)
class Objects:
    """``{"name": ..., "arguments": {...}}``, whatever the keys are called."""

    name: str = "name"
    arguments: str = "arguments"
    needs_arguments: bool = False
    """Whether an object without any is no call."""

    @property
    def marks(self) -> tuple[str, ...]:
        return ()

    def begun(self, held: str, schemas: Schemas) -> tuple[int, WrittenCall] | None:
        del schemas
        is_call = held.startswith("{")
        return (0, JsonCall(needs_arguments=self.needs_arguments)) if is_call else None

    def may_begin(self, held: str) -> bool:
        del held
        return False

    def around(self, name: str) -> tuple[str, str] | None:
        return f'{{"{self.name}": {json.dumps(name)}, "{self.arguments}": ', "}"


@dataclass(frozen=True, slots=True)
class NamedObjects:
    """A `head` with the name, and behind it the arguments as an object.

    A group of `head` is called ``name``; one may be called ``id``, and is the call's. `lead` is
    what it begins with, and `unfinished` fits what begins with that and may become one. `spelled`
    is how it is written, with ``NAME`` for the name, and `tail` what follows the arguments.
    """

    head: re.Pattern[str]
    unfinished: re.Pattern[str]
    spelled: str
    lead: str = ""
    tail: str = ""
    marks: tuple[str, ...] = ()
    or_objects: bool = False
    """Whether a call may as well be written as `Objects` are."""

    def begun(self, held: str, schemas: Schemas) -> tuple[int, WrittenCall] | None:
        if self.or_objects and held.startswith("{"):
            return Objects().begun(held, schemas)
        head = self.head.match(held)
        if head is None:
            return None
        said = head.groupdict("")
        return head.end(), JsonCall(said["name"], call_id=said.get("id", ""))

    def may_begin(self, held: str) -> bool:
        return self.lead.startswith(held) or self.unfinished.fullmatch(held) is not None

    def around(self, name: str) -> tuple[str, str] | None:
        return self.spelled.replace("NAME", name), self.tail


class JsonCall(WrittenCall):
    """One JSON object as it is written: a call, or with a `name` its arguments.

    `arguments` is what is certain of them; line ends inside of strings, which JSON forbids and
    small models write, are escaped there. It has ended with its last brace, or where a mark begins,
    which is no JSON.
    """

    def __init__(self, name: str = "", *, call_id: str = "", needs_arguments: bool = False) -> None:
        super().__init__(name, call_id=call_id)
        self._needs_arguments = needs_arguments
        self._depth = 0
        self._outside = 0
        """How deep the object lies that the arguments are."""
        self._is_inside = bool(name)
        self._in_string = self._is_escaped = False

    def take(self, text: str) -> str:
        """Read on; what of `text` stands behind the object."""
        arguments: list[str] = []
        end = len(text)
        for place, sign in enumerate(text):
            if sign == "<" and not self._in_string:
                self.is_ended, end = True, place
                break
            if sign == "{" and self._depth == 1 and not (self.name or self._in_string):
                self._look_for_name(self.text + text[:place])
            self._step(sign)
            if self._is_inside:
                is_raw = self._in_string and sign < " "
                arguments.append(json.dumps(sign)[1:-1] if is_raw else sign)
                self._is_inside = self._depth > self._outside
            if not self._depth:
                self.is_ended, end = True, place + 1
                break
        self.text += text[:end]
        self.arguments += "".join(arguments)
        return text[end:]

    def found(self) -> tuple[str, str] | None:
        """Name and arguments of a call that has ended, if it may be one."""
        if self.arguments and not self._is_inside:  # a brace that is missing behind loses nothing
            return self.name, self.arguments
        said = object_in(self.text) or {}
        name = said.get("name", said.get("tool_name"))
        given = said.get("arguments", said.get("parameters"))
        if given is None and not self._needs_arguments:
            given = {}
        # Some write them as OpenAI's own API does, as a text.
        given = object_in(given) if isinstance(given, str) else given
        return (name, json.dumps(given, ensure_ascii=False)) if isinstance(name, str) else None

    def _look_for_name(self, begun: str) -> None:
        head = _HEAD.fullmatch(begun)
        if head is not None:
            self.name, self._outside, self._is_inside = head[1], 1, True

    def _step(self, sign: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif sign == '"':
            self._in_string = not self._in_string
        elif self._in_string:
            self._is_escaped = sign == "\\"
        elif sign in "{}":
            self._depth += 1 if sign == "{" else -1


def as_json(value: Any) -> str:
    """The JSON of a value, halves of surrogate pairs put together. Raises ValueError for half of
    one, and for no number: clients cannot read them."""
    said = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return said.encode("utf-16-le", "surrogatepass").decode("utf-16-le")


def object_in(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; None where it is none, or none that can be sent on: with half
    of a surrogate pair, or no number."""
    try:
        found = json.loads(text, strict=False)
        as_json(found)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
