"""Tensors that a model has as one and a GGUF file as two: a matrix in two halves of rows, and the
layer that makes keys and values of a latent as a matrix for each head (`mesh.models.gguf`).

Files are read under the names that `half` gives and `KEYS` and `VALUES` are, and models have the
whole. Never imports torch: the daemon reads checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from mesh.errors import BadCheckpoint
from mesh.models.header import Coding, TensorEntry, made_of

LAYER, KEYS, VALUES = "kv_b_proj", "k_b_proj", "v_b_proj"
"""What models call the layer, and what the stacks are called here."""

Half = Literal["first", "last"]


def half(name: str, which: Half) -> str:
    """What the first or last rows of the matrix `name` are called, without ``.weight``."""
    return f"{name}.{which}_rows"


def with_pairs(stored: Mapping[str, TensorEntry]) -> Mapping[str, TensorEntry]:
    """The tensors of the model by name, of those that are `stored`: two that stand for one have
    become that, with a `coding`. Raises BadCheckpoint where they do not fit together."""
    found: dict[str, TensorEntry] = {}
    for name, entry in stored.items():
        match = _PART.fullmatch(name)
        if match is None:
            found[name] = entry
            continue
        stem, end, pair = match["stem"], match["end"], _PAIRS[match["part"]]
        whole = f"{stem}{pair.whole}{end}"
        if whole in found and whole not in stored:
            continue  # with its other half
        first, last = (stored.get(f"{stem}{part}{end}") for part in (pair.first, pair.last))
        if first is None or last is None or whole in stored:
            raise _unfit(entry, pair)
        found[whole] = pair.made(whole, first, last)
    return found


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two parts of names, what stands in the place of both, and `why` some become nothing."""

    first: str
    last: str
    whole: str
    made: Callable[[str, TensorEntry, TensorEntry], TensorEntry]
    why: str


def _of_rows(name: str, first: TensorEntry, last: TensorEntry) -> TensorEntry:
    """(…, rows of both, columns) of (…, rows, columns) each."""
    (*count, rows, columns), (*other, more, width) = first.shape, last.shape
    if (count, columns) != (other, width):
        raise _unfit(first, _ROWS)
    coding = Coding("rows", {"first": first, "last": last}, 1, columns)
    return made_of(name, (*count, rows + more, columns), first.dtype, coding)


def _of_latents(name: str, keys: TensorEntry, values: TensorEntry) -> TensorEntry:
    """(heads * (key + value width), rank), of each head the rows for keys and behind them those for
    values, of (heads, rank, key width) and (heads, value width, rank)."""
    if (len(keys.shape), len(values.shape)) != (3, 3):
        raise _unfit(keys, _LATENTS)
    (heads, rank, wide), (others, width, columns) = keys.shape, values.shape
    if (heads, rank) != (others, columns):
        raise _unfit(keys, _LATENTS)
    parts = {
        "keys": replace(keys, shape=(heads * rank, wide)),
        "values": replace(values, shape=(heads * width, rank)),
    }
    shape = heads * (wide + width), rank
    return made_of(name, shape, keys.dtype, Coding("latent", parts, 1, rank))


_ROWS = _Pair(
    half("", "first"), half("", "last"), "", _of_rows, "does not fit the other half of its matrix"
)
_LATENTS = _Pair(
    f".{KEYS}", f".{VALUES}", f".{LAYER}", _of_latents,
    "and what belongs to it make no layer that gives each head its keys and values",
)  # fmt: skip
_PAIRS = {part: pair for pair in (_ROWS, _LATENTS) for part in (pair.first, pair.last)}
_PART = re.compile(rf"(?P<stem>.+)(?P<part>{'|'.join(map(re.escape, _PAIRS))})(?P<end>(\.weight)?)")


def _unfit(entry: TensorEntry, pair: _Pair) -> BadCheckpoint:
    return BadCheckpoint(
        f"{entry.file} cannot be used: {entry.name}, {list(entry.shape)}, {pair.why}.",
        fix="Download the file again.",
    )
