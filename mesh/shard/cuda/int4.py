"""Linear layers in 4 bit on CUDA, by the kernel that torch has for them.

The codes are those of `mesh.shard.compiled.formats`, so a model that was rounded for a CPU is the
same one here; scales and what stands for the zero points are bf16. Needs a card of compute
capability 8.0 or more.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from mesh.shard.compiled.formats import BLOCK, BlockLinear, BlockMatrix, rows_of, unpacked
from mesh.shard.compiled.latent import LatentLinear

KERNELS = "int4pack"

_TILES = (8, 4, 2)
"""Tiles of 16 columns that the kernel takes at a time."""

_ROWS_PER_TILE = 8

_AT_ONCE = 512
"""Rows or columns that are made dense at a time."""

_TOLERANCE = 0.02

# Torch has no public name for these; what they give is checked before they are used.
_PACK = torch.ops.aten._convert_weight_to_int4pack  # noqa: SLF001
_MULTIPLY = torch.ops.aten._weight_int4pack_mm  # noqa: SLF001


class Int4Linear(nn.Module):
    """A linear layer whose weight is packed as the kernel reads it, in bf16 otherwise."""

    def __init__(
        self, matrix: BlockMatrix, bias: torch.Tensor | None, device: torch.device
    ) -> None:
        """`matrix` in 4 bit, as `fits` says."""
        super().__init__()
        self.out_features, self.in_features = matrix.shape
        assert matrix.zeros is not None  # noqa: S101 - in 4 bit it has some
        codes = matrix.codes.to(device).view(self.out_features, -1)
        swapped = (codes << 4) | (codes >> 4)  # here the lower half of a byte is first
        scales = matrix.scales.to(device)
        zeros = unpacked(matrix.zeros.to(device))[:, : scales.shape[1]]
        shifts = (8 - zeros.float()) * scales  # the kernel's codes are around 8
        self.packed: torch.Tensor
        self.scales: torch.Tensor
        self.bias: torch.Tensor | None
        self.register_buffer("packed", _PACK(swapped, _tiles(self.in_features)))
        both = torch.stack((scales, shifts), -1).to(torch.bfloat16)
        self.register_buffer("scales", both.transpose(0, 1).contiguous())
        self.register_buffer("bias", None if bias is None else bias.to(device, torch.bfloat16))

    @property
    def weight(self) -> torch.Tensor:
        """(out, in) bf16, made for whoever asks: what it makes of each unit vector."""
        device, size = self.packed.device, self.in_features
        parts = []
        for first in range(0, size, _AT_ONCE):
            rows = min(_AT_ONCE, size - first)
            units = torch.zeros(rows, size, dtype=torch.bfloat16, device=device)
            units[:, first : first + rows].fill_diagonal_(1)
            parts.append(self._product(units))
        return torch.cat(parts).t().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, in_features) -> (…, out_features)."""
        if torch.is_grad_enabled() and x.requires_grad:  # the kernel has no derivative
            return F.linear(x, self.weight, self.bias)
        output = self._product(x.reshape(-1, self.in_features))
        output = output if self.bias is None else output + self.bias
        return output.view(*x.shape[:-1], self.out_features)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _MULTIPLY(rows.contiguous(), self.packed, BLOCK, self.scales)
        return output


def fits(matrix: BlockMatrix) -> bool:
    """Whether the kernel takes a matrix of this form."""
    rows, columns = matrix.shape
    return matrix.bits == 4 and rows % _ROWS_PER_TILE == 0 and _tiles(columns) > 0


@torch.inference_mode()
def to_device(module: nn.Module, device: torch.device) -> int:
    """Move a span that was rounded to 4 bit to a card, in bf16; how many layers stay in 4 bit.

    Those whose form the kernel does not take, or of which it gives other numbers, become dense.
    """
    packed = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BlockLinear):
                layer = _moved(child, device)
                packed += isinstance(layer, Int4Linear)
                setattr(parent, name, layer)
            elif isinstance(child, LatentLinear):
                setattr(parent, name, _dense(child.weight.to(device), None))
    for parameter in module.parameters():
        parameter.data = parameter.data.to(device, torch.bfloat16)
    module.to(device)  # tables stay in the dtype that they are computed in
    return packed


def _moved(linear: BlockLinear, device: torch.device) -> nn.Module:
    linear = linear.to(device)
    matrix = linear.matrix
    if fits(matrix) and not linear.transposed:
        layer = Int4Linear(matrix, linear.bias, device)
        if _agrees(layer, matrix):
            return layer
    return _dense(matrix.dense(), linear.bias)


def _dense(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """In bf16, where the `weight` (out, in) lies."""
    dense = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, "meta")
    dense.weight = nn.Parameter(weight.to(torch.bfloat16), requires_grad=False)
    if bias is not None:
        dense.bias = nn.Parameter(bias.to(torch.bfloat16), requires_grad=False)
    return dense


def _agrees(layer: Int4Linear, matrix: BlockMatrix) -> bool:
    """Whether the kernel multiplies by all of `matrix`, which lies where the layer does."""
    seeded = torch.Generator().manual_seed(0)
    probe = torch.randn(2, layer.in_features, generator=seeded).to(layer.packed.device)
    firsts = range(0, layer.out_features, _AT_ONCE)
    parts = (rows_of(matrix, slice(first, first + _AT_ONCE)).dense() for first in firsts)
    expected = torch.cat([probe @ part.t() for part in parts], 1)
    if layer.bias is not None:
        expected += layer.bias
    found = layer(probe.to(torch.bfloat16)).float()
    return bool((found - expected).norm() <= _TOLERANCE * expected.norm())


@cache
def why_not(device: torch.device) -> str | None:
    """Why no weights can be in 4 bit there; None when they can."""
    if device.type != "cuda":
        return f"weights in 4 bit are for CPUs and CUDA, not {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} has no kernels for weights in 4 bit"
    return None


def _tiles(columns: int) -> int:
    """How many go into a row of so many columns; 0 when none do."""
    whole = columns % BLOCK == 0
    return next((each for each in _TILES if whole and columns % (16 * each) == 0), 0)
