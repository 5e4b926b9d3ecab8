"""The bodies of Ollama's endpoints, and the generation each asks for.

As in `mesh.api.openai.schemas`, what is not done here is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from mesh.api.bodies import Strict, only, require_plain
from mesh.api.ollama.messages import OllamaMessage, to_turns
from mesh.api.ollama.options import NumPredict, Options
from mesh.api.openai.sampling import Hint, Temperature, TopP
from mesh.api.openai.schemas import MAX_MESSAGES
from mesh.api.openai.tools import ToolsBody
from mesh.types import GenerationRequest, ModelId, Principal

_ZERO = frozenset({"0", "0s", "0m", "0h", "0ms"})


class _AnswerBody(Strict):
    """What both endpoints share. What clients put beside the options counts where those say
    nothing: Open WebUI `num_predict` of titles, a provider of Vercel's AI SDK the other three."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    stream: bool | None = None
    format: Literal["json"] | dict[str, Any] | None = None
    options: Options | None = None
    num_predict: NumPredict | None = None
    max_output_tokens: NumPredict | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # Ollama's, not here
    shift: Annotated[None, only(False)] = None
    keep_alive: str | float | None = None

    @field_validator("format", mode="before")
    @classmethod
    def _plain_enough(cls, value: Any) -> Any:
        return require_plain(value) if value != "" else None  # as Go has nothing

    @model_validator(mode="after")
    def _tells_alternatives_of_something(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes in pieces, which it does unless that is switched off."""
        return self.stream is not False

    @property
    def unloads(self) -> bool:
        """Whether the model is to be let go of behind the answer."""
        value = self.keep_alive
        return value in _ZERO if isinstance(value, str) else value == 0

    def _options(self) -> Options:
        return (self.options or Options()).filled(
            temperature=self.temperature,
            top_p=self.top_p,
            num_predict=self.num_predict or self.max_output_tokens,
        )

    def _request(
        self, model: ModelId, request_id: str, principal: Principal, **asked: Any
    ) -> GenerationRequest:
        return GenerationRequest(
            request_id=request_id,
            model=model,
            sampling=self._options().sampling((self.top_logprobs or 0) if self.logprobs else None),
            principal=principal,
            schema={"type": "object"} if self.format == "json" else self.format or None,
            think=bool(self.think) if self.think is not None else None,
            effort=self.think if isinstance(self.think, str) else "",
            **asked,
        )


class OllamaChatBody(_AnswerBody, ToolsBody):
    """The body of `POST /api/chat`. `format` is `json` or a JSON schema. `think` false has a model
    not think whose chat template has a switch for that; `low`, `medium` and `high` are for those
    whose template asks how hard to. What a model thinks is in `thinking`, apart from the answer.
    `system` stands before messages without one of that role; `num_predict`, `max_output_tokens`,
    `temperature` and `top_p` count where the options say nothing. `tool_choice` is as OpenAI's.
    What the assistant said last is the beginning of the answer, which does not repeat it.
    The oldest messages are left out where the context has no room for all, as in Ollama, unless
    `truncate` is false.
    `keep_alive` has no effect: how long a model stays is its deployment's.
    """

    messages: list[OllamaMessage] = Field(default=[], max_length=MAX_MESSAGES, fail_fast=True)
    system: str | None = None
    truncate: bool | None = None

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _named_flat(cls, value: Any) -> Any:
        """As Responses name the function, which that provider does as well."""
        is_flat = isinstance(value, dict) and value.keys() == {"type", "name"}
        return {"type": value["type"], "function": {"name": value["name"]}} if is_flat else value

    @property
    def is_empty(self) -> bool:
        """Whether the model is only to be loaded."""
        return not self.messages

    def to_request(
        self, model: ModelId, request_id: str, principal: Principal
    ) -> GenerationRequest:
        """The generation this body asks of `model`, on behalf of `principal`."""
        has_own = any(message.role == "system" for message in self.messages)
        said, begun = to_turns(self.messages)
        return self._request(
            model,
            request_id,
            principal,
            messages=(*_first(None if has_own else self.system), *said),
            begun=begun,
            tools=self.tool_use(in_pieces=False),
            truncates=self.truncate is not False,
        )


class OllamaGenerateBody(_AnswerBody):
    """The body of `POST /api/generate`: `prompt` is a user's message behind `system`, or with `raw`
    a text that is continued as it is. All else is as in the body of `POST /api/chat`."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    # Ollama's, not here
    truncate: Annotated[None, only(False)] = None
    suffix: Annotated[None, only("")] = None
    template: Annotated[None, only("")] = None
    context: Annotated[None, only([])] = None
    images: Annotated[None, only([])] = None

    @model_validator(mode="after")
    def _is_raw_or_a_chat(self) -> Self:
        if self.raw and self.system:
            raise ValueError("system: a raw prompt is continued as it is; put it into the prompt")
        if self.raw and self.think:
            raise ValueError("think: a raw prompt is continued as it is, thoughts included")
        return self

    @property
    def is_empty(self) -> bool:
        """Whether the model is only to be loaded."""
        return not self.prompt

    def to_request(
        self, model: ModelId, request_id: str, principal: Principal
    ) -> GenerationRequest:
        """The generation this body asks of `model`, on behalf of `principal`."""
        if self.raw:
            return self._request(model, request_id, principal, prompt=self.prompt)
        messages = (*_first(self.system), {"role": "user", "content": self.prompt})
        return self._request(model, request_id, principal, messages=messages)


class ShowBody(Strict):
    """The body of `POST /api/show`. Older clients say `name` for `model`."""

    model: Annotated[str, Field(max_length=256)] = ""
    name: Annotated[str, Field(max_length=256)] = ""
    verbose: Hint = None
    options: Hint = None
    system: Annotated[None, only("")] = None
    template: Annotated[None, only("")] = None

    @model_validator(mode="after")
    def _names_a_model(self) -> Self:
        if not (self.model or self.name):
            raise ValueError("model: it is missing")
        return self


def _first(system: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}] if system else []
