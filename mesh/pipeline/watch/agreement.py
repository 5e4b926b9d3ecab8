"""Did two hosts compute the same thing: activations compared within what honest machines differ by.

Two measures. The relative distance of whole rows sees garbage and drift; in a wide row it cannot
see one channel scaled by a few percent. So every single value is compared as well, relative to its
own size and the row's. How much is honest depends on the number format of the wire and of the
computation, and on whether both run the same kernels; even those differ between one row at a time
and a chunk of rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from mesh.pipeline.watch.sanity import Floats
from mesh.types import ShardDescriptor

_ROUNDING = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Largest relative error of rounding once for the wire."""

_COMPUTE = {"fp32": 5e-5, "fp16": 2.5e-2, "bf16": 0.25}
"""Largest honest difference of a value between two orders of summation, relative to its row: three
times (fp32: ten times) what 4-layer spans of seven families with random weights show between single
rows and chunks; those amplify differences more than trained ones."""

_OTHER_CLASS = 3.0
_TINY = 1e-12


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What may lie between two honest answers: of one value, and of a whole row."""

    value: float
    row: float


GARBAGE = Tolerance(value=2.0, row=0.5)
"""For models that route rows to experts: a near tie falls either way, and everything after it."""


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


def disagreement(one: Floats, other: Floats, allowed: Tolerance) -> float:
    """How many times the worst of two (rows, hidden) answers exceeds the tolerance; <= 1 agrees."""
    if one.shape != other.shape:
        return float("inf")
    distance = np.abs(one - other)
    rms = np.sqrt(np.mean(np.square(other), axis=1, keepdims=True)) + _TINY
    by_value = float((distance / (rms + np.abs(other))).max(initial=0.0))
    by_row = float((np.sqrt(np.mean(np.square(distance), axis=1)) / rms[:, 0]).max(initial=0.0))
    worst = max(by_value / allowed.value, by_row / allowed.row)
    return worst if worst == worst else float("inf")  # noqa: PLR0124 - NaN agrees with nothing


def digest(rows: Floats) -> str:
    """A fingerprint of (rows, hidden) that rounding seldom changes: evidence, not a proof."""
    rms = np.sqrt(np.mean(np.square(rows), axis=1, keepdims=True)) + _TINY
    steps = np.clip(np.round(rows / rms * 4), -127, 127).astype(np.int8)
    return hashlib.sha256(steps.tobytes()).hexdigest()
