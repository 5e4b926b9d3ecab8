"""Which matrix products the linear layers of a loaded span get.

On a CPU, oneDNN's blocked weight layout reads memory faster than `F.linear` does: twice as fast in
bf16, a fifth in fp32, and more than that for a few rows at once. Where fp32 is computed because the
CPU has no arithmetic for the 16 bits that the weights are stored in, fbgemm keeps them in 16 bits
and widens them on the way: half the memory to read. The last bits differ from those that
transformers gives. Knows nothing of attention, caches or what the layers mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from mesh.models.progress import Progress
from mesh.shard.compiled.formats import dense_weight
from mesh.shard.device import plain_dtype
from mesh.shard.packed import (
    HalvedLinear,
    Matrix,
    Packed,
    PackedLinear,
    PackedRows,
    packed_product,
    packed_products,
    packs,
)
from mesh.shard.packed_experts import mixtures_of, pack_experts, stacks_bytes
from mesh.shard.stacked import stack

PLAIN = "plain"
PACKED = "onednn-packed"
HALVED = "fbgemm-fp16"
STACKED = "stacked"

_SMALL_BYTES = 1 << 20

_FULL_ROWS = 4
"""oneDNN's bf16 products of one row read their weights slower than those of four."""

_FEW_ROWS, _MANY_ROWS = (1, 2, 3, 4, 8), 16
"""How many rows are compared with themselves among many. oneDNN has kernels for one row, and for a
few, that add up in another order."""

_COMPARED, _FEWEST_COMPARED, _MOST_ROWS = 1 << 26, 1 << 15, 8192
"""Rounded to bf16, of 3,000 to 7,000 numbers one shows that order, and of 60,000 where a product
adds up 64 only: so many are compared, divided by how many it adds up, and never fewer than the
second, nor of more rows than the third."""

_TIMINGS = 5
_TIMED_BYTES = 256 << 20

_OPS = torch.ops.mkldnn

_QUANTIZED = torch.ops.quantized

Place = tuple[nn.Module, str]
"""A linear layer by the module that it is in and its name there. It holds no weight alive."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which kernel the linear layers run (`PLAIN`, `PACKED` or `HALVED`), and why."""

    name: str
    reason: str


def kept_dtype(
    requested: str, stored: str, dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """The dtype that weights stored as `stored` are kept in where `dtype` is computed.

    Theirs, where they have 16 bits, or blocks are made such, that this CPU has no arithmetic for,
    nobody asked for fp32, and torch has kernels for that; otherwise `dtype`.
    """
    if requested != "auto" or device.type != "cpu" or dtype != torch.float32:
        return dtype
    return plain_dtype(stored) if halving_fails() is None else dtype


def choose_kernels(
    module: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    *,
    halved: bool = False,
    together: Sequence[Sequence[Place]] = (),
) -> Kernels:
    """Replace the linear layers of `module` where that pays, freeing their old weights.

    Each of `together` becomes one product: its layers read the same rows; with some, experts are
    packed as well. `halved`: the weights are still as they are stored, in 16 bit, and `dtype` is
    fp32; afterwards everything of `module` is. Where those kernels are not to be had, all of it
    becomes fp32, and is packed as such.
    """
    if device.type == "cuda" and together:
        return _stack_all(together)
    if not packs(dtype) or device.type != "cpu":
        return Kernels(PLAIN, "kernels plain: packed weights are for bf16 and fp32 on the CPU")
    kind: type[Packed] = PackedLinear
    if halved:
        kind = HalvedLinear if halving_fails() is None else kind
        if kind is PackedLinear:
            module.float()
    why_not = None if kind is HalvedLinear else _packing_fails(dtype)
    if why_not is not None:
        return Kernels(PLAIN, f"kernels plain: {why_not}")
    mixtures = mixtures_of(module) if together else []
    replaced = _pack_all(_groups(module, together), mixtures, kind, progress or Progress())
    if kind is HalvedLinear:
        module.float()
    if not replaced:
        return Kernels(PLAIN, "kernels plain: no linear layer to pack")
    _leave_the_file(module)
    if kind is HalvedLinear:
        kept = f"{replaced} linear layers in 16 bit, computed in fp32 and checked"
        return Kernels(HALVED, f"kernels {HALVED}: {kept}")
    with torch.inference_mode():
        most = fill_rows(_packed_parts(module))
    filled = f", few rows filled up to {most}" if most > 1 else ""
    return Kernels(
        PACKED,
        f"kernels {PACKED}: {replaced} linear layers of {str(dtype)[6:]} on the CPU, packed and"
        f" checked{filled}",
    )


def _stack_all(groups: Sequence[Sequence[Place]]) -> Kernels:
    layers = [[parent.get_submodule(name) for parent, name in group] for group in groups]
    if not all(map(stack, layers)):
        return Kernels(PLAIN, "kernels plain: its layers are no plain ones")
    return Kernels(STACKED, f"kernels {STACKED}: {sum(map(len, layers))} linear layers")


def _packed_parts(module: nn.Module) -> list[PackedLinear]:
    wholes = (part.whole if isinstance(part, PackedRows) else part for part in module.modules())
    return list(dict.fromkeys(part for part in wholes if isinstance(part, PackedLinear)))


def fill_rows(
    parts: Sequence[PackedLinear],
    is_faster: Callable[[Sequence[PackedLinear]], bool] | None = None,
) -> int:
    """Have few rows computed with rows of zeros beside them where only so they have the bits that
    they have in any company, or where that is faster and changes none; up to how many at most.
    `is_faster` tells the latter, by a measurement."""
    # Which kernel is taken depends on the shape alone.
    alike = {_shape(part): part for part in parts}
    large = [part for part in parts if part.weight_bytes > _SMALL_BYTES]
    fewest = {
        shape: _fewest_alike(part) if part in large else _fewest_of_shape(*shape)
        for shape, part in alike.items()
    }
    faster = set(large) if large and (is_faster or _is_faster_full)(large) else set()
    for part in parts:
        few = fewest[_shape(part)]
        part.fewest_rows = max(few) if part in faster else min(few)
    return max((part.fewest_rows for part in parts), default=1)


_Shape = tuple[int, int, bool, torch.dtype, int]
"""Columns, rows, whether there is a bias, the dtype, and on how many threads it is computed."""


def _shape(part: PackedLinear) -> _Shape:
    threads = torch.get_num_threads()
    return part.in_features, part.out_features, part.bias is not None, part.dtype, threads


@cache
def _fewest_of_shape(
    columns: int, rows: int, biased: bool, dtype: torch.dtype, _threads: int
) -> Sequence[int]:
    """`_fewest_alike` of a small layer, kept: it takes many rows of such to see a difference."""
    drawn = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=drawn).to(dtype)
    return _fewest_alike(PackedLinear(weight, weight[:, 0] if biased else None))


def _fewest_alike(part: PackedLinear) -> Sequence[int]:
    """The fewest rows up to which to fill less, so that a row has the bits that it has among many,
    and `_FULL_ROWS` where they do as well; 1 where no number does."""
    numbers = max(_FEWEST_COMPARED, _COMPARED // part.in_features)
    most = _MOST_ROWS if part.dtype == torch.bfloat16 else _MANY_ROWS  # in fp32 each shows it
    count = min(max(2, numbers // part.out_features), most)
    seeded = torch.Generator().manual_seed(0)
    whole = count + -count % _MANY_ROWS
    rows = torch.randn(whole, part.in_features, dtype=part.dtype, generator=seeded)
    many = _in_pieces(part, rows, _MANY_ROWS)

    def is_alike(fewest: int) -> bool:
        part.fewest_rows = fewest
        sizes = {few: max(few, count) for few in _FEW_ROWS}
        return all(
            torch.equal(_in_pieces(part, rows[:size], few), many[:size])
            for few, size in sizes.items()
        )

    # In fp32 it would take a third to a half more time, and tells two tokens apart nowhere.
    filled = range(1, _FULL_ROWS + 1) if part.dtype == torch.bfloat16 else ()
    first = next(filter(is_alike, filled), 1)
    is_large = part.weight_bytes > _SMALL_BYTES  # none else is filled up to be faster
    found = (first, _FULL_ROWS) if is_large and is_alike(_FULL_ROWS) else (first,)
    part.fewest_rows = 1
    return found


def _in_pieces(part: PackedLinear, rows: torch.Tensor, count: int) -> torch.Tensor:
    """As if they came `count` at a time."""
    return torch.cat([part(some) for some in torch.split(rows, count)])


def _is_faster_full(parts: Sequence[PackedLinear]) -> bool:
    # One after the other, as in a forward: what lies in the caches says nothing.
    sizes = accumulate(part.weight_bytes for part in parts)
    some = [part for part, size in zip(parts, sizes, strict=True) if size <= _TIMED_BYTES]
    inputs = {p.in_features: torch.ones(1, p.in_features, dtype=p.dtype) for p in parts}
    took: dict[int, list[float]] = {1: [], _FULL_ROWS: []}
    for _ in range(_TIMINGS):
        for fewest, times in took.items():
            started = perf_counter()
            for part in some or parts[:1]:
                part.fewest_rows = fewest
                part(inputs[part.in_features])
            times.append(perf_counter() - started)
    for part in parts:
        part.fewest_rows = 1
    return median(took[_FULL_ROWS]) < median(took[1])


def _groups(module: nn.Module, together: Sequence[Sequence[Place]]) -> list[list[Place]]:
    """Every linear layer, those of a product together."""
    first = {(id(parent), name): list(group) for group in together for parent, name in group[:1]}
    later = {(id(parent), name) for group in together for parent, name in group[1:]}
    groups = []
    # Names: a list of the layers themselves would keep every old weight alive.
    for parent in module.modules():
        for name, child in parent.named_children():
            place = id(parent), name
            if type(child) in (nn.Linear, Conv1D) and place not in later:
                groups.append(first.get(place, [(parent, name)]))
    return groups


def _pack_all(
    groups: list[list[Place]], mixtures: Sequence[nn.Module], kind: type[Packed], progress: Progress
) -> int:
    """How many layers were replaced."""
    progress.begin("packing", sum(map(_size, groups)) + stacks_bytes(mixtures))
    replaced = pack_experts(mixtures, kind, progress)
    for group, packed in zip(groups, packed_products(kind, map(_matrix, groups)), strict=True):
        size = _size(group)  # known before only
        if packed is not None:
            _replace(group, packed)
            replaced += len(group)
        elif len(group) > 1:
            replaced += sum(_pack_alone(place, kind) for place in group)
        progress.add(size)
    return replaced


def _pack_alone(place: Place, kind: type[Packed]) -> bool:
    packed = packed_product(kind, *_matrix([place]))
    if packed is not None:
        _replace([place], packed)
    return packed is not None


def _size(group: list[Place]) -> int:
    return sum(layer.weight.nbytes for layer in _layers(group))


def _layers(group: list[Place]) -> list[Any]:
    return [parent.get_submodule(name) for parent, name in group]


def _matrix(group: list[Place]) -> Matrix:
    """Of their product."""
    layers = _layers(group)
    weights = [dense_weight(layer).detach() for layer in layers]
    return weights[0] if len(weights) == 1 else torch.cat(weights), _bias(layers, weights)


def _replace(group: list[Place], packed: Packed) -> None:
    """Have these compute with it, each with its own rows."""
    first = 0
    for (parent, name), layer in zip(group, _layers(group), strict=True):
        rows = len(dense_weight(layer))
        setattr(parent, name, packed if len(group) == 1 else PackedRows(packed, first, rows))
        first += rows


def _bias(layers: Sequence[Any], weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    biases = [layer.bias for layer in layers]
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            weight.new_zeros(len(weight)) if bias is None else bias.detach()
            for bias, weight in zip(biases, weights, strict=True)
        ]
    )


def _leave_the_file(module: nn.Module) -> None:
    # What is left may lie in a mapping of the whole checkpoint file, which a single norm keeps.
    for parameter in module.parameters():
        if parameter.nbytes <= _SMALL_BYTES:
            parameter.data = parameter.data.clone()


@cache
def halving_fails() -> str | None:
    """Why no weights can be kept in 16 bit where fp32 is computed; None when they can."""
    if not all(hasattr(_QUANTIZED, op) for op in ("linear_prepack_fp16", "linear_dynamic_fp16")):
        return "this torch has no fp16 linear operator"
    weight = torch.eye(32)
    try:
        with torch.inference_mode():
            same = packed_product(HalvedLinear, weight, None) is not None
    except RuntimeError as error:
        return f"the fp16 linear operator failed ({error})"
    return None if same else "the fp16 linear operator gave other results"


def _packing_fails(dtype: torch.dtype) -> str | None:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch has no oneDNN"
    if not torch.backends.mkldnn.enabled:
        return "oneDNN is switched off"
    if not all(hasattr(_OPS, op) for op in ("_reorder_linear_weight", "_linear_pointwise")):
        return "this torch has no packed linear operator"
    weight = torch.eye(32, dtype=dtype)
    try:
        with torch.inference_mode():
            same = packed_product(PackedLinear, weight, None) is not None
    except RuntimeError as error:
        return f"the packed linear operator failed ({error})"
    return None if same else "the packed linear operator gave other results"
