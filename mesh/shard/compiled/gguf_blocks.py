"""Weights that a GGUF file holds in blocks of 32, as the blocks that graphs compute with.

Some types are the same thing in another order: codes around a middle and a scale for each block. A
scale is fp16 there and fp32 here, so nothing is rounded. Every other type is decoded and rounded as
any weight. Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from mesh.models.filling import mapped_file
from mesh.models.gguf.decoding import decode_rows, row_order, stored_rows, value_order
from mesh.models.header import Difference, TensorEntry
from mesh.shard.compiled.formats import (
    BITS,
    BLOCK,
    BlockMatrix,
    Quant,
    blocks_of,
    joined,
    of_codes,
    quantise,
    rows_of,
)

_MIDDLE = {8: 128, 4: 8}
_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q5_0": 22, "IQ4_NL": 18}
"""Of a block, the first two its scale."""

_WEIGHTS_AT_ONCE = 1 << 22

_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of IQ4_NL stand for."""


def matrix_of_blocks(entry: TensorEntry, quant: Quant) -> BlockMatrix:
    """The matrix (out, in) of a linear layer; exactly what is stored where `is_exact`, unless a
    model has columns of one block apart.

    Raises BadCheckpoint when the file cannot be read or decoded.
    """
    unlike = entry.unlike
    kind = None if unlike is None else unlike.kind
    columns = entry.shape[0 if kind == "transposed" else 1]
    stored = stored_rows(mapped_file(entry.file, [entry]), entry, columns)
    order = None
    if unlike is not None and kind == "value_columns":
        order = value_order(columns, unlike)
    blocks = None if order is None else _whole_blocks(order)
    if is_exact(entry.dtype, quant) and (order is None or blocks is not None):
        matrix = _as_stored(stored, entry.dtype, quant)
        return _in_order(matrix if blocks is None else blocks_of(matrix, blocks), unlike)
    at_once = max(1, _WEIGHTS_AT_ONCE // columns)
    parts = (decode_rows(part, entry) for part in torch.split(stored, at_once))
    found = [quantise(part if order is None else part[:, order], quant) for part in parts]
    return _in_order(joined(found), unlike)


def _whole_blocks(order: torch.Tensor) -> torch.Tensor | None:
    """The order of blocks that this one of columns is; None where it parts some."""
    if len(order) % BLOCK:
        return None
    blocks = order.view(-1, BLOCK)
    first = blocks[:, :1]
    are_whole = torch.equal(blocks, first + torch.arange(BLOCK)) and not (first % BLOCK).any()
    return first[:, 0] // BLOCK if are_whole else None


def _in_order(matrix: BlockMatrix, unlike: Difference | None) -> BlockMatrix:
    if unlike is None or not unlike.moves_rows:
        return matrix
    return rows_of(matrix, row_order(matrix.shape[0], unlike))


def _as_stored(stored: torch.Tensor, dtype: str, quant: Quant) -> BlockMatrix:
    rows = len(stored)
    blocks = stored.view(-1, _BYTES[dtype])
    codes = (_LEVELS_OF[dtype](blocks) + _MIDDLE[BITS[quant]]).to(torch.uint8)
    scales = blocks[:, :2].contiguous().view(torch.float16).float()
    return of_codes(codes.view(rows, -1, BLOCK), scales.view(rows, -1), BITS[quant])


def is_exact(dtype: str, quant: Quant) -> bool:
    """Whether blocks of this type can be had in the format without rounding."""
    return dtype in _EXACT[quant]


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """16 bytes as 32 numbers: the lower halves of all, then the upper ones."""
    return torch.cat((packed & 15, packed >> 4), dim=1).to(torch.int16)


def _q8_0(stored: torch.Tensor) -> torch.Tensor:
    return stored[:, 2:34].contiguous().view(torch.int8).to(torch.int16)


def _q4_0(stored: torch.Tensor) -> torch.Tensor:
    return _halves(stored[:, 2:18]) - 8


def _q5_0(stored: torch.Tensor) -> torch.Tensor:
    bits = torch.arange(8, dtype=torch.uint8)
    fifth = (stored[:, 2:6, None] >> bits & 1).view(len(stored), 32)
    return (_halves(stored[:, 6:22]) | fifth.to(torch.int16) << 4) - 16


def _iq4_nl(stored: torch.Tensor) -> torch.Tensor:
    return torch.tensor(_LEVELS, dtype=torch.int16)[_halves(stored[:, 2:18]).long()]


_LEVELS_OF: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q5_0": _q5_0, "IQ4_NL": _iq4_nl}
)
_EXACT: Mapping[Quant, frozenset[str]] = MappingProxyType(
    {"int8": frozenset(_LEVELS_OF), "int4": frozenset({"Q4_0"})}
)
