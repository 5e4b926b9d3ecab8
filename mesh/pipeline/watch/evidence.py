"""What a hop was asked and answered, kept until another host's answers are compared with it.

A check waits for its judge, and meanwhile the session may go back, end, or be taken over by the
next request. So nothing here asks a hop what is so now.

Activations are compared within what honest machines differ by, with two measures. The relative
distance of whole rows sees garbage and drift; in a wide row it cannot see one channel scaled by a
few percent. So every single value is compared as well, relative to its own size and the row's. How
much is honest depends on the number format of the wire and of the computation, and on whether both
run the same kernels; even those differ between one row at a time and a chunk of rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesh.pipeline.history import History, chunk_rows
from mesh.pipeline.hop import HopSession
from mesh.pipeline.terms import SessionTerms
from mesh.pipeline.watch.sanity import Floats, rows_as_floats
from mesh.types import RouteHop, ShardDescriptor
from mesh.wire.messages import WireTensor
from mesh.wire.token_rows import top_from_wire

_ROUNDING = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Largest relative error of rounding once for the wire."""

_COMPUTE = {"fp32": 5e-5, "fp16": 2.5e-2, "bf16": 0.25, "int8": 0.15, "int4": 0.15}
"""Largest honest difference of a value between two orders of summation, relative to its row: three
times (fp32: ten times) what 4-layer spans of seven families with random weights (int8 and int4:
eleven) show between single rows and chunks; those amplify differences more than trained ones."""

Said = NDArray[Any]
"""What a hop said of rows: (rows, hidden) floats, or (rows,) of candidates."""

_OTHER_CLASS = 3.0
_TINY = 1e-12


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What may lie between two honest answers: of one value, and of a whole row."""

    value: float
    row: float


GARBAGE = Tolerance(value=2.0, row=0.5)
"""For models that route rows to experts: a near tie falls either way, and everything after it; and
for those with running states, which add up what was rounded."""


def tolerance(
    wire_dtype: str, one: ShardDescriptor, other: ShardDescriptor, *, routed: bool
) -> Tolerance:
    """For answers of two shards that store their weights in the same format."""
    if routed:
        return GARBAGE
    noise = _COMPUTE.get(one.dtype, _COMPUTE["bf16"])
    if one.determinism_class != other.determinism_class:
        noise *= _OTHER_CLASS
    value = min(noise + 2.2 * _ROUNDING.get(wire_dtype, 2.0**-8), GARBAGE.value)  # both rounded
    return Tolerance(value, min(value / 2, GARBAGE.row))


def rows_said(tensor: WireTensor) -> Said:
    """What an answer says of its rows."""
    return top_from_wire(tensor) if tensor.dtype == "int8" else rows_as_floats(tensor)


def disagreement(one: Said, other: Said, allowed: Tolerance) -> float:
    """How many times the worst of two answers to the same rows exceeds the tolerance; <= 1 agrees.

    Candidates are compared where both say some: as the logits of all tokens that either names. Of
    one that the other does not name it is known that its logit is at most its weakest.
    """
    if one.dtype.names is not None and one.dtype == other.dtype:
        rows = [_logits(*pair) for pair in zip(one, other, strict=True) if not _is_unsaid(*pair)]
        return max((_apart(*pair, allowed) for pair in rows), default=0.0)
    return _apart(one, other, allowed)


def _is_unsaid(one: Said, other: Said) -> bool:
    return bool(np.isnan(one["total"]) or np.isnan(other["total"]))


def _logits(one: Said, other: Said) -> tuple[Floats, Floats]:
    """Two rows of candidates as logits (1, tokens), the logarithm of the sums behind them."""
    mine, theirs = (
        dict(zip(each["ids"].tolist(), each["logits"].tolist(), strict=True))
        for each in (one, other)
    )
    least, lowest = float(one["logits"][-1]), float(other["logits"][-1])
    tokens = mine.keys() | theirs.keys()
    ours = [mine[token] if token in mine else min(least, theirs[token]) for token in tokens]
    others = [theirs[token] if token in theirs else min(lowest, mine[token]) for token in tokens]
    ours.append(float(one["total"]))
    others.append(float(other["total"]))
    return np.array([ours], np.float32), np.array([others], np.float32)


def _apart(one: Floats, other: Floats, allowed: Tolerance) -> float:
    if one.shape != other.shape:
        return float("inf")
    distance = np.abs(one - other)
    rms = np.sqrt(np.mean(np.square(other), axis=1, keepdims=True)) + _TINY
    by_value = float((distance / (rms + np.abs(other))).max(initial=0.0))
    by_row = float((np.sqrt(np.mean(np.square(distance), axis=1)) / rms[:, 0]).max(initial=0.0))
    worst = max(by_value / allowed.value, by_row / allowed.row)
    return worst if worst == worst else float("inf")  # noqa: PLR0124 - NaN agrees with nothing


def digest(rows: Said) -> str:
    """A fingerprint of rows that rounding seldom changes: evidence, not a proof."""
    if rows.dtype.names is not None:
        return hashlib.sha256(rows["ids"].tobytes()).hexdigest()
    rms = np.sqrt(np.mean(np.square(rows), axis=1, keepdims=True)) + _TINY
    steps = np.clip(np.round(rows / rms * 4), -127, 127).astype(np.int8)
    return hashlib.sha256(steps.tobytes()).hexdigest()


@dataclass(slots=True)
class Record:
    """What one hop answered: `outputs` holds the rows from position `start` on.

    `inputs` are the hop's own as long as its session goes on, so they follow its cuts.
    """

    hop: RouteHop
    terms: SessionTerms
    inputs: History
    start: int
    outputs: History = field(default_factory=History)
    shadow: HopSession | None = None
    greeted: bool = False
    running: bool = False
    rewound: bool = False
    ended: bool = False

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.start + self.outputs.length

    def cut(self, position: int) -> None:
        """Forget the rows from `position` on."""
        self.outputs.cut(max(0, position - self.start))
        self.start = min(self.start, position)
        self.rewound = True
        if self.shadow is not None:
            self.shadow.cut(position)

    def end_session(self) -> None:
        """The session ended or rests: who takes it over may cut it without this being told."""
        self.ended = True
        if self.running:
            self.inputs = self.inputs.copy()
        else:
            self.close()

    def rows(self, start: int, stop: int) -> Said:
        """What was answered of positions start..stop-1."""
        tensors = self.outputs.window(start - self.start, stop - self.start)
        return np.concatenate([rows_said(tensor) for tensor in tensors])

    def close(self) -> None:
        """Give the other host's session back."""
        if self.shadow is not None:
            self.shadow.close()
            self.shadow = None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Positions, what the hop said of them, what the shadow says, and how far they are apart.

    `inputs`: what both were asked, from position 0 on.
    """

    inputs: History
    start: int
    stop: int
    said: Said
    other: Said
    excess: float


def pieces(inputs: History, start: int, stop: int) -> Iterator[tuple[int, WireTensor]]:
    """The inputs at positions start..stop-1, each with its position, in pieces to ask for."""
    return inputs.chunks(chunk_rows(inputs.width), start, stop)
