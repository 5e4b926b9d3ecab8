"""The items of a Responses body's `input`, and the conversation that they are.

OpenAI has an item for each thing that was said, thought or called; chat templates have a message
for each turn. What an assistant thinks, says and calls one behind the other is one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mesh.api.bodies import Strict, Unsupported, only, only_types
from mesh.api.openai.sampling import Hint, Refused
from mesh.api.openai.schemas import MAX_MESSAGES, MAX_PARTS, joined, role_of
from mesh.api.openai.tools import CalledFunction, CallId, CallNames
from mesh.errors import BadRequest

NOT_STORED = Unsupported("nothing is stored here", "Send the whole conversation as `input`.")
_REFERENCE = Unsupported(
    "nothing is stored here that one could refer to. Vercel's AI SDK sends the items themselves"
    " with `providerOptions: {openai: {store: false}}`",
    "Send the item itself.",
)


class InputText(Strict):
    """A piece of what is said; only text has a meaning here. `output_text` is of earlier
    answers."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Hint = None
    logprobs: Hint = None
    parsed: Hint = None  # beside `text` in what OpenAI's clients parsed
    prompt_cache_breakpoint: Hint = None


InputTexts = Annotated[
    list[Annotated[InputText, only_types("parts", "input_text", "output_text")]],
    Field(max_length=MAX_PARTS, fail_fast=True),
]


class MessageItem(Strict):
    """What somebody said. The `type` may be left out."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | InputTexts
    id: Hint = None
    status: Hint = None
    phase: Hint = None


class ThoughtText(Strict):
    """A piece of reasoning."""

    type: Literal["summary_text", "reasoning_text"]
    text: str


_Thoughts = Annotated[list[ThoughtText], Field(max_length=MAX_PARTS, fail_fast=True)]


class ReasoningItem(Strict):
    """The reasoning of an earlier answer, for the model's chat template, which may leave it out.
    What OpenAI has encrypted nobody here can read."""

    type: Literal["reasoning"]
    summary: _Thoughts = Field(default=[])
    content: _Thoughts | None = None
    id: Hint = None
    status: Hint = None
    encrypted_content: Hint = None

    @property
    def text(self) -> str:
        """What was thought."""
        return "\n\n".join(part.text for part in self.content or self.summary)


class CallItem(CalledFunction):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: CallId
    id: Hint = None
    status: Hint = None
    namespace: Refused = None
    caller: Annotated[None, only({"type": "direct"})] = None
    async_: Annotated[None, only(False)] = Field(default=None, alias="async")


class CallOutputItem(Strict):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: str | InputTexts
    id: Hint = None
    status: Hint = None
    name: Hint = None
    namespace: Refused = None
    caller: Annotated[None, only({"type": "direct"})] = None


def _kind(value: Any) -> str | None:
    return (value.get("type") or "message") if isinstance(value, dict) else None


# Not a plain union: that reports on an item once for every kind.
InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")],
    Discriminator(
        _kind,
        custom_error_type="item_form",
        custom_error_message="Input should be an object with a type, or with a role and a content",
    ),
    only_types(
        "items",
        "message",
        "function_call",
        "function_call_output",
        "reasoning",
        item_reference=_REFERENCE,
    ),
]
InputItems = Annotated[list[InputItem], Field(max_length=MAX_MESSAGES, fail_fast=True)]


def to_messages(
    said: str | Sequence[InputItem], instructions: str | None
) -> tuple[dict[str, Any], ...]:
    """A conversation as a chat template knows it: `instructions`, and all that the system says at
    the beginning, are one message, as most templates want it.

    Raises BadRequest where nothing is said, and for the output of no call before it.
    """
    turns = _Turns()
    if isinstance(said, str):
        turns.say("user", said)
    else:
        for number, item in enumerate(said):
            turns.take(number, item)
    messages = turns.messages
    start = next((n for n, each in enumerate(messages) if each["role"] != "system"), len(messages))
    leading = [instructions or "", *(each["content"] for each in messages[:start])]
    if text := "\n\n".join(filter(None, leading)):
        messages[:start] = [{"role": "system", "content": text}]
    if not messages:
        raise BadRequest("input: nothing is said in it.", fix="Send a message.", param="input")
    return tuple(messages)


class _Turns:
    """The messages that items make, as far as they were taken."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names = CallNames()
        self._thought = ""

    def take(
        self, number: int, item: MessageItem | ReasoningItem | CallItem | CallOutputItem
    ) -> None:
        """The item with this number."""
        if isinstance(item, ReasoningItem):
            self._thought = "\n\n".join(filter(None, (self._thought, item.text)))
        elif isinstance(item, CallItem):
            call = item.as_call(item.call_id)
            self._names.take(call)
            turn = self._answer_under_way() or self.say("assistant", "")
            turn.setdefault("tool_calls", []).append(call)
        elif isinstance(item, CallOutputItem):
            name = self._names.of(item.call_id, param=f"input.{number}.call_id")
            turn = self.say("tool", joined(item.output))
            turn |= {"tool_call_id": item.call_id, "name": name}
        elif item.role == "assistant":
            self._answer(joined(item.content))
        else:
            self.say(role_of(item.role), joined(item.content))

    def say(self, role: str, text: str) -> dict[str, Any]:
        """A message of its own, with what was thought before if it is an answer."""
        message = {"role": role, "content": text}
        if role == "assistant" and self._thought:
            message["reasoning_content"] = self._thought
        self._thought = ""
        self.messages.append(message)
        return message

    def _answer(self, text: str) -> None:
        """What stands behind a call belongs to its message, whose outputs are still to come."""
        turn = self._answer_under_way()
        if turn is None or "tool_calls" not in turn:
            self.say("assistant", text)
        else:
            turn["content"] = "\n".join(filter(None, (turn["content"], text)))

    def _answer_under_way(self) -> dict[str, Any] | None:
        """The assistant's message, if it is the last and nothing was thought since."""
        last = self.messages[-1] if self.messages else None
        return last if last and last["role"] == "assistant" and not self._thought else None
