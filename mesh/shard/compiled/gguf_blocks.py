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
from mesh.models.gguf.decoding import decode, model_rows
from mesh.models.header import TensorEntry
from mesh.shard.compiled.formats import BITS, BlockMatrix, Quant, of_codes, quantise

_MIDDLE = {8: 128, 4: 8}

_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of IQ4_NL stand for."""


def matrix_of_blocks(entry: TensorEntry, quant: Quant) -> BlockMatrix:
    """The matrix (out, in) of a linear layer; exactly what is stored where `is_exact`.

    Raises BadCheckpoint when the file cannot be read or decoded.
    """
    area = mapped_file(entry.file, [entry])
    unlike = entry.unlike
    transposed = unlike is not None and unlike.kind == "transposed"
    if not is_exact(entry.dtype, quant):
        dense = decode(area, entry, torch.float32)
        return quantise(dense.t() if transposed else dense, quant)
    rows, columns = entry.shape[::-1] if transposed else entry.shape
    count = rows * columns // 32
    stored = area.tensor(torch.uint8, (count, entry.nbytes // count), entry.offset)
    levels = _levels(entry.dtype)(stored)
    codes = (levels + _MIDDLE[BITS[quant]]).to(torch.uint8).view(rows, -1, 32)
    scales = stored[:, :2].contiguous().view(torch.float16).float().view(rows, -1)
    if unlike is not None and unlike.kind == "rotary_rows":
        order = model_rows(rows, unlike.heads)
        codes, scales = codes[order], scales[order]
    return of_codes(codes, scales, BITS[quant])


def is_exact(dtype: str, quant: Quant) -> bool:
    """Whether blocks of this type can be had in the format without rounding."""
    return dtype in _EXACT[quant]


def _levels(dtype: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return _OF_TYPE[dtype]


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


_OF_TYPE: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q5_0": _q5_0, "IQ4_NL": _iq4_nl}
)
_EXACT: Mapping[Quant, frozenset[str]] = MappingProxyType(
    {"int8": frozenset(_OF_TYPE), "int4": frozenset({"Q4_0"})}
)
