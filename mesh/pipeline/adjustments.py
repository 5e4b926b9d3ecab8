"""What a request adds to the logits of single tokens, and takes from them, before they are scaled.

In vLLM's order: `logit_bias` first, then `repetition_penalty` for the tokens of prompt and answer
(Hugging Face's RepetitionPenaltyLogitsProcessor), then OpenAI's two, of which the prompt is no
part: `frequency_penalty` for each time that the answer has the token, `presence_penalty` once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mesh.types import SamplingParams

Logits = NDArray[np.float32]


def adjusts(params: SamplingParams) -> bool:
    """Whether a generation has any of these rules."""
    penalties = params.presence_penalty, params.frequency_penalty
    return bool(params.logit_bias) or params.repetition_penalty != 1.0 or any(penalties)


class Adjustments:
    """Those of one generation, behind as much of its answer as was counted."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], vocab: int) -> None:
        """The ids of prompt and bias are below `vocab`."""
        self._repetition = np.float32(params.repetition_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._bias = np.zeros(vocab, np.float32)
        for token, bias in params.logit_bias:
            self._bias[token] = bias
        self._raised = [(token, bias) for token, bias in params.logit_bias if bias > 0]
        self._is_seen = np.zeros(vocab, np.bool_)
        self._is_seen[list(prompt_ids)] = True
        self._times = np.zeros(vocab, np.float32)

    def count(self, token: int) -> None:
        """The answer goes on with `token`."""
        self._is_seen[token] = True
        self._times[token] += 1

    def of(self, logits: Logits, ids: NDArray[np.int64] | None = None) -> Logits:
        """`logits` (n,) of the tokens `ids` (n,), or of the whole vocabulary, as they count."""
        which = slice(None) if ids is None else ids
        logits = logits + self._bias[which]
        logits = np.where(self._is_seen[which], self._penalised(logits), logits)
        times = self._times[which]
        return logits - self._frequency * times - self._presence * (times > 0)

    def highest(self, logit: float, besides: NDArray[np.int64]) -> float:
        """What no token but `besides` is above any more, where none was above `logit`."""
        if not math.isfinite(logit):
            return logit
        known = set(besides.tolist()) if self._raised else ()
        raised = max((bias for token, bias in self._raised if token not in known), default=0.0)
        # Each step as `of` has it: where it rounds, it rounds both.
        bound = np.float32(logit) + np.float32(raised)
        bound = max(bound, np.float32(self._penalised(bound)))
        if self._frequency < 0:
            bound = bound - self._frequency * self._times.max()
        return float(bound - min(self._presence, np.float32(0)))

    def _penalised(self, logits: Logits | np.float32) -> Logits:
        return np.where(logits < 0, logits * self._repetition, logits / self._repetition)
