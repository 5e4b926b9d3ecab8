"""The body of `POST /v1/responses`, and the generation that it asks for.

What OpenAI does there with what it has stored, and with tools of its own, is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mesh.api.bodies import Strict, only, only_types
from mesh.api.openai.formats import FlatFormat, schema_of
from mesh.api.openai.response_items import NOT_STORED, InputItems, to_messages
from mesh.api.openai.sampling import (
    INT32,
    Effort,
    Hint,
    Refused,
    SamplingBody,
    Truncation,
    thinking,
)
from mesh.api.openai.tools import (
    MAX_TOOLS,
    FunctionName,
    FunctionSpec,
    require_choosable,
    tool_use,
)
from mesh.types import GenerationRequest, Principal

_MAX_PAIRS = 16
_LOGPROBS = "message.output_text.logprobs"

Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""What OpenAI can add to an answer; all but the first is never in one of here."""


class FunctionTool(FunctionSpec):
    """A function of the client's; nothing else can be called here."""

    type: Literal["function"]
    async_: Annotated[None, only(False)] = Field(default=None, alias="async")
    defer_loading: Annotated[None, only(False)] = None
    allowed_callers: Annotated[None, only(["direct"])] = None
    output_schema: Hint = None


class NamedFunction(Strict):
    """The function that is to be called."""

    type: Literal["function"]
    name: FunctionName


class TextOptions(Strict):
    """What the answer looks like."""

    format: FlatFormat | None = None
    verbosity: Annotated[None, only("medium")] = None


class ReasoningOptions(Strict):
    """How the model thinks before it answers. The whole of it is what `summary` says. `effort` is
    for models whose chat template asks for it; `none` has those not think that can be told so."""

    summary: Annotated[None, only("auto", "detailed")] = None
    generate_summary: Annotated[None, only("auto", "detailed")] = None
    effort: Effort | None = None
    context: Annotated[None, only("auto")] = None
    mode: Annotated[None, only("standard")] = None


class EventOptions(Strict):
    """The options of a stream of events."""

    include_obfuscation: Annotated[None, only(False)] = None


Choice = (
    Literal["none", "auto", "required"]
    | Annotated[NamedFunction, only_types("choices of tools", "function")]
)


def _few(value: Any) -> Any:
    """Looked at first: each pair that is wrong would become an error of its own."""
    if isinstance(value, dict) and len(value) > _MAX_PAIRS:
        raise ValueError(f"{len(value)} pairs; there may be at most {_MAX_PAIRS}")
    return value


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    BeforeValidator(_few),
]


class ResponseBody(SamplingBody):
    """The body of `POST /v1/responses`. As OpenAI has it, `temperature` and `top_p` are 1 where
    they are left out. Without a limit an answer may fill the context. With `truncation` `auto` the
    oldest items are left out where the context has no room for all, and `hearthnet` says how many
    messages they were, in `left_out_messages`. `store` is taken, and nothing is stored."""

    input: str | InputItems
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    tools: (
        Annotated[
            list[Annotated[FunctionTool, only_types("tools", "function")]],
            Field(max_length=MAX_TOOLS, fail_fast=True),
        ]
        | None
    ) = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Includable], Field(max_length=64, fail_fast=True)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream_options: EventOptions | None = None
    truncation: Truncation | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    # OpenAI's, not here
    previous_response_id: Annotated[None, only(otherwise=NOT_STORED)] = None
    conversation: Annotated[None, only(otherwise=NOT_STORED)] = None
    prompt: Annotated[None, only(otherwise=NOT_STORED)] = None
    background: Annotated[None, only(False, otherwise=NOT_STORED)] = None
    background_options: Refused = None
    context_management: Annotated[None, only([])] = None
    moderation: Refused = None
    access_programs: Refused = None
    image: Refused = None
    # hints
    max_tool_calls: Hint = None  # of OpenAI's own tools, of which there are none
    client_metadata: Hint = None  # of Codex
    prompt_cache_retention: Hint = None
    prompt_cache_options: Hint = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require_choosable(self.tools or (), self.tool_choice, self._named)
        if self.top_logprobs and not self.with_logprobs:
            raise ValueError(f"top_logprobs needs {_LOGPROBS} in include")
        return self

    @property
    def _named(self) -> str:
        return self.tool_choice.name if isinstance(self.tool_choice, NamedFunction) else ""

    @property
    def _effort(self) -> Effort | None:
        return self.reasoning.effort if self.reasoning is not None else None

    @property
    def with_logprobs(self) -> bool:
        """Whether the answer's text comes with its tokens' log-probabilities."""
        return _LOGPROBS in (self.include or ())

    def to_request(self, request_id: str, principal: Principal) -> GenerationRequest:
        """The generation this body asks for, on behalf of `principal`. Raises BadRequest for an
        input that is no conversation."""
        functions = () if self.tool_choice == "none" else self.tools or ()
        return self._generation(
            request_id,
            principal,
            self.max_output_tokens,
            (self.top_logprobs or 0) if self.with_logprobs else None,
            messages=to_messages(self.input, self.instructions),
            tools=tool_use(
                functions,
                named=self._named,
                required=self.tool_choice == "required",
                parallel=self.parallel_tool_calls is not False,
                in_pieces=bool(self.stream),
            ),
            schema=schema_of(self.text.format if self.text is not None else None),
            truncates=self.truncation == "auto",
            **thinking(self._effort),
        )

    def echo(self) -> dict[str, Any]:
        """What an answer repeats of its request, with what stood for what was left out."""
        choice, wanted = self.tool_choice, self.text and self.text.format
        return {
            "model": self.model,
            "instructions": self.instructions,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "max_output_tokens": self.max_output_tokens,
            "top_logprobs": self.top_logprobs or 0,
            "tools": [_shown(tool) for tool in self.tools or ()],
            "tool_choice": choice.model_dump() if isinstance(choice, Strict) else choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "text": {
                "format": wanted.model_dump(by_alias=True) if wanted else {"type": "text"},
                "verbosity": "medium",
            },
            "reasoning": {"effort": self._effort, "summary": None},
            "metadata": self.metadata or {},
            "store": False,
            "background": False,
            "previous_response_id": None,
            "truncation": self.truncation or "disabled",
            "service_tier": "default",
        }


def _shown(tool: FunctionTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }
