"""The strongest few of a row of logits: nearly always enough to choose the next token from.

Knows no sampling rules (`mesh.pipeline.sampler`) and not where a row was computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

CANDIDATES = 64
"""How many are kept: more than the usual `top_k` (40 to 50) and all that log-probabilities name."""

_BLOCKS_EACH = 4
"""Blocks of a row per candidate: enough that their maxima tell nearly where the last one lies."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The strongest of one row of logits over a vocabulary of `vocab` tokens.

    `ids` (k,) int64 are strongest first, of equal ones the lowest first; `logits` (k,) float32 are
    theirs. `log_total` is the log of the sum of exp over the whole row, to the nearest float32, not
    finite where a logit is infinite or no number.
    """

    ids: NDArray[np.int64]
    logits: NDArray[np.float32]
    log_total: float
    vocab: int


def candidates_of(row: torch.Tensor, k: int = CANDIDATES) -> Candidates:
    """The strongest `k` of a row (vocab,) of any float dtype, or all where it has no more."""
    scores: NDArray[np.float32] = row.detach().float().cpu().numpy()
    ids = _strongest(scores, min(k, len(scores)))
    highest = float(scores[ids[0]])
    with np.errstate(invalid="ignore"):  # a row that is not finite has no total; that is said
        total = float(np.exp(scores - scores[ids[0]]).sum(dtype=np.float64))
    # As a hop says it: what follows from it is then the same whoever has run the head.
    log_total = float(np.float32(highest + math.log(total)))
    return Candidates(ids, scores[ids], log_total, len(scores))


def strongest_of(row: torch.Tensor) -> int:
    """The strongest token of a row (vocab,), of equal ones the lowest."""
    # Of numpy, whose vectorised search takes a tenth of the time of torch's.
    return int(row.detach().float().cpu().numpy().argmax())


def _strongest(scores: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """The places of the `k` highest of `scores`, highest first, of equal ones the lowest first."""
    blocks = _BLOCKS_EACH * k
    size = len(scores) // blocks
    if size < 2:
        return np.argsort(-scores, kind="stable")[:k]
    # The k-th highest of all is no lower than the k-th highest of the blocks' maxima.
    highest = scores[: blocks * size].reshape(size, blocks).max(axis=0)
    least = np.partition(highest, blocks - k)[blocks - k]
    places = np.flatnonzero(~(scores < least))  # also what is no number
    return places[np.argsort(-scores[places], kind="stable")[:k]]
