"""Chooses the next token from a row of logits.

The rules and their order are Hugging Face's own logits processors, so that a distribution equals
that of `transformers.GenerationMixin.generate` with the same settings; only the draw is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mesh.types import SamplingParams, TokenLogprob

_MIN_TEMPERATURE = 1e-5
"""Below, decoding is greedy, as in vLLM: only the most likely token has a chance left, and logits
divided by far less are infinite, whose softmax is no distribution."""


class Sampler:
    """The sampling state of one generation: its rules, its random numbers, its tokens so far."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._generator: torch.Generator | None = None
        if not _is_greedy(params):
            self._generator = torch.Generator(device="cpu")
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(params.seed)
        self._rules = _rules(params)
        # Only the repetition penalty looks at the tokens; without it nothing is kept.
        self._history = list(prompt_ids) if params.repetition_penalty != 1.0 else None

    def choose(self, logits: torch.Tensor) -> int:
        """The next token id for `logits` (vocab,), any float dtype."""
        if not self._rules and self._generator is None:
            return int(logits.argmax())
        scores = logits.float().unsqueeze(0)  # (1, vocab), as the processors expect
        ids = torch.tensor([self._history or []], dtype=torch.long)
        for rule in self._rules:
            scores = rule(ids, scores)
        if self._generator is None:
            token = int(scores.argmax())
        else:
            chances = torch.softmax(scores, dim=-1).cpu()
            token = int(torch.multinomial(chances, 1, generator=self._generator))
        if self._history is not None:
            self._history.append(token)
        return token


def logprob_of(
    logits: torch.Tensor, token: int, alternatives: int, text_of: Callable[[int], str]
) -> TokenLogprob:
    """What the model itself gave `token`, before any sampling rule, and its strongest rivals."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top: tuple[tuple[int, str, float], ...] = ()
    if alternatives:
        values, ids = logprobs.topk(min(alternatives, logprobs.shape[-1]))
        top = tuple((int(i), text_of(int(i)), float(v)) for i, v in zip(ids, values, strict=True))
    return TokenLogprob(token, text_of(token), float(logprobs[token]), top)


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature < _MIN_TEMPERATURE


def _rules(params: SamplingParams) -> LogitsProcessorList:
    rules = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        rules.append(RepetitionPenaltyLogitsProcessor(penalty=params.repetition_penalty))
    if _is_greedy(params):
        return rules  # what follows cannot change which token is the most likely
    if params.temperature != 1.0:
        rules.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        rules.append(TopKLogitsWarper(top_k=params.top_k))
    if params.top_p < 1.0:
        rules.append(TopPLogitsWarper(top_p=params.top_p))
    if params.min_p > 0.0:
        rules.append(MinPLogitsWarper(min_p=params.min_p))
    return rules
