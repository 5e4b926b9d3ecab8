"""The `options` of Ollama's bodies: how tokens are chosen, and what servers of its kind are set up
with.

An option that would change the answer elsewhere and cannot here is refused by name. Those that say
how a machine is to load a model are taken without effect: most clients send them, and here the mesh
decides.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from mesh.api.bodies import only
from mesh.api.openai.sampling import INT32, Hint, RepetitionPenalty, TokenChoice
from mesh.types import SamplingParams

_TEMPERATURE, _TOP_K, _TOP_P = 0.8, 40, 0.9
"""Ollama's own defaults."""


def _says_something(value: int) -> int:
    if value == 0:
        raise ValueError("0 tokens are no answer; -1 is for no limit")
    return value


NumPredict = Annotated[int, Field(ge=-2, lt=INT32), AfterValidator(_says_something)]


class Options(TokenChoice):
    """How the answer is chosen. As Ollama has it, `temperature` is 0.8, `top_k` 40 and `top_p` 0.9
    where they are left out, and `num_predict` is the most tokens, -1 or -2 for no limit. A `seed`
    of -1 is as none. `repeat_penalty` counts the whole text, prompt included, and the other two
    penalties only the answer.

    A prompt that is too long for the model is refused whatever `num_ctx` says, never cut.
    """

    num_predict: NumPredict | None = None
    repeat_penalty: RepetitionPenalty | None = None
    # Ollama's, not here
    repeat_last_n: int | None = None
    typical_p: Annotated[None, only(1, 1.0)] = None
    tfs_z: Annotated[None, only(1, 1.0)] = None
    mirostat: Annotated[None, only(0)] = None
    penalize_newline: Annotated[None, only(True)] = None
    # how a machine loads the model
    num_ctx: Hint = None
    num_batch: Hint = None
    num_gpu: Hint = None
    main_gpu: Hint = None
    num_thread: Hint = None
    numa: Hint = None
    low_vram: Hint = None
    f16_kv: Hint = None
    use_mmap: Hint = None
    use_mlock: Hint = None
    logits_all: Hint = None
    vocab_only: Hint = None
    embedding_only: Hint = None
    # of what is not done here
    num_keep: Hint = None
    mirostat_tau: Hint = None
    mirostat_eta: Hint = None

    @model_validator(mode="after")
    def _repeats_are_counted_in_the_whole_text(self) -> Self:
        if self.repeat_last_n not in (None, -1) and self.repeat_penalty not in (None, 1):
            raise ValueError(
                "repeat_last_n: values other than -1 are not supported beside a repeat_penalty,"
                " which counts the whole text"
            )
        return self

    def filled(self, **beside: float | None) -> Self:
        """The same, and what stands beside the options where they say nothing."""
        unsaid = {name: value for name, value in beside.items() if getattr(self, name) is None}
        return self.model_copy(update=unsaid)

    def sampling(self, logprobs: int | None) -> SamplingParams:
        """How tokens are chosen; `logprobs` as there."""
        limit = self.num_predict or -1
        return SamplingParams(
            temperature=_TEMPERATURE if self.temperature is None else self.temperature,
            top_k=max(_TOP_K if self.top_k is None else self.top_k, 0),
            top_p=_TOP_P if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repeat_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=None if self.seed == -1 else self.seed,
            max_tokens=limit if limit > 0 else None,
            stop=self.stop_texts,
            logprobs=logprobs,
        )
