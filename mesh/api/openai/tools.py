"""Functions that an answer may call, as OpenAI's chat bodies and answers have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from mesh.api.bodies import Strict, require_plain
from mesh.models.written_calls import object_in
from mesh.types import ToolCallDelta, ToolUse

MAX_TOOLS = 128
MAX_CALLS = 128
"""Calls in one message."""
_MAX_ID = 256

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
CallId = Annotated[str, Field(min_length=1, max_length=_MAX_ID)]


class FunctionSpec(Strict):
    """A function that may be called; `parameters` is the JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    _plain_enough = field_validator("parameters")(require_plain)


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
    parsed_arguments: Any = None  # beside `arguments` in what OpenAI's clients parsed

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, value: str) -> str:
        if (found := object_in(value or "{}")) is None:
            raise ValueError("expected the text of a JSON object")
        require_plain(found)
        return value


class ToolCall(Strict):
    """A call of an earlier answer."""

    id: CallId
    type: Literal["function"]
    function: CalledFunction
    index: Any = None  # of a stream; some clients send it back

    def to_template(self) -> dict[str, Any]:
        """What a chat template is shown of it: the arguments as an object."""
        function = {
            "name": self.function.name,
            "arguments": object_in(self.function.arguments or "{}"),
        }
        return {"id": self.id, "type": "function", "function": function}


class _Named(Strict):
    name: str


class NamedTool(Strict):
    """The function that is to be called."""

    type: Literal["function"]
    function: _Named


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ToolsBody(Strict):
    """The fields of a chat that are about calls."""

    stream: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _chooses_what_is_there(self) -> Self:
        names = Counter(tool.function.name for tool in self.tools or ())
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"tools: two of them are called {twice[0]}")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: there are no tools to call")
        if self._named and self._named not in names:
            raise ValueError(f"tool_choice: there is no tool {self._named[:_MAX_ID]!r}")
        return self

    @property
    def _named(self) -> str:
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else ""

    def tool_use(self) -> ToolUse | None:
        """What the answer may call; None where that is nothing."""
        if not self.tools or self.tool_choice == "none":
            return None
        return ToolUse(
            tuple(tool.to_template() for tool in self.tools),
            parallel=self.parallel_tool_calls is not False and not self._named,
            in_pieces=bool(self.stream),
            required=self.tool_choice == "required" or bool(self._named),
            named=self._named,
            strict=tuple(tool.function.name for tool in self.tools if tool.function.strict),
        )


def call_chunks(news: Iterable[ToolCallDelta]) -> list[dict[str, Any]]:
    """The `tool_calls` of a delta, each call once: OpenAI's clients take two for two calls."""
    calls: dict[int, dict[str, Any]] = {}
    for each in news:
        if each.id:
            begun = {"id": each.id, "type": "function", "function": _function(each)}
            calls[each.index] = {"index": each.index, **begun}
        elif each.index in calls:
            calls[each.index]["function"]["arguments"] += each.arguments
        else:
            more = {"arguments": each.arguments}
            calls[each.index] = {"index": each.index, "function": more}
    return list(calls.values())


def whole_calls(news: Iterable[ToolCallDelta]) -> list[dict[str, Any]]:
    """The `tool_calls` of a message, of all that was told of them."""
    calls = call_chunks(news)
    for call in calls:
        del call["index"]
    return calls


def _function(news: ToolCallDelta) -> dict[str, str]:
    return {"name": news.name, "arguments": news.arguments}
