"""Functions that an answer may call, as OpenAI's chat bodies and answers have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import Field, field_validator, model_validator

from mesh.api.bodies import Strict, is_plain, require_plain
from mesh.api.openai.sampling import Hint
from mesh.errors import BadRequest
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

    def to_template(self) -> dict[str, Any]:
        """What a chat template is shown of it."""
        return as_template(self.name, self.description, self.parameters)


def as_template(
    name: str, description: str | None, parameters: dict[str, Any] | None
) -> dict[str, Any]:
    """What a chat template is shown of a function."""
    shown: dict[str, Any] = {"name": name}
    if description is not None:
        shown["description"] = description
    shown["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": shown}


class AnyFunction(Protocol):
    """A function that may be called, in whatever API's words."""

    @property
    def name(self) -> str: ...

    @property
    def strict(self) -> bool | None: ...

    def to_template(self) -> dict[str, Any]:
        """What a chat template is shown of it."""


class Tool(Strict):
    """A tool; the functions of the client are the only ones here."""

    type: Literal["function"]
    function: FunctionSpec


class CalledFunction(Strict):
    """A function's name, and its arguments: the text of a JSON object, if the answer was not cut
    off in them and the model wrote one."""

    name: Annotated[str, Field(min_length=1, max_length=_MAX_ID)]
    arguments: str
    parsed_arguments: Hint = None  # beside `arguments` in what OpenAI's clients parsed

    def as_call(self, call_id: str) -> dict[str, Any]:
        """What a chat template is shown of a call: the arguments as an object, whose one field
        `arguments` is their text where that is none."""
        given = object_in(self.arguments or "{}")
        shown = {"arguments": self.arguments} if given is None or not is_plain(given) else given
        function = {"name": self.name, "arguments": shown}
        return {"id": call_id, "type": "function", "function": function}


class ToolCall(Strict):
    """A call of an earlier answer."""

    id: CallId
    type: Literal["function"]
    function: CalledFunction
    index: Hint = None  # of a stream; some clients send it back

    def to_template(self) -> dict[str, Any]:
        """What a chat template is shown of it."""
        return self.function.as_call(self.id)


class CallNames:
    """The functions that a conversation has called so far, by the calls' ids."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def take(self, call: dict[str, Any]) -> None:
        """A call, as a chat template is shown it."""
        self._names[call["id"]] = call["function"]["name"]

    def of(self, call_id: str, *, param: str) -> str:
        """What was called. Raises BadRequest, which names `param`, for no call before."""
        if call_id not in self._names:
            raise BadRequest(
                f"{param}: no call before it has the id {call_id[:64]!r}.",
                fix="Send the assistant's calls before their results.",
                param=param,
            )
        return self._names[call_id]


class _Named(Strict):
    name: str


class NamedTool(Strict):
    """The function that is to be called."""

    type: Literal["function"]
    function: _Named


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ToolsBody(Strict):
    """The fields of a chat that are about calls."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _chooses_what_is_there(self) -> Self:
        require_choosable(self._functions, self.tool_choice, self._named)
        return self

    @property
    def _functions(self) -> list[FunctionSpec]:
        return [tool.function for tool in self.tools or ()]

    @property
    def _named(self) -> str:
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else ""

    def tool_use(self, *, in_pieces: bool) -> ToolUse | None:
        """What the answer may call, and whether calls are told in pieces; None where that is
        nothing."""
        if self.tool_choice == "none":
            return None
        return tool_use(
            self._functions,
            named=self._named,
            required=self.tool_choice == "required",
            parallel=self.parallel_tool_calls is not False,
            in_pieces=in_pieces,
        )


def require_choosable(functions: Sequence[AnyFunction], choice: object, named: str) -> None:
    """Raise ValueError for functions of one name, and for a choice of what is not among them."""
    names = Counter(function.name for function in functions)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"tools: two of them are called {twice[0]}")
    if choice == "required" and not names:
        raise ValueError("tool_choice: there are no tools to call")
    if named and named not in names:
        raise ValueError(f"tool_choice: there is no tool {named[:_MAX_ID]!r}")


def tool_use(
    functions: Sequence[AnyFunction],
    *,
    named: str,
    required: bool,
    parallel: bool,
    in_pieces: bool,
) -> ToolUse | None:
    """What an answer may call, the `named` one if any; None where there are no functions."""
    if not functions:
        return None
    return ToolUse(
        tuple(function.to_template() for function in functions),
        parallel=parallel and not named,
        in_pieces=in_pieces,
        required=required or bool(named),
        named=named,
        strict=tuple(function.name for function in functions if function.strict),
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
