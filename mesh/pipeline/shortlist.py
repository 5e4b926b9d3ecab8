"""What sampling rules leave of the strongest tokens, and whether they tell the next one by
themselves.

How likely the tokens outside are is known between two bounds only: their sum at temperature 1 is
the row's total less the candidates, none of them is stronger than the weakest candidate, and at
another temperature the sum of powers lies between those of an even and of the most uneven
distribution (Jensen's inequality). What comes out the same at both bounds is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mesh.errors import InternalError
from mesh.models.candidates import Candidates
from mesh.pipeline.adjustments import Adjustments
from mesh.types import SamplingParams

_ROUNDING = 2e-6
"""What fp32 sums over a vocabulary may be off by, relatively: nothing is decided that near."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Shortlist:
    """The tokens that may be next, strongest first, with weights in proportion to their chances.

    The weights of all tokens outside add up to something between `least` and `most`.
    """

    ids: NDArray[np.int64]
    weights: Floats
    least: float
    most: float

    @property
    def strongest(self) -> int:
        """The most likely token."""
        return int(self.ids[0])

    def at(self, uniform: float) -> int | None:
        """The token at this share, in [0, 1), of the line that all make in this order; None where
        it may be one outside, or lies too near a border."""
        reached = np.cumsum(self.weights)
        low = int(np.searchsorted(reached, uniform * (reached[-1] + self.least), side="right"))
        high = int(np.searchsorted(reached, uniform * (reached[-1] + self.most), side="right"))
        if not self.most:
            low = high = min(high, int(np.flatnonzero(self.weights)[-1]))
        return int(self.ids[low]) if low == high < len(self.ids) else None


def shortlist_of(
    candidates: Candidates,
    params: SamplingParams,
    adjustments: Adjustments | None,
    *,
    is_greedy: bool,
) -> Shortlist | None:
    """What Hugging Face's logits processors leave of `candidates`, to be adjusted first; None where
    that also depends on the rest of the row.

    For a greedy choice only `Shortlist.strongest` counts. Raises InternalError for a row to draw
    from that was not finite.
    """
    ids, scores, floor = _adjusted(candidates, adjustments)
    if not len(ids):
        return None
    if is_greedy:
        return Shortlist(ids, np.empty(0), 0.0, 0.0)
    if not math.isfinite(candidates.log_total):
        raise not_finite()
    # In fp32, as the processors do; only what is added up is wider.
    scaled = (scores / np.float32(params.temperature)).astype(np.float64)
    weights = np.exp(scaled - scaled[0])
    if adjustments is None:
        bounds = _rest(candidates, 1 / params.temperature)
    else:
        outside = candidates.vocab - len(ids)
        highest = floor / params.temperature - float(scaled[0])
        bounds = 0.0, (outside * math.exp(highest) if outside else 0.0)
    shortlist: Shortlist | None = Shortlist(ids, weights, *bounds)
    for rule in (_top_k, _top_p, _min_p):
        if shortlist is not None:
            shortlist = rule(shortlist, params)
    return shortlist


def not_finite() -> InternalError:
    """The error of logits that are no distribution."""
    return InternalError(
        "the head's logits are not finite.", fix="Compute in another number format (--dtype)."
    )


def _adjusted(
    candidates: Candidates, adjustments: Adjustments | None
) -> tuple[NDArray[np.int64], NDArray[np.float32], float]:
    """The candidates that are stronger than any token outside, strongest first, their scores, and
    what no token outside is above, all as adjusted."""
    ids, scores = candidates.ids, candidates.logits
    floor = float(scores[-1]) if len(ids) < candidates.vocab else -math.inf
    if adjustments is None:
        return ids, scores, floor
    floor, scores = adjustments.highest(floor, ids), adjustments.of(scores, ids)
    order = np.lexsort((ids, -scores))
    order = order[scores[order] > floor]
    return ids[order], scores[order], floor


def _rest(candidates: Candidates, power: float) -> tuple[float, float]:
    """Bounds of the weights of all tokens outside, where the strongest token's is 1 and the sum of
    their weights to the power of 1/`power` is what the row's total leaves."""
    outside = candidates.vocab - len(candidates.ids)
    if not outside:
        return 0.0, 0.0
    logits = candidates.logits.astype(np.float64)
    total = math.exp(candidates.log_total - float(logits[0]))
    rest = total - float(np.exp(logits - logits[0]).sum())
    off = (_ROUNDING + float(np.spacing(np.float32(abs(candidates.log_total))))) * total
    weakest = float(logits[-1] - logits[0])  # the log of the largest weight outside, at most
    most = min(rest + off, outside * math.exp(weakest))
    least = min(max(0.0, rest - off), most)
    even = [outside * (bound / outside) ** power for bound in (least, most)]
    uneven = [_times_exp(bound, (power - 1) * weakest) for bound in (least, most)]
    return (even[0], uneven[1]) if power >= 1 else (uneven[0], even[1])


def _times_exp(value: float, exponent: float) -> float:
    return math.exp(math.log(value) + exponent) if value > 0 else 0.0


def _top_k(shortlist: Shortlist, params: SamplingParams) -> Shortlist | None:
    """Those as strong as the k-th."""
    count, weights = params.top_k, shortlist.weights
    if not count:
        return shortlist
    # One outside may be as strong as the last candidate.
    if shortlist.most and (count >= len(weights) or weights[count - 1] <= weights[-1]):
        return None
    if count >= len(weights):
        return shortlist
    return _cut(shortlist, int(np.searchsorted(-weights, -weights[count - 1], side="right")))


def _top_p(shortlist: Shortlist, params: SamplingParams) -> Shortlist | None:
    """Those before whom less than `top_p` of all chances lies."""
    if params.top_p >= 1:
        return shortlist
    before = np.concatenate(([0.0], np.cumsum(shortlist.weights)))
    fewest = params.top_p * (before[-1] + shortlist.least) * (1 - _ROUNDING)
    mosts = params.top_p * (before[-1] + shortlist.most) * (1 + _ROUNDING)
    count = max(1, int(np.searchsorted(before, fewest)))
    if count != max(1, int(np.searchsorted(before, mosts))):
        return None
    if count >= len(shortlist.weights):
        return None if shortlist.most else shortlist
    # Which of equal ones is left out is for the processor's own sorting to say.
    if shortlist.weights[count - 1] == shortlist.weights[count]:
        return None
    return _cut(shortlist, count)


def _min_p(shortlist: Shortlist, params: SamplingParams) -> Shortlist | None:
    """Those with at least `min_p` of the strongest token's chance."""
    if params.min_p <= 0:
        return shortlist
    ratios = -shortlist.weights / shortlist.weights[0]
    count = int(np.searchsorted(ratios, -params.min_p * (1 - _ROUNDING)))
    if count != int(np.searchsorted(ratios, -params.min_p * (1 + _ROUNDING))):
        return None
    if count == len(ratios) and shortlist.most:
        return None
    return _cut(shortlist, max(1, count))


def _cut(shortlist: Shortlist, count: int) -> Shortlist:
    return Shortlist(shortlist.ids[:count], shortlist.weights[:count], 0.0, 0.0)
