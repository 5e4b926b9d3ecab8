"""Are these activations possible at all: finite, and no larger than this model makes them.

The bounds come from the model: the largest row norm seen behind each layer boundary while fixed
prompts ran through it, times a generous factor. Honest traffic may widen a bound up to a cap. What
this cannot tell: a plausible wrong value, and a hop that lied while the bounds were recorded. Those
are for `spot_checks`; when one catches a liar, all bounds are forgotten and recorded again without
it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from mesh.errors import ShardCorrupt
from mesh.models.hashing import read_cached, write_json_atomically
from mesh.wire.messages import WireTensor
from mesh.wire.token_rows import Rows, is_blank

FACTOR = 8.0
"""Over the largest row norm seen. Attention sinks are a thousand times a usual row, and the prompts
that bounds are recorded with begin with one."""

CAP = 64.0
"""Over the largest recorded norm: as far as traffic may widen a bound."""

_SAME = 0.02
"""Two hosts whose absurd norms differ by less than this have computed the same thing."""

_TOTAL_OFF = 1e-3
"""What the logarithm of a sum in fp32 over a vocabulary may be off by."""

_LOGIT_OFF = 1e-3
"""What a row may be off by that is computed again, alone."""

_FIX = "Another shard is tried; check the memory and the software of that node."

Floats = NDArray[np.float32]
Boundary = Annotated[str, Meta(pattern=r"\A[0-9]{1,6}\Z")]
Norm = Annotated[float, Meta(ge=0.0, le=sys.float_info.max)]


@dataclass(frozen=True, slots=True)
class _Bounds:
    norms: dict[Boundary, Norm]


def rows_as_floats(tensor: WireTensor) -> Floats:
    """(rows, hidden) of an activation tensor (1, rows, hidden), in fp32; read-only."""
    if tensor.dtype == "fp16":
        values = np.frombuffer(tensor.data, np.float16).astype(np.float32)
    elif tensor.dtype == "bf16":
        halves = np.frombuffer(tensor.data, np.uint16).astype(np.uint32)
        values = (halves << np.uint32(16)).view(np.float32)
    else:
        values = np.frombuffer(tensor.data, np.float32)
    return values.reshape(tensor.shape[1], tensor.shape[2])


class Envelope:
    """The bounds of one checkpoint. Boundary `n` is what leaves layer n-1.

    A boundary that was never recorded has the bound of the largest that was, and is recorded by the
    first traffic that keeps it; without any record everything finite passes.
    """

    def __init__(self, norms: dict[int, float] | None = None) -> None:
        self.is_dirty = False
        self._norms = dict(norms or {})
        self._cap = CAP * max(self._norms.values(), default=math.inf)
        self._recording = False
        self._disputed: dict[int, tuple[str, float]] = {}

    @property
    def is_known(self) -> bool:
        """Whether bounds were recorded."""
        return bool(self._norms)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Everything finite that passes meanwhile is taken as what the model does."""
        self._recording = True
        try:
            yield
        finally:
            self._recording = False
            self._cap = CAP * max(self._norms.values(), default=math.inf)

    def forget(self) -> None:
        """Know no bounds any more: somebody who had a say in them lies."""
        self._norms.clear()
        self._disputed.clear()
        self._cap = math.inf
        self.is_dirty = True

    def check(self, boundary: int, tensor: WireTensor, host: str) -> str:
        """What is wrong with `host`'s answer (1, rows, hidden); empty when nothing is."""
        values = rows_as_floats(tensor)
        with np.errstate(all="ignore"):  # one pass over a row: NaN and Inf show in its sum
            if len(values) == 1:
                norm = math.sqrt(float(np.dot(values[0], values[0])))
            else:
                norm = math.sqrt(float(np.einsum("ij,ij->i", values, values).max()))
        if norm <= self._norms.get(boundary, -1.0):
            return ""
        if not math.isfinite(norm):
            return _not_finite(values)
        return self._beyond(boundary, norm, host)

    def _beyond(self, boundary: int, norm: float, host: str) -> str:
        """A norm that was not seen before: widen the bound, or refuse."""
        most = max(self._norms.values(), default=math.inf)
        bound = min(FACTOR * self._norms.get(boundary, most), self._cap)
        if not self._recording and norm > bound and not self._is_agreed(boundary, norm, host):
            self._disputed[boundary] = (host, norm)
            return f"a row of norm {norm:.4g} where this model stays below {bound:.4g}"
        if self._recording or self._norms:
            self._norms[boundary] = norm
            self.is_dirty = True
        return ""

    def _is_agreed(self, boundary: int, norm: float, host: str) -> bool:
        """Whether another host gave the same absurd answer: then it is the model's own."""
        other, theirs = self._disputed.get(boundary, (host, 0.0))
        return other != host and abs(norm - theirs) <= _SAME * norm

    # On disk, beside the verdict on the wire's dtype

    @classmethod
    def read(cls, cache_dir: Path, weights_sha256: str) -> Envelope:
        """The bounds of an earlier run; an empty envelope when there are none."""
        kept = read_cached(_path(cache_dir, weights_sha256), _Bounds)
        return cls({int(boundary): norm for boundary, norm in kept.norms.items()} if kept else {})

    def write(self, cache_dir: Path, weights_sha256: str) -> None:
        """Keep the bounds for the next start."""
        self.is_dirty = False
        write_json_atomically(_path(cache_dir, weights_sha256), {"norms": self._norms})


def corrupt(node: str, what: str) -> ShardCorrupt:
    """The error with which a hop that answered `what` is replaced."""
    return ShardCorrupt(f"{node} answered with {what}.", fix=_FIX)


def not_finite(tensor: WireTensor) -> str:
    """What is wrong with an answer that no bounds are known for; empty when nothing is."""
    values = rows_as_floats(tensor)
    return "" if bool(np.isfinite(values).all()) else _not_finite(values)


def impossible(said: Rows, vocab: int) -> str:
    """What is wrong with candidates, of rows over a vocabulary, whatever the model is; empty when
    nothing is. Rows of which nothing is said are left out."""
    rows = said[~is_blank(said)]
    ids, logits, totals = rows["ids"], rows["logits"].astype(np.float64), rows["total"]
    if not len(rows) or (len(rows) < len(said) and is_blank(said[-1:])[0]):
        return "no candidates of its last row"
    if not (np.isfinite(logits).all() and np.isfinite(totals).all()):
        return "candidates that are not finite"
    if ids.min() < 0 or ids.max() >= vocab or (np.diff(np.sort(ids, axis=1), axis=1) == 0).any():
        return f"candidates that are not different tokens of {vocab}"
    if (np.diff(logits, axis=1) > 0).any():
        return "candidates that are not in their order"
    first = logits[:, :1]
    known = np.exp(logits - first).sum(axis=1)
    most = known + (vocab - ids.shape[1]) * np.exp(logits[:, -1] - first[:, 0])
    least, total = np.log(known), totals - first[:, 0]
    if (total < least - _TOTAL_OFF).any() or (total > np.log(most) + _TOTAL_OFF).any():
        return "candidates whose chances do not add up"
    return ""


def contradiction(said: Rows, row: Floats) -> str:
    """What is wrong with all logits (vocab,) of a row whose candidates (1,) were said before; empty
    when nothing is."""
    ids, logits, total = said["ids"][0], said["logits"][0], float(said["total"][0])
    if not np.isfinite(row).all():
        return "logits that are not finite"
    others = np.delete(row, ids)
    highest = float(row.max())
    found = highest + math.log(float(np.exp(row - highest).sum(dtype=np.float64)))
    is_same = bool(np.allclose(row[ids], logits, rtol=_LOGIT_OFF, atol=_LOGIT_OFF))
    above = float(others.max(initial=-math.inf) - logits[-1])
    if not is_same or above > _LOGIT_OFF or abs(found - total) > _TOTAL_OFF:
        return "logits that contradict its own candidates"
    return ""


def _not_finite(values: Floats) -> str:
    nans, infinities = int(np.isnan(values).sum()), int(np.isinf(values).sum())
    if nans:
        return f"{nans} NaN in {len(values)} rows"
    if infinities:
        return f"{infinities} Inf in {len(values)} rows"
    return "values whose squares overflow fp32"


def _path(cache_dir: Path, weights_sha256: str) -> Path:
    return cache_dir / "envelope" / f"{weights_sha256}.json"
