"""The bodies of Anthropic's endpoints, and the generation that they ask for.

As in `mesh.api.openai.sampling`, what is not done here is refused by name. What clients send to say
how hard a model is to think is taken without effect: it thinks as it was taught, or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from mesh.api.anthropic.turns import Messages, Texts, to_conversation
from mesh.api.bodies import Strict, Unsupported, only, only_types, require_plain
from mesh.api.openai.sampling import INT32, MAX_STOPS, Hint, Refused, TopP
from mesh.api.openai.tools import MAX_TOOLS, as_template, require_choosable, tool_use
from mesh.types import GenerationRequest, ModelId, Principal, SamplingParams

_NO_THREADS = Unsupported("nothing is stored here", "Send the whole conversation, without it.")

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class ClientTool(Strict):
    """A function of the client's; nothing else can be called here. `input_schema` is the JSON
    schema of its arguments."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: Annotated[None, only(False)] = None
    allowed_callers: Annotated[None, only(["direct"])] = None
    input_examples: Hint = None
    eager_input_streaming: Hint = None
    cache_control: Hint = None

    _plain_enough = field_validator("input_schema")(require_plain)

    def to_template(self) -> dict[str, Any]:
        """What a chat template is shown of it."""
        return as_template(self.name, self.description, self.input_schema)


class CallChoice(Strict):
    """Whether the answer may, must or must not call, and what."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_what_it_means(self) -> Self:
        if (self.type == "tool") == (self.name is None):
            raise ValueError("name belongs to the type tool, and only to that")
        return self


class ThinkingChoice(Strict):
    """Whether the model thinks before it answers. How long is up to the model."""

    type: Literal["enabled", "disabled", "adaptive"]
    display: Literal["summarized", "omitted"] | None = None
    budget_tokens: Hint = None


class JsonFormat(Strict):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")

    _plain_enough = field_validator("schema_")(require_plain)


class OutputConfig(Strict):
    """What the answer looks like."""

    format: JsonFormat | None = None
    effort: Hint = None


class ContextEdit(Strict):
    """What is to be left out of the conversation: nothing, as it is the client's here."""

    type: Literal["clear_thinking_20251015"]
    keep: Annotated[None, only("all")] = None


class ContextManagement(Strict):
    """What Anthropic changes of a conversation before the model reads it."""

    edits: list[Annotated[ContextEdit, only_types("edits", "clear_thinking_20251015")]] = Field(
        default=[], max_length=16, fail_fast=True
    )


class AskedBody(Strict):
    """What is said, and what may be called: that whose tokens are counted."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    messages: Messages
    system: str | Texts | None = None
    tools: (
        Annotated[
            list[Annotated[ClientTool, only_types("tools", "custom")]],
            Field(max_length=MAX_TOOLS, fail_fast=True),
        ]
        | None
    ) = None
    tool_choice: CallChoice | None = None
    thinking: ThinkingChoice | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    # Anthropic's, not here
    container: Refused = None
    thread: Annotated[None, only(otherwise=_NO_THREADS)] = None
    mcp_servers: Annotated[None, only([])] = None
    context_management: ContextManagement | None = None
    service_tier: Annotated[None, only("auto", "standard_only")] = None
    speed: Annotated[None, only("standard")] = None
    # hints
    metadata: Hint = None
    diagnostics: Hint = None
    cache_control: Hint = None
    inference_geo: Hint = None
    user_profile_id: Hint = None
    workspace_id: Hint = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        choice = self.tool_choice
        kind = "required" if choice is not None and choice.type == "any" else None
        require_choosable(self.tools or (), kind, (choice and choice.name) or "")
        return self

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes in pieces."""
        return False

    def to_request(self, request_id: str, principal: Principal) -> GenerationRequest:
        """The generation this body asks for, on behalf of `principal`. Raises BadRequest."""
        said = to_conversation(self.system, self.messages)
        wanted = self.output_format or (self.output_config and self.output_config.format)
        choice = self.tool_choice or CallChoice(type="auto")
        functions: Sequence[ClientTool] = () if choice.type == "none" else self.tools or ()
        return GenerationRequest(
            request_id=request_id,
            model=ModelId(self.model),
            messages=said.messages,
            begun=said.begun,
            sampling=self._sampling(),
            principal=principal,
            tools=tool_use(
                functions,
                named=choice.name or "",
                required=choice.type == "any",
                parallel=not choice.disable_parallel_tool_use,
                in_pieces=self.is_streamed,
            ),
            schema=wanted.schema_ if wanted else None,
            # As Anthropic has it: it does not unless it is told to.
            think=None if self.thinking and self.thinking.type != "disabled" else False,
        )

    def _sampling(self) -> SamplingParams:
        return SamplingParams()


class MessagesBody(AskedBody):
    """The body of `POST /v1/messages`. As Anthropic has it, `temperature` and `top_p` are 1 where
    they are left out, and `max_tokens` is the most that the answer may have: where the context has
    room for fewer it ends there, and with 0 the prompt is computed and kept for those that begin as
    it does."""

    max_tokens: Annotated[int, Field(ge=0, lt=INT32)]
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=0, lt=INT32)] | None = None
    stop_sequences: Annotated[
        list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS, fail_fast=True)
    ] | None = None  # fmt: skip

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes in pieces."""
        return bool(self.stream)

    def _sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            max_tokens=self.max_tokens,
            fits_context=True,
            stop=tuple(self.stop_sequences or ()),
        )
