"""Linear layers in the layouts of oneDNN and fbgemm (inference on a CPU only)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mesh.shard.alike_rows import alike_rows

_ALIKE_ROWS = 32
"""Rows of the largest batch of steps in which none has other bits than alone, with fbgemm."""

_PIECE = 16
"""With oneDNN more rows than these are filled up to a multiple of them: it keeps compiled kernels
for each count of rows, a thousand of them take 300 MB, and prompts have any length."""

_TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-5}
"""By the dtypes that are packed: how far a packed product may be from the plain one."""

_LARGEST = torch.finfo(torch.float16).max

_MOST_AT_ONCE, _MOST_BYTES = 4, 768 << 20
"""Matrices that fbgemm packs at once, each on one thread, and what they may take in fp32 then."""

# Torch has no public name for these; what they give is checked before they are used.
_OPS = torch.ops.mkldnn

_QUANTIZED = torch.ops.quantized

Matrix = tuple[torch.Tensor, torch.Tensor | None]
"""A weight, (out, in), and its bias."""


class Packed(nn.Module):
    """A linear layer in a library's own layout (inference only)."""

    in_features: int
    out_features: int
    weight_bytes: int
    """What weight and bias take; a layout of a library's own does not tell."""
    dtype: torch.dtype
    """Of the weights."""

    @property
    def weight(self) -> torch.Tensor:
        """None of it, in its dtype: models ask the layer of a router for that."""
        return torch.empty(0, dtype=self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, in_features) -> (…, out_features)."""
        rows = x.numel() // self.in_features
        full = self._filled(rows)
        if full == rows:
            return self._product(x)
        filled = F.pad(x.reshape(rows, self.in_features), (0, 0, 0, full - rows))
        return self._product(filled)[:rows].view(*x.shape[:-1], -1)

    def _filled(self, rows: int) -> int:
        """How many rows to compute where there are `rows`, with zeros in those that are added."""
        raise NotImplementedError

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class PackedLinear(Packed):
    """In oneDNN's layout, in the dtype that is computed in."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # One row is the batch the layout is tuned for; larger batches run on it as well.
        self.packed = _OPS._reorder_linear_weight(weight.contiguous(), 1)  # noqa: SLF001
        # A copy: the original may lie in a mapping of the whole file, which it would keep alive.
        self.bias = None if bias is None else bias.clone()
        self.weight_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self.dtype = weight.dtype
        self.fewest_rows = 1

    def _filled(self, rows: int) -> int:
        if rows > _PIECE:
            return rows + -rows % _PIECE
        return self.fewest_rows if 0 < rows < self.fewest_rows else rows

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _OPS._linear_pointwise(  # noqa: SLF001
            x, self.packed, self.bias, "none", [], ""
        )
        return output


class HalvedLinear(Packed):
    """In fbgemm's layout: weights in fp16, rows and sums in fp32.

    Up to `_ALIKE_ROWS` rows have the same bits alone and in any company. Torch shows no memory of
    it: `answer` is how to find out whether it is still what it was.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        wide = None if bias is None else bias.float().clone()
        self._packed = _QUANTIZED.linear_prepack_fp16(weight.float().contiguous(), wide)
        self.weight_bytes = 2 * weight.numel() + (0 if wide is None else wide.nbytes)
        self.dtype = torch.float32

    def answer(self) -> torch.Tensor:
        """(out_features,) fp32: what it makes of a row that is always the same. Every weight has a
        part in it."""
        return self.forward(torch.linspace(-1, 1, self.in_features)[None])[0]

    def _filled(self, rows: int) -> int:
        return _alike_rows()[rows] if rows <= _ALIKE_ROWS else rows

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return _fbgemm(x, self._packed)


def _fbgemm(x: torch.Tensor, packed: Any) -> torch.Tensor:
    output: torch.Tensor = _QUANTIZED.linear_dynamic_fp16(x, packed)
    return output


@cache
def _alike_rows() -> Sequence[int]:
    """With AVX2, fbgemm adds up one or two rows, or what is left over as such, in another order
    than three and more. Filling them up to three takes a seventh more time."""
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    packed = _QUANTIZED.linear_prepack_fp16(weight, None)
    return alike_rows(lambda rows: _fbgemm(rows, packed), weight.shape[1], _ALIKE_ROWS)


def packs(dtype: torch.dtype) -> bool:
    """Whether there is a layout for products in `dtype`."""
    return dtype in _TOLERANCE


def packed_products(kind: type[Packed], matrices: Iterable[Matrix]) -> Iterator[Packed | None]:
    """The layers of these, packed, in their order; None for one that would give other numbers."""
    if kind is HalvedLinear:
        yield from _halved(matrices)
        return
    for weight, bias in matrices:
        packed = kind(weight, bias)
        yield packed if _agrees(packed, weight, bias) else None


def packed_product(
    kind: type[Packed], weight: torch.Tensor, bias: torch.Tensor | None
) -> Packed | None:
    """The layer with this weight, (out, in), packed; None where that would give other numbers."""
    return next(packed_products(kind, [(weight, bias)]))


@dataclass(frozen=True, slots=True)
class _Halving:
    """A layer on its way into fp16; `wide` and `bias` are in fp32."""

    wide: torch.Tensor
    bias: torch.Tensor | None
    layer: Future[HalvedLinear]

    def done(self) -> HalvedLinear | None:
        layer = self.layer.result()
        return layer if _agrees(layer, self.wide, self.bias) else None


def _halved(matrices: Iterable[Matrix]) -> Iterator[HalvedLinear | None]:
    """fbgemm packs a matrix on one thread, and that is most of the time of a load."""
    most = min(torch.get_num_threads(), _MOST_AT_ONCE)
    begun: deque[_Halving | None] = deque()
    with ThreadPoolExecutor(most, thread_name_prefix="packing") as pool:
        for weight, bias in matrices:
            room = _MOST_BYTES - 4 * weight.numel()
            while begun and (len(begun) >= most or sum(map(_taken, begun)) > room):
                yield _done(begun)
            begun.append(_begin(weight, bias, pool) if _halves(weight) else None)
        while begun:
            yield _done(begun)


def _begin(weight: torch.Tensor, bias: torch.Tensor | None, pool: ThreadPoolExecutor) -> _Halving:
    # Widened here: torch's own threads would be as many again for each of the pool's.
    wide = weight.float().contiguous()
    added = None if bias is None else bias.float()
    return _Halving(wide, added, pool.submit(HalvedLinear, wide, added))


def _done(begun: deque[_Halving | None]) -> HalvedLinear | None:
    first = begun.popleft()
    return None if first is None else first.done()


def _taken(halving: _Halving | None) -> int:
    return 0 if halving is None else halving.wide.nbytes


def _halves(weight: torch.Tensor) -> bool:
    """Whether fp16 has these numbers, which fbgemm would cut off silently.

    bf16 has fewer digits, and more range than weights need; what is below the smallest normal
    number of fp16 loses digits that no product shows.
    """
    low, high = torch.aminmax(weight)
    return bool(low >= -_LARGEST) and bool(high <= _LARGEST)


def _agrees(packed: Packed, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    probe = torch.linspace(-1, 1, packed.in_features, dtype=weight.dtype).expand(2, -1)
    expected = F.linear(probe, weight, bias).float()
    error = (packed(probe).float() - expected).norm()
    return bool(error <= _TOLERANCE[weight.dtype] * expected.norm() + 1e-6)


class PackedRows(nn.Module):
    """The rows `first`.. of a product that is packed as one, as the linear layer they were.

    Computes the whole of it: for what goes through a model's own modules.
    """

    def __init__(self, whole: Packed, first: int, count: int) -> None:
        super().__init__()
        self.whole = whole
        self.first = first
        self.in_features, self.out_features = whole.in_features, count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, in_features) -> (…, out_features)."""
        output: torch.Tensor = self.whole(x)[..., self.first : self.first + self.out_features]
        return output.contiguous()


def packed_memory(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Address and size of a packed weight; None for an ordinary tensor, or where torch hides it."""
    if not tensor.is_mkldnn or not hasattr(_OPS, "data_ptr") or not hasattr(_OPS, "_nbytes"):
        return None
    return int(_OPS.data_ptr(tensor)), int(_OPS._nbytes(tensor))  # noqa: SLF001
