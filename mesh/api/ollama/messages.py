"""The messages of Ollama's chats, and the calls in them, as a chat template knows them.

Ollama's calls have an object for their arguments and mostly no id; their results say the function's
name, or nothing, and then belong to the calls in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from mesh.api.bodies import Strict, only, require_plain
from mesh.api.openai.sampling import Hint
from mesh.api.openai.tools import MAX_CALLS, CallId, call_chunks
from mesh.models.written_calls import object_in
from mesh.types import ToolCallDelta

FunctionName = Annotated[str, Field(min_length=1, max_length=256)]


class OllamaFunction(Strict):
    """A function's name, and its arguments as an object."""

    name: FunctionName
    arguments: dict[str, Any] = Field(default={})
    index: Hint = None
    description: Hint = None

    _plain_enough = field_validator("arguments")(require_plain)


class OllamaCall(Strict):
    """A call of an earlier answer."""

    function: OllamaFunction
    id: CallId | None = None
    type: Hint = None
    index: Hint = None


class OllamaMessage(Strict):
    """One turn. `thinking` is that of an earlier answer, for the model's chat template. The result
    of a call is that of the one with its `tool_call_id`, else of the first without a result, among
    those of the function `tool_name` where it has one; `name` is an older word for that."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = (
        None
    )
    tool_name: Annotated[str, Field(max_length=256)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    images: Annotated[None, only([])] = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.content is None and not (self.tool_calls or self.thinking):
            raise ValueError("content is missing")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls are the assistant's, not of the role {self.role}")
        if (self.whose or self.tool_call_id) and self.role != "tool":
            raise ValueError("tool_name, name and tool_call_id belong to messages of the role tool")
        return self

    @property
    def whose(self) -> str | None:
        """The function whose result it is, where it says that."""
        return self.tool_name or self.name


def to_turns(messages: Sequence[OllamaMessage]) -> tuple[list[dict[str, Any]], str]:
    """A conversation as a chat template knows it, as `mesh.api.openai.schemas.to_template` has it,
    and what the answer to it has begun with.

    Clients cut old messages off, so that a result may have lost its call: it stays a result.
    """
    open_calls: list[tuple[str, str]] = []
    shown = []
    for number, message in enumerate(messages):
        told: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            told["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [_call(each, number, place) for place, each in enumerate(message.tool_calls)]
            open_calls += [(each["id"], each["function"]["name"]) for each in calls]
            told["tool_calls"] = calls
        if message.role == "tool":
            told["tool_call_id"], name = _answered(message, open_calls, number)
            told |= {"name": name} if name else {}
        shown.append(told)
    *before, last = shown or [{"role": ""}]
    if before and last["role"] == "assistant" and "tool_calls" not in last:
        return before, last["content"]
    return shown, ""


def _call(call: OllamaCall, number: int, place: int) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id or _new_id(number, place), "type": "function", "function": function}


def _answered(
    message: OllamaMessage, open_calls: list[tuple[str, str]], number: int
) -> tuple[str, str]:
    """The id and the function's name of the call whose result this is, which is open no more."""
    wanted_id, wanted = message.tool_call_id, message.whose
    for call in open_calls:
        if call[0] == wanted_id or (not wanted_id and wanted in (call[1], None, "")):
            open_calls.remove(call)
            return call
    return wanted_id or _new_id(number, 0), wanted or ""


def _new_id(number: int, place: int) -> str:
    """Of a form that all templates take: Mistral's wants nine letters and digits."""
    return f"c{number % 10_000:04}x{place:03}"


def whole_calls(news: Iterable[ToolCallDelta]) -> list[dict[str, Any]]:
    """The `tool_calls` of a message, of calls that were told whole."""
    return [
        {
            "id": call["id"],
            "function": {
                "index": call["index"],
                "name": call["function"]["name"],
                "arguments": object_in(call["function"]["arguments"] or "{}"),
            },
        }
        for call in call_chunks(news)
    ]
