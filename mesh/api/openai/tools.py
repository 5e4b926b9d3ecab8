"""Functions that an answer may call, as OpenAI's chat bodies and answers have them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from mesh.api.bodies import Strict, only
from mesh.types import ToolCallDelta

MAX_TOOLS = 128
MAX_CALLS = 128
"""Calls in one message."""
_MAX_DEPTH = 32
_MAX_ID = 256

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
CallId = Annotated[str, Field(min_length=1, max_length=_MAX_ID)]


class FunctionSpec(Strict):
    """A function that may be called; `parameters` is the JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[None, only(False)] = None

    @field_validator("parameters")
    @classmethod
    def _flat_enough(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        require_flat(value)
        return value


class Tool(Strict):
    """A tool; the functions of the client are the only ones here."""

    type: Literal["function"]
    function: FunctionSpec

    def to_template(self) -> dict[str, Any]:
        """What a chat template is shown of it."""
        function = self.function
        shown: dict[str, Any] = {"name": function.name}
        if function.description is not None:
            shown["description"] = function.description
        shown["parameters"] = function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": shown}


class CalledFunction(Strict):
    """A function's name, and its arguments as the text of a JSON object."""

    name: Annotated[str, Field(min_length=1, max_length=_MAX_ID)]
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, value: str) -> str:
        if _parsed(value) is None:
            raise ValueError("expected the text of a JSON object")
        return value


class ToolCall(Strict):
    """A call of an earlier answer."""

    id: CallId
    type: Literal["function"]
    function: CalledFunction
    index: Any = None  # of a stream; some clients send it back

    def to_template(self) -> dict[str, Any]:
        """What a chat template is shown of it: the arguments as an object."""
        function = {"name": self.function.name, "arguments": _parsed(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


def call_chunks(news: Iterable[ToolCallDelta]) -> list[dict[str, Any]]:
    """The `tool_calls` of a delta."""
    return [
        {"index": each.index, "id": each.id, "type": "function", "function": _function(each)}
        if each.id
        else {"index": each.index, "function": {"arguments": each.arguments}}
        for each in news
    ]


def whole_calls(news: Iterable[ToolCallDelta]) -> list[dict[str, Any]]:
    """The `tool_calls` of a message, of all that was told of them."""
    calls: dict[int, dict[str, Any]] = {}
    for each in news:
        if each.id:
            calls[each.index] = {"id": each.id, "type": "function", "function": _function(each)}
        else:
            calls[each.index]["function"]["arguments"] += each.arguments
    return list(calls.values())


def _function(news: ToolCallDelta) -> dict[str, str]:
    return {"name": news.name, "arguments": news.arguments}


def require_flat(value: Any) -> None:
    """Raise ValueError for what is nested more deeply than any schema that somebody wrote."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise ValueError(f"nested more than {_MAX_DEPTH} deep")


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _parsed(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; None where it is none, or too deep."""
    try:
        value = json.loads(text or "{}")
        require_flat(value)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
