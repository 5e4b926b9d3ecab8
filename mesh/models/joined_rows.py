"""Matrices that a model has in one, the rows of one behind those of the other, and a file in two.

Files are read under the names that `half` gives, and models have the whole. Never imports torch:
the daemon reads checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from mesh.errors import BadCheckpoint
from mesh.models.header import Coding, TensorEntry, made_of

Half = Literal["first", "last"]
_HALF = re.compile(r"(?P<stem>.+)\.(?:first|last)_rows(?P<end>(?:\.weight)?)")


def half(name: str, which: Half) -> str:
    """What the first or last rows of the matrix `name` are called, without ``.weight``."""
    return f"{name}.{which}_rows"


def with_joined_rows(stored: Mapping[str, TensorEntry]) -> Mapping[str, TensorEntry]:
    """The tensors of the model by name, of those that are `stored`: two halves have become what
    they are of, with a `coding`. Raises BadCheckpoint where they do not fit together."""
    found: dict[str, TensorEntry] = {}
    for name, entry in stored.items():
        match = _HALF.fullmatch(name)
        if match is None:
            found[name] = entry
            continue
        stem, end = match["stem"], match["end"]
        if f"{stem}{end}" in found:
            continue  # with its other half
        first, last = (stored.get(f"{half(stem, which)}{end}") for which in ("first", "last"))
        if first is None or last is None or f"{stem}{end}" in stored:
            raise _unfit(entry)
        found[f"{stem}{end}"] = _joined(f"{stem}{end}", first, last)
    return found


def _joined(name: str, first: TensorEntry, last: TensorEntry) -> TensorEntry:
    """(…, rows of both, columns) of (…, rows, columns) each."""
    (*count, rows, columns), (*other, more, width) = first.shape, last.shape
    if (count, columns) != (other, width):
        raise _unfit(first)
    coding = Coding("rows", {"first": first, "last": last}, 1, columns)
    return made_of(name, (*count, rows + more, columns), first.dtype, coding)


def _unfit(entry: TensorEntry) -> BadCheckpoint:
    return BadCheckpoint(
        f"{entry.file} cannot be used: {entry.name}, {list(entry.shape)}, does not fit the other"
        " half of its matrix.",
        fix="Download the file again.",
    )
