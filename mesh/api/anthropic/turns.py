"""The messages of Anthropic's API, and the conversation that they are.

Anthropic has a block for each thing that was said, thought, called or came of a call, and results
of calls in the user's turn; chat templates have a message for each of these, and one for whatever
the assistant thought, said and called in one turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from mesh.api.bodies import Strict, Unsupported, only, only_types, require_plain
from mesh.api.openai.sampling import Hint
from mesh.api.openai.schemas import MAX_MESSAGES, MAX_PARTS, joined
from mesh.api.openai.tools import CallId, CallNames
from mesh.errors import BadRequest

_MAX_NAME = 256
_AS_TEXT = Unsupported("only text has a meaning here", "Send its text.")
_BILLING = "x-anthropic-billing-header:"
"""How the first block of Claude Code's system begins. It is for Anthropic's billing, and differs
from request to request: behind it, no cache of what was said before would be found."""


class TextBlock(Strict):
    """A piece of what is said."""

    type: Literal["text"]
    text: str
    citations: Annotated[None, only([])] = None
    cache_control: Hint = None


class ThinkingBlock(Strict):
    """What the model thought in an earlier answer; its chat template may leave that out."""

    type: Literal["thinking"]
    thinking: str
    signature: Hint = None
    cache_control: Hint = None


class RedactedThinkingBlock(Strict):
    """What another server's model thought, encrypted: nobody here can read it."""

    type: Literal["redacted_thinking"]
    data: Hint = None


class ToolUseBlock(Strict):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: CallId
    name: Annotated[str, Field(min_length=1, max_length=_MAX_NAME)]
    input: dict[str, Any]
    caller: Annotated[None, only({"type": "direct"})] = None
    cache_control: Hint = None

    _plain_enough = field_validator("input")(require_plain)

    def to_template(self) -> dict[str, Any]:
        """What a chat template is shown of it."""
        function = {"name": self.name, "arguments": self.input}
        return {"id": self.id, "type": "function", "function": function}


Texts = Annotated[
    list[Annotated[TextBlock, only_types("blocks", "text", image=_AS_TEXT, document=_AS_TEXT)]],
    Field(max_length=MAX_PARTS, fail_fast=True),
]


class ToolResultBlock(Strict):
    """What came of a call; that it failed has to be said in its text."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: str | Texts | None = None
    is_error: Hint = None
    cache_control: Hint = None


_KINDS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")

# Not a plain union: that reports on a block once for every kind.
Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(
        lambda value: value.get("type") if isinstance(value, dict) else None,
        custom_error_type="block_form",
        custom_error_message="Input should be an object with a type",
    ),
    only_types("blocks", *_KINDS, image=_AS_TEXT, document=_AS_TEXT),
]


class AnthropicMessage(Strict):
    """One turn, or a part of one: those of one role behind each other are one."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True)]

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        for block in self.blocks:
            if isinstance(block, ThinkingBlock | RedactedThinkingBlock | ToolUseBlock):
                if self.role != "assistant":
                    raise ValueError(f"{block.type} is the assistant's, not of {self.role}")
            elif isinstance(block, ToolResultBlock) and self.role != "user":
                raise ValueError(f"tool_result is the user's, not of {self.role}")
        return self

    @property
    def blocks(self) -> Sequence[Any]:
        """The content; a text is a block of it."""
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content


Messages = Annotated[
    list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


class ToldTurns(NamedTuple):
    """`messages` as a chat template knows them, and what the answer to them has `begun` with."""

    messages: tuple[dict[str, Any], ...]
    begun: str


def to_conversation(system: str | Sequence[TextBlock] | None, said: Messages) -> ToldTurns:
    """What is said in them. What the assistant said last is the beginning of the answer.

    Most templates know the system at the beginning only: what it says later joins the user's turn.
    Raises BadRequest where nothing is asked, and for the result of no call before it.
    """
    turns = _Turns()
    if text := joined(_to_the_model(system)):
        turns.say("system", text)
    for number, message in enumerate(said):
        for place, block in enumerate(message.blocks):
            turns.take(message.role, block, f"messages.{number}.content.{place}")
    found = turns.whole()
    if not any(message["role"] == "user" for message in found.messages):
        raise BadRequest(
            "messages: nothing is asked in them.", fix="Send a user's message.", param="messages"
        )
    return found


def _to_the_model(system: str | Sequence[TextBlock] | None) -> str | Sequence[TextBlock] | None:
    if system is None or isinstance(system, str):
        return system
    return [block for block in system if not block.text.startswith(_BILLING)]


class _Turns:
    """The messages that blocks make, as far as they were taken."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._names = CallNames()

    def take(self, role: str, block: Any, where: str) -> None:
        """A block of a message of this role, `where` in the body."""
        if isinstance(block, TextBlock):
            self.say("assistant" if role == "assistant" else "user", block.text)
        elif isinstance(block, ThinkingBlock):
            turn = self._turn("assistant")
            thought = turn.get("reasoning_content", "")
            turn["reasoning_content"] = "\n\n".join(filter(None, (thought, block.thinking)))
        elif isinstance(block, ToolUseBlock):
            call = block.to_template()
            self._names.take(call)
            self._turn("assistant").setdefault("tool_calls", []).append(call)
        elif isinstance(block, ToolResultBlock):
            name = self._names.of(block.tool_use_id, param=f"{where}.tool_use_id")
            answered = {"tool_call_id": block.tool_use_id, "name": name}
            self._messages.append({"role": "tool", "content": joined(block.content), **answered})

    def say(self, role: str, text: str) -> None:
        """More of a turn, or a turn of its own."""
        turn = self._turn(role)
        turn["content"] = "\n".join(filter(None, (turn["content"], text)))

    def whole(self) -> ToldTurns:
        """All that was taken."""
        last = self._messages[-1] if self._messages else {"role": ""}
        if last["role"] != "assistant" or "tool_calls" in last:
            return ToldTurns(tuple(self._messages), "")
        return ToldTurns(tuple(self._messages[:-1]), last["content"])

    def _turn(self, role: str) -> dict[str, Any]:
        """The message of this role that is under way, or one that begins."""
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": ""})
        return self._messages[-1]
