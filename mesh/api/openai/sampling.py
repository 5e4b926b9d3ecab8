"""What the bodies of all of OpenAI's endpoints share: the model, how it is sampled, and hearthnet's
own fields.

A field that OpenAI has and hearthnet has not is refused by name unless it is null or says what
happens anyway; a field nobody knows is refused too. Nothing is silently ignored except hints that
cannot change the answer (`user`, `metadata`, cache and safety keys).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from mesh.api.bodies import Strict, only
from mesh.types import GenerationRequest, ModelId, Principal, SamplingParams, Steer, WireDtype

MAX_EDITS = 16
"""Steering edits of one request."""
INT32 = 2**31
MAX_STOPS = 16
_MAX_BIASED = 1024

Effort = Literal["none", "low", "medium", "high"]
Truncation = Literal["auto", "disabled"]
"""How hard a model is to think, `none` being not at all."""
Refused = Annotated[None, only()]
Hint = Annotated[Any, BeforeValidator(lambda _: None)]
"""Whatever it is: nobody reads it, so it is not kept as long as the answer takes."""


class TemplateKwargs(Strict):
    """What vLLM, SGLang and llama.cpp hand on to the chat template: of that, what is about
    thinking. Which of the first two a template has is the model's business."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    preserve_thinking: bool | None = None
    reasoning_effort: Effort | None = None

    def asked(self) -> dict[str, Any]:
        """What a generation is told of it."""
        told = thinking(self.reasoning_effort)
        if self.preserve_thinking is not None:
            told["keeps_thoughts"] = self.preserve_thinking
        switches = {self.enable_thinking, self.thinking} - {None}
        return told | ({"think": all(switches)} if switches else {})


def thinking(effort: Effort | None) -> dict[str, Any]:
    """What a generation is told of it."""
    if effort is None:
        return {}
    return {"think": False} if effort == "none" else {"effort": effort}


class SteerChoice(Strict):
    """A published steering edit, and how much of it."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    strength: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0


class Extension(Strict):
    """hearthnet's own fields, in one object that other servers are not sent by accident."""

    steer: list[SteerChoice] = Field(default=[], max_length=MAX_EDITS)
    draft: bool = True


RepetitionPenalty = Annotated[float, Field(ge=0.01, le=10)]
"""A logit divided by far less than the least allowed is infinite, and no chance is left to draw."""

AnswerPenalty = Annotated[float, Field(ge=-2, le=2)]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=_MAX_BIASED),
]
"""By token ids, as text."""

Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(ge=0, le=1), AfterValidator(lambda chance: max(chance, 1e-6))]
"""At 0, too, the likeliest token is left."""


class TokenChoice(Strict):
    """How tokens are chosen and where the text ends, in whatever API's words; nothing is said of
    what is left out."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, lt=INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    # of the tokens that the answer has already
    presence_penalty: AnswerPenalty | None = None
    frequency_penalty: AnswerPenalty | None = None

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        texts = [value] if isinstance(value, str) else value or []
        if len(texts) > MAX_STOPS or not all(texts):
            raise ValueError(f"at most {MAX_STOPS} texts, none of them empty")
        return value

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class SamplingBody(TokenChoice):
    """The fields. The defaults are OpenAI's: `temperature` is 1 when absent."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    stream: bool | None = None
    logit_bias: LogitBias | None = None
    # hearthnet's own, as are `top_k` and `min_p`
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None
    resumable: bool | None = None
    wire_dtype: Literal["fp16", "bf16", "fp32"] | None = None
    fallback_to_local: bool | None = None
    hearthnet: Extension | None = None
    # OpenAI's, not here
    service_tier: Annotated[None, only("auto", "default")] = None
    # hints
    user: Hint = None
    metadata: Hint = None
    safety_identifier: Hint = None
    prompt_cache_key: Hint = None

    @model_validator(mode="after")
    def _resumes_what_is_streamed(self) -> Self:
        if self.resumable and not self.stream:
            raise ValueError("resumable needs stream to be true")
        return self

    def _generation(
        self,
        request_id: str,
        principal: Principal,
        max_tokens: int | None,
        logprobs: int | None,
        **what: Any,
    ) -> GenerationRequest:
        """The generation on behalf of `principal` of what `GenerationRequest` has further fields
        for: a text, and what binds the answer."""
        return GenerationRequest(
            request_id=request_id,
            model=ModelId(self.model),
            sampling=self._sampling(max_tokens, logprobs),
            wire_dtype=None if self.wire_dtype is None else WireDtype(self.wire_dtype),
            fallback_to_local=self.fallback_to_local,
            draft=self.hearthnet is None or self.hearthnet.draft,
            steer=self._steer(),
            principal=principal,
            **what,
        )

    def _sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=tuple((int(id), bias) for id, bias in (self.logit_bias or {}).items()),
            seed=self.seed,
            max_tokens=max_tokens,
            stop=self.stop_texts,
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
        )

    def _steer(self) -> tuple[Steer, ...]:
        wanted = self.hearthnet.steer if self.hearthnet is not None else []
        return tuple(Steer(choice.name, choice.strength) for choice in wanted)
