"""What lean layers do with each row by itself: products, norms, gates, feed-forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mesh.shard.compiled.feed_forward import Xielu
from mesh.shard.compiled.parts import FeedForward, LayerInputs, Norm, NotCompilable
from mesh.shard.compiled.parts_reader import OutputGate
from mesh.shard.int4 import Int4Linear
from mesh.shard.packed import PackedRows
from mesh.shard.stacked import whole_of

Product = Callable[[torch.Tensor], torch.Tensor]

_ACTIVATIONS: dict[str, Product] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu, "squared_relu": lambda x: F.relu(x).square(), "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
}  # fmt: skip


_FILLED = 32
"""Torch computes the last of so many numbers, at most, by other means than whole vectors."""


def of_each(x: torch.Tensor, function: Product) -> torch.Tensor:
    """`function` of each of (rows, count) numbers, in whole vectors: a row has the same bits among
    any others."""
    return function(F.pad(x, (0, 0, 0, -len(x) % _FILLED)))[: len(x)]


class LeanNorm(nn.Module):
    """`Norm` over the last axis, in fp32 inside."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        size = len(norm.gamma)
        self._is_one_kernel = norm.gamma.device.type == "cuda"
        is_scaled = norm.beta is None and not self._is_one_kernel
        # x / sqrt(mean(x²) + ε) is x·√n / hypot(|x|, √(nε)): half the operators.
        self.gamma = norm.gamma * size**0.5 if is_scaled else norm.gamma.clone()
        self.beta = None if norm.beta is None else norm.beta.clone()
        self.floor = torch.tensor((size * norm.epsilon) ** 0.5, device=norm.gamma.device)
        self._epsilon = norm.epsilon
        # The kernel reads weights in the rows' dtype only: those that lose nothing by it.
        halves = {dtype: norm.gamma.to(dtype) for dtype in (torch.bfloat16, torch.float16)}
        self._narrow = {
            dtype: half
            for dtype, half in halves.items()
            if self._is_one_kernel and torch.equal(half.float(), norm.gamma)
        }

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """As `x`."""
        narrow = self._narrow.get(x.dtype)
        if narrow is not None and self.beta is None:
            return F.rms_norm(x, narrow.shape, narrow, self._epsilon)
        wide = x.float()
        if self.beta is not None:
            return F.layer_norm(wide, self.gamma.shape, self.gamma, self.beta, self._epsilon).to(
                x.dtype
            )
        if self._is_one_kernel:
            return F.rms_norm(wide, self.gamma.shape, self.gamma, self._epsilon).to(x.dtype)
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return (wide * self.gamma).div_(torch.hypot(size, self.floor)).to(x.dtype)


class LeanGate(nn.Module):
    """See `OutputGate`."""

    def __init__(self, gate: OutputGate) -> None:
        super().__init__()
        self.norm = None if gate.norm is None else LeanNorm(gate.norm)
        self._width = 0 if gate.norm is None else len(gate.norm.gamma)
        self.gamma = gate.gamma
        self._activated = None if gate.activation is None else _ACTIVATIONS[gate.activation]
        self._is_first = gate.is_first

    def run(self, y: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Rows behind a mixer, and the numbers of each that went around it, of one shape: as
        `y`."""
        factors = numbers.to(y.dtype)
        factors = factors if self._activated is None else self._activated(factors)
        if self.norm is None:
            return y * factors
        y = y * factors if self._is_first else y
        y = self.norm.run(y.view(-1, self._width)).view(factors.shape)
        y = y if self.gamma is None else (y * self.gamma).to(y.dtype)
        return y if self._is_first else y * factors


class LeanInputs(nn.Module):
    """See `LayerInputs`."""

    def __init__(self, part: LayerInputs) -> None:
        super().__init__()
        self._gate, self._projection = (lean_product((p,)) for p in (part.gate, part.projection))
        self._activated = _ACTIVATIONS[part.activation]
        self.norm = LeanNorm(part.norm)

    def run(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """(rows, hidden), and (rows, width) that are given beside them: what is added."""
        return self.norm.run(self._projection(self._activated(self._gate(x)) * inputs))


def lean_feed_forward(part: FeedForward) -> Product:
    up, down = lean_product(part.up), lean_product((part.down,))
    curve, width = part.xielu, part.width
    activated = _ACTIVATIONS[part.activation] if curve is None else partial(_xielu, by=curve)
    if not part.is_gated:
        return lambda x: down(activated(up(x)))

    def gated(x: torch.Tensor) -> torch.Tensor:
        both = up(x)
        return down(activated(both[:, :width]).mul_(both[:, width:]))

    return gated


def _xielu(x: torch.Tensor, by: Xielu) -> torch.Tensor:
    wide = x.float()
    below = (torch.expm1(wide.clamp(max=by.limit)) - wide) * by.negative
    return (torch.where(wide > 0, by.positive * wide * wide, below) + by.beta * wide).to(x.dtype)


def lean_product(linears: Sequence[Any]) -> Product:
    """Their product: one for all of them. Raises NotCompilable when there is none."""
    first = linears[0]
    if len(linears) == 1:
        forward: Product = first.forward
        return forward
    if any(isinstance(each, Int4Linear) for each in linears):
        return lambda x: torch.cat([each(x) for each in linears], -1)
    if not isinstance(first, PackedRows):
        return _stacked_product(linears)
    whole = first.whole
    if any(not isinstance(each, PackedRows) or each.whole is not whole for each in linears):
        raise NotCompilable("its products are packed otherwise")
    return whole.forward


def _stacked_product(linears: Sequence[Any]) -> Product:
    weight = whole_of([each.weight for each in linears])
    biases = [each.bias for each in linears]
    bias = None if biases[0] is None else whole_of(biases)
    return lambda x: F.linear(x, weight, bias)
