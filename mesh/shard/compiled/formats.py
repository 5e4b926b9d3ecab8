"""Matrices in blocks of few bits: how weights are rounded, and what they stand for.

The layout is that of onnxruntime's ``MatMulNBits``: each row in blocks of 32 columns, a code for
each weight, a scale and, in 4 bit, a zero point for each block; ``(code - zero) * scale`` is the
weight. In 8 bit the zero point is 128, and a scale that is a power of two is taken where nothing
needs to be rounded then: weights that were in MXFP4 once stay as they are. In 4 bit, rounding
around zero is off by a tenth of a normal matrix; a zero point for each block, so that its codes
cover what it holds, takes a fifth of that away, and a scale refitted by least squares to a narrowed
range, as llama.cpp does for its K-quants, a little more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

BLOCK = 32
"""Columns that share a scale."""

Quant = Literal["int8", "int4"]

BITS: dict[Quant, int] = {"int8": 8, "int4": 4}

VERSION = 1
"""Counts up when the same weights would get other codes."""

_NARROWED = (1.0, 0.9)
"""Shares of a block's range that are tried."""

_WEIGHTS_AT_ONCE = 1 << 17
"""Weights that are rounded at a time: what that takes stays in the cache of one core."""

_DENSE_AT_ONCE = 1 << 18
"""Weights that are made of codes at a time, likewise: whole matrices take three times as long."""


def bytes_per_weight(quant: Quant) -> float:
    """What one weight of a matrix takes, scales and zero points counted in."""
    bits = BITS[quant]
    return (bits + (32 if bits == 8 else 36) / BLOCK) / 8


MIXED_SIZE: dict[Quant, float] = {"int8": 1.22, "int4": 1.36}
"""What weights of experts take in onnxruntime's memory, as a multiple of what is kept of them:
scales and zero points are widened there (measured, 128 experts of 3 x 768 x 2048)."""


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A matrix of `shape` (out, in).

    `codes` (out, blocks, 32 * bits / 8) uint8, two to a byte in 4 bit, the lower half first;
    `scales` (out, blocks) fp32; `zeros` (out, half the blocks, rounded up) uint8 in 4 bit, packed
    alike, and None in 8 bit.
    """

    bits: int
    shape: tuple[int, int]
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return (
            self.codes.nbytes
            + self.scales.nbytes
            + (0 if self.zeros is None else self.zeros.nbytes)
        )

    def dense(self) -> torch.Tensor:
        """(out, in) fp32."""
        rows, columns = self.shape
        blocks = self.scales.shape[1]
        weights = torch.empty(rows, blocks, BLOCK, device=self.codes.device)
        at_once = max(1, _DENSE_AT_ONCE // columns)
        for start in range(0, rows, at_once):
            some = slice(start, start + at_once)
            codes = self.codes[some] if self.bits == 8 else unpacked(self.codes[some])
            zeros: torch.Tensor | float = 128.0
            if self.zeros is not None:
                zeros = unpacked(self.zeros[some])[:, :blocks, None]
            weights[some].copy_(codes).sub_(zeros).mul_(self.scales[some][..., None])
        return weights.view(rows, -1)[:, :columns]


def quantise(weight: torch.Tensor, quant: Quant) -> BlockMatrix:
    """The nearest matrix of blocks to `weight` (out, in), of any floating dtype."""
    rows, columns = weight.shape
    at_once = max(1, _WEIGHTS_AT_ONCE // columns)
    parts = [_quantise(part, BITS[quant]) for part in torch.split(weight, at_once)]
    codes, scales, zeros = ([part[i] for part in parts] for i in range(3))
    kept = [each for each in zeros if each is not None]
    return BlockMatrix(
        BITS[quant],
        (rows, columns),
        torch.cat([each for each in codes if each is not None]),
        torch.cat([each for each in scales if each is not None]),
        torch.cat(kept) if kept else None,
    )


def joined(matrices: Sequence[BlockMatrix]) -> BlockMatrix:
    """One behind the other, as one matrix; they have as many columns each and as many bits."""
    first = matrices[0]
    zeros = [each.zeros for each in matrices if each.zeros is not None]
    return BlockMatrix(
        first.bits,
        (sum(each.shape[0] for each in matrices), first.shape[1]),
        torch.cat([each.codes for each in matrices]),
        torch.cat([each.scales for each in matrices]),
        torch.cat(zeros) if zeros else None,
    )


def rows_of(matrix: BlockMatrix, rows: torch.Tensor | slice) -> BlockMatrix:
    """Some of its rows, in the order of `rows`."""
    codes = matrix.codes[rows]
    zeros = None if matrix.zeros is None else matrix.zeros[rows]
    return BlockMatrix(
        matrix.bits, (len(codes), matrix.shape[1]), codes, matrix.scales[rows], zeros
    )


def blocks_of(matrix: BlockMatrix, order: torch.Tensor) -> BlockMatrix:
    """All of its blocks of columns, which fill them, in this order."""
    zeros, count = matrix.zeros, matrix.scales.shape[1]
    if zeros is not None:
        zeros = _packed(F.pad(unpacked(zeros)[:, :count][:, order], (0, count % 2)))
    codes, scales = matrix.codes[:, order], matrix.scales[:, order]
    return BlockMatrix(matrix.bits, matrix.shape, codes, scales, zeros)


def of_codes(
    codes: torch.Tensor, scales: torch.Tensor, bits: int, zeros: torch.Tensor | None = None
) -> BlockMatrix:
    """The matrix of these: `codes` (out, blocks, 32) uint8 whose zero is the middle, 128 or 8;
    `scales` (out, blocks) fp32. In 4 bit `zeros` (out, blocks) uint8 may say another for each."""
    rows, blocks, _ = codes.shape
    shape = rows, blocks * BLOCK
    if bits == 8:
        return BlockMatrix(bits, shape, codes, scales, None)
    if zeros is None:
        zeros = torch.full((rows, blocks), 8, dtype=torch.uint8)
    return BlockMatrix(bits, shape, _packed(codes), scales, _packed(F.pad(zeros, (0, blocks % 2))))


class BlockLinear(nn.Module):
    """A linear layer over a `BlockMatrix`, computed in torch from what the matrix stands for.

    Slow: the dense weight is made anew each time, so that it never lies in memory for long. It is
    what "the same quantised model in torch" means.
    """

    def __init__(
        self, matrix: BlockMatrix, bias: torch.Tensor | None, *, transposed: bool = False
    ) -> None:
        """`transposed`: it stands for a layer that shows its weight as (in, out), as GPT-2's do."""
        super().__init__()
        self.transposed = transposed
        self.out_features, self.in_features = matrix.shape
        self.bits = matrix.bits
        self.codes: torch.Tensor
        self.scales: torch.Tensor
        self.zeros: torch.Tensor | None
        self.bias: torch.Tensor | None
        self.register_buffer("codes", matrix.codes)
        self.register_buffer("scales", matrix.scales)
        self.register_buffer("zeros", matrix.zeros)
        self.register_buffer("bias", bias)

    @property
    def matrix(self) -> BlockMatrix:
        """What it multiplies by."""
        shape = (self.out_features, self.in_features)
        return BlockMatrix(self.bits, shape, self.codes, self.scales, self.zeros)

    @property
    def weight(self) -> torch.Tensor:
        """fp32, made for whoever asks, in the shape that the layer had it in."""
        dense = self.matrix.dense()
        return dense.t().contiguous() if self.transposed else dense

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, in_features) -> (…, out_features)."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.matrix.dense().to(x.dtype), bias)


def dense_weight(linear: nn.Module) -> torch.Tensor:
    """The (out, in) weight of a linear layer of either convention."""
    weight: torch.Tensor = linear.weight  # type: ignore[assignment]
    return weight.t() if isinstance(linear, Conv1D) else weight


def _quantise(
    weight: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    rows, columns = weight.shape
    # Sums of other memory layouts would have other last bits.
    padded = F.pad(weight.float(), (0, -columns % BLOCK)).contiguous()
    blocks = padded.view(rows, -1, BLOCK)
    if bits == 8:
        largest = blocks.abs().amax(-1)
        scales = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
        even = torch.ldexp(torch.ones_like(scales), torch.frexp(scales).exponent)
        steps = blocks / even[..., None]
        scales = torch.where((steps == steps.round()).all(-1), even, scales)
        codes = (blocks / scales[..., None]).round_().clamp_(-127, 127).add_(128)
        return codes.to(torch.uint8), scales, None
    codes, scales, zeros = _narrowed(blocks)
    packed_zeros = _packed(F.pad(zeros, (0, zeros.shape[1] % 2)))
    return _packed(codes), scales, packed_zeros


def _narrowed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """4-bit codes (rows, blocks, 32), scales and zero points (rows, blocks) of the least error."""
    low = blocks.amin(-1).clamp_(max=0)
    high = blocks.amax(-1).clamp_(min=0)
    best: tuple[torch.Tensor, ...] | None = None
    for share in _NARROWED:
        scales = (high - low) * (share / 15)
        scales = torch.where(scales > 0, scales, torch.ones_like(scales))
        zeros = (-low * share / scales).round_().clamp_(0, 15)
        codes = (blocks / scales[..., None]).add_(zeros[..., None]).round_().clamp_(0, 15)
        steps = codes - zeros[..., None]
        squares = (steps * steps).sum(-1)
        fitted = (blocks * steps).sum(-1) / squares.clamp(min=1)
        scales = torch.where((squares > 0) & (fitted > 0), fitted, scales)
        error = (steps.mul_(scales[..., None]).sub_(blocks)).square_().sum(-1)
        found = (error, codes, scales, zeros)
        best = found if best is None else _better(best, found)
    assert best is not None  # noqa: S101 - there is a share to try
    return best[1].to(torch.uint8), best[2], best[3].to(torch.uint8)


def _better(
    one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Of each block the one whose error, which is first, is smaller."""
    wins = other[0] < one[0]
    return tuple(
        torch.where(wins[..., None] if b.dim() == 3 else wins, b, a)
        for a, b in zip(one, other, strict=True)
    )


def _packed(nibbles: torch.Tensor) -> torch.Tensor:
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """The halves of each byte, the lower one first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
