"""Weights that are stored as codes with their scales, as the blocks that graphs compute with.

Integers in groups of columns are the same thing in another order, where blocks of 32 lie within
the groups and have room for the codes and their zero points: nothing is rounded then. All else is
decoded and rounded as any weight.
"""

from __future__ import annotations

import torch

from mesh.models.coded.numbers import Levels, fp8_rows, levels_of, pieces
from mesh.models.filling import stored_parts
from mesh.models.header import TensorEntry
from mesh.shard.compiled.formats import (
    BITS,
    BLOCK,
    BlockMatrix,
    Quant,
    joined,
    of_codes,
    quantise,
)


def matrix_of_codes(entry: TensorEntry, quant: Quant) -> BlockMatrix:
    """The matrix (out, in) of a linear layer; exactly what is stored where the format has room for
    it. Raises BadCheckpoint when the files cannot be read."""
    coding, parts = entry.coding, stored_parts(entry)
    assert coding is not None  # noqa: S101 - who asks has looked
    rows = pieces(*entry.shape)
    if coding.kind == "fp8":
        return joined([quantise(fp8_rows(coding, parts, some), quant) for some in rows])
    levels = levels_of(coding, parts)
    exact = _as_stored(levels, BITS[quant], rows)
    return exact or joined([quantise(levels.dense(some), quant) for some in rows])


def _as_stored(levels: Levels, bits: int, rows: list[slice]) -> BlockMatrix | None:
    """None where the format has no room for it."""
    height, width = levels.codes.shape
    if levels.order is not None or levels.columns % BLOCK or width % BLOCK:
        return None
    blocks = levels.columns // BLOCK
    scales = levels.scales.repeat_interleave(blocks, dim=1)
    zeros = levels.zeros.repeat_interleave(blocks, dim=1)
    codes = levels.codes.view(height, -1, BLOCK)
    if bits == 4:
        if int(codes.amax()) > 15 or int(zeros.amin()) < 0 or int(zeros.amax()) > 15:
            return None
        return of_codes(codes, scales, bits, zeros.to(torch.uint8))
    middled = torch.empty_like(codes)
    for some in rows:
        moved = codes[some].to(torch.int16) - zeros[some, :, None] + 128
        if int(moved.amin()) < 0 or int(moved.amax()) > 255:
            return None
        middled[some] = moved.to(torch.uint8)
    return of_codes(middled, scales, bits)
