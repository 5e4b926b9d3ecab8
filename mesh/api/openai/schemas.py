"""The bodies of chats and completions, and the generation each asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import (
    Field,
    model_validator,
)

from mesh.api.bodies import Strict, only, only_types
from mesh.api.openai.formats import ResponseFormat, StructuredOutputs, TextFormat, schema_of
from mesh.api.openai.prompts import Prompt, at_most, each_of, texts_of
from mesh.api.openai.sampling import (
    INT32,
    Effort,
    Hint,
    Refused,
    SamplingBody,
    TemplateKwargs,
    Truncation,
    thinking,
)
from mesh.api.openai.tools import MAX_CALLS, CallId, CallNames, ToolCall, ToolsBody
from mesh.types import GenerationRequest, Principal

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default length of `/v1/completions`."""
MAX_PROMPTS = 128
"""Prompts of one `/v1/completions`."""
MAX_CHOICES = 128
"""Answers of one request, to whatever prompts."""
MAX_LOGPROBS = 1 << 19
"""Log-probabilities of its prompts, and of its answers where they are several, alternatives
included: some 100 MB here."""
MAX_MESSAGES = 4096
MAX_PARTS = 4096


class StreamOptions(Strict):
    """The options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[None, only(False)] = None


class _ChoicesBody(SamplingBody):
    """What chats and completions share."""

    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def per_prompt(self) -> int:
        """How many answers each prompt has."""
        return self.n or 1

    @model_validator(mode="after")
    def _is_bounded(self) -> Self:
        """What several answers may keep here is known before they are begun."""
        count, limit, rivals = self._prompts * self.per_prompt, self._limit, self._rivals
        if count == 1:
            return self
        if self.resumable:
            raise ValueError(f"resumable is for one answer, and there are {count}")
        if count > MAX_CHOICES:
            raise ValueError(f"{count} answers are too many; one request takes {MAX_CHOICES}")
        if rivals is not None and limit is None:
            raise ValueError(f"logprobs of {count} answers need max_tokens")
        told = 0 if rivals is None or limit is None else count * limit * (1 + rivals)
        if told > MAX_LOGPROBS:
            raise ValueError(
                f"logprobs of {count} answers of {limit} tokens are {told} with their"
                f" alternatives; one request takes {MAX_LOGPROBS}"
            )
        return self

    @property
    def _prompts(self) -> int:
        return 1

    @property
    def _limit(self) -> int | None:
        """The most tokens of an answer, where that is said."""
        return self.max_tokens

    @property
    def _rivals(self) -> int | None:
        """As `SamplingParams.logprobs`."""
        return None

    def _bound(self, wanted: ResponseFormat | None = None) -> dict[str, Any]:
        """What a generation is told of what its answer must look like."""
        if self.structured_outputs is not None:
            return self.structured_outputs.asked()
        return {"schema": schema_of(wanted)}

    def _answers(self, asked: GenerationRequest) -> list[GenerationRequest]:
        """As many of it as there are to be answers: other ones of it where chance decides."""
        count, seed = self.per_prompt, asked.sampling.seed
        if count == 1:
            return [asked]
        seeds = [None if seed is None else seed + number for number in range(count)]
        return [
            replace(
                asked,
                request_id=f"{asked.request_id}-{number}",
                sampling=replace(asked.sampling, seed=each),
            )
            for number, each in enumerate(seeds)
        ]


class TextPart(Strict):
    """A piece of a message's content; only text has a meaning here."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Hint = None
    cache_control: Hint = None  # Anthropic's; clients of several servers send it to all


class _Part(Protocol):
    @property
    def text(self) -> str: ...


def joined(content: str | Sequence[_Part] | None) -> str:
    """The text of a message."""
    if content is None or isinstance(content, str):
        return content or ""
    # A question and a file come as two parts: as other servers do, apart from each other.
    return "\n".join(part.text for part in content)


def role_of(role: str) -> str:
    """A message's role as chat templates have it."""
    return "system" if role == "developer" else role


class ChatMessage(Strict):
    """One turn. `name`, and the `reasoning_content` of an earlier answer, are for the model's chat
    template, which may leave them out; the result of a call has the function's name. What OpenAI's
    own answers carry besides text and calls is taken while it is empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str
        | Annotated[
            list[Annotated[TextPart, only_types("parts", "text")]],
            Field(max_length=MAX_PARTS, fail_fast=True),
        ]
        | None
    ) = None
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # what others call it
    parsed: Hint = None  # beside `content` in what OpenAI's clients parsed
    refusal: Refused = None
    audio: Refused = None
    annotations: Annotated[None, only([])] = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: CallId | None = None
    function_call: Refused = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing; only text messages are supported")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls are the assistant's, not of the role {self.role}")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("tool_call_id belongs to the messages of the role tool, and to each")
        return self

    def to_template(self) -> dict[str, Any]:
        """The role, name, text, reasoning and calls that a chat template may know."""
        shown: dict[str, Any] = {"role": role_of(self.role), "content": joined(self.content)}
        if self.name is not None:
            shown["name"] = self.name
        if thought := self.reasoning_content or self.reasoning:
            shown["reasoning_content"] = thought
        if self.tool_calls:
            shown["tool_calls"] = [call.to_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            shown["tool_call_id"] = self.tool_call_id
        return shown


def to_template(messages: Sequence[ChatMessage]) -> tuple[dict[str, Any], ...]:
    """A conversation as a chat template knows it: results of calls have the function's name too.

    Raises BadRequest for a result of no call before it.
    """
    shown = tuple(message.to_template() for message in messages)
    names = CallNames()
    for number, message in enumerate(shown):
        for call in message.get("tool_calls", ()):
            names.take(call)
        if (call_id := message.get("tool_call_id")) is not None:
            message["name"] = names.of(call_id, param=f"messages.{number}.tool_call_id")
    return shown


class ChatBody(_ChoicesBody, ToolsBody):
    """The body of `POST /v1/chat/completions`. As OpenAI has it, `temperature` and `top_p` are 1
    where they are left out. Without a limit an answer may fill the context. `reasoning_effort` is
    for models whose chat template asks for it; `none` has those not think that can be told so, as
    `enable_thinking` does, alone or in `chat_template_kwargs`, which vLLM's clients know; with
    `preserve_thinking` in these a template that asks shows what was thought in earlier turns. With
    `truncation` `auto` the oldest messages are left out where the context has no room for all, and
    the answer's `hearthnet` says how many, in `left_out_messages`.
    With `n` there are so many answers, each a choice; a `seed` is that of the first."""

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    truncation: Truncation | None = None
    # OpenAI's, not here
    functions: Annotated[None, only([])] = None
    function_call: Annotated[None, only("none", "auto")] = None
    modalities: Annotated[None, only(["text"])] = None
    audio: Refused = None
    prediction: Refused = None
    verbosity: Annotated[None, only("medium")] = None
    web_search_options: Refused = None
    # hints
    store: Hint = None
    prompt_cache_retention: Hint = None
    prompt_cache_options: Hint = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError("max_tokens and max_completion_tokens differ; send one of them")
        is_free = self.response_format is None or isinstance(self.response_format, TextFormat)
        if self.structured_outputs is not None and not is_free:
            raise ValueError("send either response_format or structured_outputs")
        return self

    @property
    def _limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def _rivals(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def to_requests(self, request_id: str, principal: Principal) -> list[GenerationRequest]:
        """The generations this body asks for, on behalf of `principal`, one for each answer."""
        template = self.chat_template_kwargs or TemplateKwargs()
        switched = TemplateKwargs(enable_thinking=self.enable_thinking)
        asked = self._generation(
            request_id,
            principal,
            self._limit,
            self._rivals,
            messages=to_template(self.messages),
            tools=self.tool_use(in_pieces=bool(self.stream)),
            truncates=self.truncation == "auto",
            **self._bound(self.response_format)
            | template.asked()
            | switched.asked()
            | thinking(self.reasoning_effort),
        )
        return self._answers(asked)


class CompletionBody(_ChoicesBody):
    """The body of `POST /v1/completions`: `prompt` is a text, a list of token ids, or a list of
    either, each of which has a choice of its own in the answer.

    With `echo` the prompt comes back in front of what follows it, with `logprobs` its tokens'
    log-probabilities as well; then `max_tokens` may be 0. As OpenAI has it, `temperature` and
    `top_p` are 1 where they are left out, and `max_tokens` is 16, or what there is room for. With
    `n` each prompt has so many choices, one behind the other; a `seed` is that of the first.
    """

    prompt: Annotated[Prompt, at_most(MAX_PROMPTS)]
    max_tokens: Annotated[int, Field(ge=0, lt=INT32)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    # OpenAI's, not here
    best_of: Annotated[None, only(1)] = None
    suffix: Refused = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0, which needs echo to be true: nothing would be said")
        return self

    @property
    def _prompts(self) -> int:
        return len(each_of(self.prompt))

    @property
    def _rivals(self) -> int | None:
        return self.logprobs

    @property
    def _limit(self) -> int:
        return COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def to_requests(self, request_id: str, principal: Principal) -> list[GenerationRequest]:
        """The generations this body asks for, on behalf of `principal`, one for each answer.

        Raises BadRequest when one of them is empty, or there is none.
        """
        prompts = texts_of(self.prompt, "prompt")
        one = len(prompts) == 1
        return [
            answer
            for number, each in enumerate(prompts)
            for answer in self._answers(
                self._to_request(each, request_id if one else f"{request_id}-{number}", principal)
            )
        ]

    def _to_request(self, prompt: Any, request_id: str, principal: Principal) -> GenerationRequest:
        is_text = isinstance(prompt, str)
        asked = self._generation(
            request_id,
            principal,
            self._limit,
            self.logprobs,
            prompt=prompt if is_text else None,
            prompt_ids=None if is_text else tuple(prompt),
            echo=bool(self.echo),
            **self._bound(),
        )
        # Who says no number is not refused for ours.
        sampling = replace(asked.sampling, fits_context=self.max_tokens is None)
        return replace(asked, sampling=sampling)
