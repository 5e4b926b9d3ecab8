"""Linear layers in 4 bit by the kernels that torch has for them, on CUDA and on a CPU.

The codes are those of `mesh.shard.compiled.formats`, so a model that was rounded for one is the
same one for the other; scales, what stands for the zero points, and rows on their way in and out
are bf16. A card needs compute capability 8.0 or more. On a CPU it is for layers that the compiled
runtime does not know, and a row has the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mesh.models.late_experts import stacks_in
from mesh.shard.compiled.experts import BlockExperts
from mesh.shard.compiled.formats import BLOCK, BlockLinear, BlockMatrix, rows_of, unpacked
from mesh.shard.compiled.latent import LatentLinear
from mesh.shard.packed_experts import PackedMatrices, compute_packed, put_packed

KERNELS = "int4pack"

BYTES_PER_WEIGHT = 0.5 + 4 / BLOCK

_TILES = (8, 4, 2)
"""Tiles of 16 columns that the kernel takes at a time, on CUDA."""

_ROWS_PER_TILE = {"cuda": 8, "cpu": 16}
"""On a CPU rows are filled up to whole tiles."""

_AT_ONCE = 512
"""Rows or columns that are made dense at a time."""

_TOLERANCE = 0.02

# Torch has no public name for these; what they give is checked before they are used.
_PACK = torch.ops.aten._convert_weight_to_int4pack  # noqa: SLF001
_MULTIPLY = torch.ops.aten._weight_int4pack_mm  # noqa: SLF001
_PACK_ON_CPU = torch.ops.aten._convert_weight_to_int4pack_for_cpu  # noqa: SLF001
_MULTIPLY_ON_CPU = torch.ops.aten._weight_int4pack_mm_for_cpu  # noqa: SLF001


class Int4Linear(nn.Module):
    """A linear layer whose weight is packed as the kernel reads it."""

    def __init__(
        self,
        matrix: BlockMatrix,
        bias: torch.Tensor | None,
        device: torch.device,
        again: Callable[[], BlockMatrix] | None = None,
    ) -> None:
        """`matrix` in 4 bit, as `fits` says; `again` gives it once more to whoever wants to see the
        weight, which the kernel is asked for where nobody does."""
        super().__init__()
        self.out_features, self.in_features = matrix.shape
        assert matrix.zeros is not None  # noqa: S101 - in 4 bit it has some
        scales = matrix.scales.to(device)
        zeros = unpacked(matrix.zeros.to(device))[:, : scales.shape[1]]
        shifts = (8 - zeros.float()) * scales  # the kernel's codes are around 8
        self.packed: torch.Tensor
        self.scales: torch.Tensor
        self.bias: torch.Tensor | None
        codes = matrix.codes.to(device).view(self.out_features, -1)
        filling = -self.out_features % _ROWS_PER_TILE[device.type]
        codes = F.pad(codes, (0, 0, 0, filling))
        self.register_buffer("packed", _packed(codes, self.in_features))
        both = F.pad(torch.stack((scales, shifts), -1), (0, 0, 0, 0, 0, filling))
        self.register_buffer("scales", both.to(torch.bfloat16).transpose(0, 1).contiguous())
        beside = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.register_buffer("bias", None if bias is None else bias.to(device, beside))
        self._multiply = _MULTIPLY if device.type == "cuda" else _MULTIPLY_ON_CPU
        self._again = again
        self._is_plain = False

    @property
    def weight(self) -> torch.Tensor:
        """(out, in), made for whoever asks: what it stands for in fp32, or in bf16 what the kernel
        makes of each unit vector."""
        if self._again is not None:
            return self._again().dense()
        device, size = self.packed.device, self.in_features
        parts = []
        for first in range(0, size, _AT_ONCE):
            rows = min(_AT_ONCE, size - first)
            units = torch.zeros(rows, size, dtype=torch.bfloat16, device=device)
            units[:, first : first + rows].fill_diagonal_(1)
            parts.append(self._product(units))
        return torch.cat(parts).t().contiguous()

    def be_plain(self) -> None:
        """From now on multiply by what the codes stand for, where that is known, and round no row:
        slow, as the weight is made whenever it multiplies."""
        self._is_plain = self._again is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, in_features) -> (…, out_features)."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        has_gradient = torch.is_grad_enabled() and x.requires_grad  # the kernel has none
        if self._is_plain or has_gradient:
            return F.linear(x, self.weight.to(x.dtype), bias)
        output = self._product(x.reshape(-1, self.in_features).to(torch.bfloat16)).to(x.dtype)
        output = output if bias is None else output + bias
        return output.reshape(*x.shape[:-1], self.out_features)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._multiply(rows.contiguous(), self.packed, BLOCK, self.scales)
        return output[:, : self.out_features]


def fits(matrix: BlockMatrix, device: torch.device) -> bool:
    """Whether the kernel there takes a matrix of this form."""
    rows, columns = matrix.shape
    if matrix.bits != 4 or columns % BLOCK:
        return False
    is_whole = rows % _ROWS_PER_TILE[device.type] == 0 and _tiles(columns) > 0
    return device.type == "cpu" or is_whole


@torch.no_grad()  # not inference: torch keeps packed weights by their version where it packs them
def to_device(module: nn.Module, device: torch.device, dtype: torch.dtype) -> int:
    """Move a span that was rounded to 4 bit to a device, where `dtype` is computed beside; how many
    layers, and experts' matrices, stay in 4 bit.

    Those layers whose form the kernel does not take, or of which it gives other numbers, become
    dense.
    """
    packed = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BlockLinear):
                layer = _moved(child, device, dtype)
                packed += isinstance(layer, Int4Linear)
                setattr(parent, name, layer)
            elif isinstance(child, LatentLinear):
                setattr(parent, name, _dense(child.weight.to(device), None, dtype))
        packed += _pack_experts(parent, device)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(device, dtype)
    module.to(device)  # tables stay in the dtype that they are computed in
    return packed


def _moved(linear: BlockLinear, device: torch.device, dtype: torch.dtype) -> nn.Module:
    linear = linear.to(device)
    matrix, bias = linear.matrix, linear.bias
    layer = None if linear.transposed else _packed_layer(matrix, bias, device, lambda: matrix)
    return layer or _dense(matrix.dense(), bias, dtype)


def _packed_layer(
    matrix: BlockMatrix,
    bias: torch.Tensor | None,
    device: torch.device,
    again: Callable[[], BlockMatrix],
) -> Int4Linear | None:
    """None where the kernel does not take it, or gives other numbers."""
    if not fits(matrix, device):
        return None
    # What a CPU has lies in a mapping, and takes nothing until somebody looks at it.
    layer = Int4Linear(matrix, bias, device, again if device.type == "cpu" else None)
    return layer if _agrees(layer, matrix) else None


def _pack_experts(owner: Any, device: torch.device) -> int:
    """Of the experts that this module has in blocks, if it has any."""
    packed = 0
    for name in stacks_in(owner):
        stack = getattr(owner, name, None)
        if not isinstance(stack, BlockExperts):
            continue
        biases = getattr(owner, f"{name}_bias", None)
        each = [_expert(stack, number, biases, device) for number in range(stack.shape[0])]
        packed += sum(isinstance(layer, Int4Linear) for layer in each)
        put_packed(owner, name, PackedMatrices(each, stack.shape))
        compute_packed(owner)
    return packed


def _expert(
    stack: BlockExperts, number: int, biases: torch.Tensor | None, device: torch.device
) -> nn.Module:
    matrix, bias = stack.matrix_of(number), None if biases is None else biases[number].detach()
    layer = _packed_layer(matrix, bias, device, lambda: stack.matrix_of(number))
    return layer or BlockLinear(matrix, bias)


def _dense(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> nn.Linear:
    """Where the `weight` (out, in) lies."""
    dense = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, "meta")
    dense.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
    if bias is not None:
        dense.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
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
    if device.type not in ("cpu", "cuda"):
        return f"weights in 4 bit are for CPUs and CUDA, not {device.type}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} has no kernels for weights in 4 bit"
    return None


def _packed(codes: torch.Tensor, columns: int) -> torch.Tensor:
    """`codes` (out, columns / 2), two to a byte, the lower half first, as the kernel reads them."""
    if codes.device.type == "cpu":
        packed: torch.Tensor = _PACK_ON_CPU(unpacked(codes).int(), 1)
    else:
        swapped = (codes << 4) | (codes >> 4)  # here the lower half of a byte is first
        packed = _PACK(swapped, _tiles(columns))
    return packed


def _tiles(columns: int) -> int:
    """How many go into a row of so many columns on CUDA; 0 when none do."""
    whole = columns % BLOCK == 0
    return next((each for each in _TILES if whole and columns % (16 * each) == 0), 0)
