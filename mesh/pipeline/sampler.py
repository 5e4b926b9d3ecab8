"""Chooses the next token from the strongest tokens of a row of logits, or from the whole row.

The rules and their order are Hugging Face's own logits processors, behind what is done to single
tokens (`mesh.pipeline.adjustments`), so that a distribution equals that of
`transformers.GenerationMixin.generate` with the same settings; only the draw is ours: one uniform
number for each token, and the tokens on a line, the strongest `CANDIDATES` first and the others
behind them by their ids. The whole row is read only where the strongest cannot tell; a token is
the same whether it was or not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mesh.models.candidates import Candidates, candidates_of, strongest_of
from mesh.pipeline.adjustments import Adjustments, adjusts
from mesh.pipeline.shortlist import Shortlist, not_finite, shortlist_of
from mesh.types import SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Allowed = NDArray[np.bool_]

_MIN_TEMPERATURE = 1e-5
"""Below, decoding is greedy, as in vLLM: only the most likely token has a chance left, and logits
divided by far less are infinite, whose softmax is no distribution."""


class Sampler:
    """The sampling state of one generation: its rules, its random numbers, its tokens so far."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        draw: Callable[[], float] | None = None,
    ) -> None:
        """`draw` gives the numbers in [0, 1); None: those of the seed in `params`."""
        self._params = params
        self._is_greedy = params.temperature < _MIN_TEMPERATURE
        # As text: numbers are taken without their sign.
        seed = None if params.seed is None else str(params.seed)
        self._draw = draw or random.Random(seed).random  # noqa: S311 - chance, not secrecy
        self._drawn: float | None = None
        self._rules = _rules(params, is_greedy=self._is_greedy)
        self._prompt_ids = prompt_ids
        self._adjusts = adjusts(params)
        self._adjustments: Adjustments | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the strongest token is always the one."""
        return self._is_greedy and not self._adjusts

    def choose(
        self,
        row: torch.Tensor,
        candidates: Candidates | None = None,
        allowed: Allowed | None = None,
    ) -> int:
        """The next token id for `row` (vocab,), any float dtype, whose `candidates` may be known.
        Where not all are `allowed` (of the vocabulary, or more), the others have no chance.

        Raises InternalError for a row to draw from that is not finite.
        """
        if allowed is not None:
            return self._chosen(self._one_of(row, allowed[: len(row)]))
        if self.is_plain:
            return strongest_of(row)
        token = self.choose_among(candidates_of(row) if candidates is None else candidates)
        return self.choose_from(row) if token is None else token

    def choose_among(self, candidates: Candidates, allowed: Allowed | None = None) -> int | None:
        """The next token id; None where only the whole row tells, which is for `choose_from`, or
        for `choose` where not all are `allowed`.

        Raises InternalError for a row to draw from that was not finite.
        """
        if self.is_plain:
            ids = candidates.ids if allowed is None else candidates.ids[allowed[candidates.ids]]
            return int(ids[0]) if len(ids) else None
        if allowed is not None:
            return None
        token = self._among(candidates, self._adjustments_of(candidates.vocab))
        return None if token is None else self._chosen(token)

    def choose_from(self, row: torch.Tensor) -> int:
        """The next token id for the whole row (vocab,), where `choose_among` has not told it."""
        return self._chosen(self._from(self._adjusted(row)))

    def _one_of(self, row: torch.Tensor, allowed: Allowed) -> int:
        """Of the allowed tokens alone, as if the row had no others."""
        if self.is_plain and allowed[strongest := strongest_of(row)]:
            return strongest
        ids = np.flatnonzero(allowed)
        # By numpy: torch takes far longer to pick that many.
        inner = torch.from_numpy(self._adjusted(row).detach().float().cpu().numpy()[ids])
        if self._is_greedy:
            return int(ids[strongest_of(inner)])
        place = self._among(candidates_of(inner))
        return int(ids[self._from(inner) if place is None else place])

    def _among(self, candidates: Candidates, adjustments: Adjustments | None = None) -> int | None:
        shortlist = shortlist_of(candidates, self._params, adjustments, is_greedy=self._is_greedy)
        if shortlist is None:
            return None
        return shortlist.strongest if self._is_greedy else shortlist.at(self._uniform())

    def _from(self, row: torch.Tensor) -> int:
        """Of an adjusted row (vocab,)."""
        if self._is_greedy:
            return strongest_of(row)
        scores = row.float().unsqueeze(0)  # (1, vocab), as the processors expect
        for rule in self._rules:
            scores = rule(None, scores)
        return _token_at(self._uniform(), scores[0])

    def _adjusted(self, row: torch.Tensor) -> torch.Tensor:
        adjustments = self._adjustments_of(len(row))
        if adjustments is None:
            return row
        return torch.from_numpy(adjustments.of(row.detach().float().cpu().numpy()))

    def _adjustments_of(self, vocab: int) -> Adjustments | None:
        if self._adjusts and self._adjustments is None:
            self._adjustments = Adjustments(self._params, self._prompt_ids, vocab)
        return self._adjustments

    def _uniform(self) -> float:
        """The next token's number in [0, 1), the same until the token is chosen."""
        if self._drawn is None:
            self._drawn = self._draw()
        return self._drawn

    def _chosen(self, token: int) -> int:
        self._drawn = None
        if self._adjustments is not None:
            self._adjustments.count(token)
        return token


def logprob_of(
    candidates: Candidates,
    token: int,
    alternatives: int,
    bytes_of: Callable[[int], bytes],
    row: torch.Tensor | None = None,
) -> TokenLogprob:
    """What the model itself gave `token`, before any sampling rule, and its strongest rivals, at
    most as many as there are candidates. `row` (vocab,) is read for a token that is none of them.
    """
    ids, logits = candidates.ids.tolist(), candidates.logits.tolist()
    if token in ids:
        own = logits[ids.index(token)]
    else:
        assert row is not None  # noqa: S101 - it was chosen from it
        own = float(row[token])
    top = tuple(
        (rival, bytes_of(rival), logit - candidates.log_total)
        for rival, logit in zip(ids[:alternatives], logits[:alternatives], strict=True)
    )
    return TokenLogprob(token, bytes_of(token), own - candidates.log_total, top)


def _token_at(uniform: float, scores: torch.Tensor) -> int:
    """The token of `scores` (vocab,) at this share of the line that all of them make."""
    first = candidates_of(scores)
    if not np.isfinite(first.log_total):
        raise not_finite()
    # Those outside are added up in fp64 but need not be that exact one by one.
    others = np.exp(scores.cpu().numpy() - first.logits[0])
    others[first.ids] = 0
    strongest = first.logits.astype(np.float64)
    weights = np.exp(strongest - strongest[0])
    rest = float(others.sum(dtype=np.float64))
    token = Shortlist(first.ids, weights, rest, rest).at(uniform)
    if token is not None:
        return token
    before = float(np.cumsum(weights)[-1])
    beyond = before + np.cumsum(others, dtype=np.float64)
    place = int(np.searchsorted(beyond, uniform * (before + rest), side="right"))
    return min(place, int(np.flatnonzero(others)[-1]))  # the last bits of a sum may go past it


def _rules(params: SamplingParams, *, is_greedy: bool) -> LogitsProcessorList:
    rules = LogitsProcessorList()
    if is_greedy:
        return rules  # none of them changes which token is the most likely
    if params.temperature != 1.0:
        rules.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        rules.append(TopKLogitsWarper(top_k=params.top_k))
    if params.top_p < 1.0:
        rules.append(TopPLogitsWarper(top_p=params.top_p))
    if params.min_p > 0.0:
        rules.append(MinPLogitsWarper(min_p=params.min_p))
    return rules
