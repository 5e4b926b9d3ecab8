"""One call as it is written: a JSON object, or its parts between tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
"""A call up to the brace that opens its arguments."""
_TAGGED_HEAD = re.compile(r"<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_PARAMETER_END, _TAGGED_END = "</parameter>", "</function>"


class WrittenCall(Protocol):
    """What is read of one call. `arguments` is what is certain of them, as JSON; `text` all of it
    as it was written."""

    name: str
    text: str
    arguments: str
    is_ended: bool
    is_told: bool
    told_chars: int

    def take(self, text: str) -> str:
        """Read on; what of `text` stands behind the call."""

    @property
    def has_arguments(self) -> bool:
        """Whether `arguments` are all there."""


class JsonCall:
    """One JSON object as it is written: a call, or with a `name` its arguments.

    `arguments` is what is certain of them; line ends inside of strings, which JSON forbids and
    small models write, are escaped there. It has ended with its last brace, or where something
    begins as a `mark` does that is no JSON.
    """

    def __init__(self, name: str, mark: str) -> None:
        self.name = name
        self.text = ""
        self.arguments = ""
        self.is_ended = self.is_told = False
        self._mark = mark if mark == "<" else ""
        self.told_chars = 0
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
            if sign == self._mark and not self._in_string:
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

    @property
    def has_arguments(self) -> bool:
        """Whether `arguments` are all there."""
        return bool(self.arguments) and not self._is_inside

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


class TaggedCall:
    """``<function=NAME><parameter=KEY>value</parameter>...</function>``: a parameter is told when
    it is whole.

    `functions` are the schemas of the arguments by the functions' names: a value is a text where
    they say so, or where it is no JSON. The call ends at `closing` as well, which is not read, or
    where something else stands between the parameters.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]], closing: str) -> None:
        self.name = ""
        self.text = ""
        self.arguments = ""
        self.is_ended = self.is_told = False
        self.told_chars = 0
        self._functions = functions
        self._tags = (_TAGGED_END, closing, "<parameter=")
        self._left = ""
        self._searched = 0

    @property
    def has_arguments(self) -> bool:
        """Whether `arguments` are all there."""
        return self.arguments.endswith("}") and self.is_ended

    def take(self, text: str) -> str:
        """Read on; what of `text` stands behind the call."""
        self.text += text
        self._left += text
        if not self.name:
            head = _TAGGED_HEAD.match(self._left)
            if head is None:
                return self._none()
            self.name, self.arguments, self._left = head[1], "{", self._left[head.end() :]
        while (parameter := self._parameter()) is not None:
            self._left = self._left[parameter.end() :]
            separator = "" if self.arguments == "{" else ", "
            value = self._value(parameter[1], parameter[2])
            self.arguments += f"{separator}{json.dumps(parameter[1])}: {value}"
        left = self._left
        may_go_on = any(tag.startswith(left) or left.startswith(tag) for tag in self._tags[2:])
        return "" if may_go_on or self._may_end(left) else self._end()

    def _may_end(self, left: str) -> bool:
        """Whether an end is there, but for its last signs."""
        return any(tag.startswith(left) and tag != left for tag in self._tags[:2])

    def _parameter(self) -> re.Match[str] | None:
        """The next one, if it is whole. No text is searched for its end twice."""
        self._left = self._left.lstrip()
        if self._left.find(_PARAMETER_END, self._searched) < 0:
            self._searched = max(0, len(self._left) - len(_PARAMETER_END))
            return None
        self._searched = 0
        return _PARAMETER.match(self._left)

    def _end(self) -> str:
        rest = self._left.removeprefix(_TAGGED_END)
        self.text = self.text[: len(self.text) - len(rest)]
        self.arguments += "}"
        self.is_ended, self._left = True, ""
        return rest

    def _none(self) -> str:
        """What stands behind a tag that has no name, or names nothing else can have."""
        _, mark, rest = self._left.partition(">")
        self.is_ended = bool(mark)
        self.text = self.text[: len(self.text) - len(rest)]
        return rest

    def _value(self, key: str, text: str) -> str:
        properties = self._functions.get(self.name, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        kinds = _kinds(schema) if isinstance(schema, dict) else {"string"}
        if kinds == {"string"}:
            return json.dumps(text, ensure_ascii=False)
        try:
            return json.dumps(json.loads(_PYTHON.get(text, text)), ensure_ascii=False)
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)


_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""As some models write them."""


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """The types that a value may have, as far as the schema itself says; none: any."""
    kinds, values = schema.get("type"), schema.get("enum")
    if isinstance(kinds, list):
        return {kind for kind in kinds if isinstance(kind, str)}
    if isinstance(kinds, str):
        return {kinds}
    is_text = isinstance(values, list) and all(isinstance(each, str) for each in values)
    return {"string"} if is_text else set()


def object_in(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; None where it is none, or none that can be sent on: with half
    of a surrogate pair, or no number."""
    try:
        found = json.loads(text, strict=False)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
