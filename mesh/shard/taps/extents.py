"""How many bytes an operator's results will take at most, told from its arguments alone.

By a formula for what models are made of, as these are asked for before every operation; for any
other by torch's own shape functions, which cost more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from mesh.processes.postponed import import_meta_kernels

Extent = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], int]
"""(operator, positional arguments, named arguments) -> bytes."""

_WIDEST = 8
"""Bytes of an element where no argument tells."""


def extent_of(func: Any) -> Extent:
    """The extent of a `torch.ops` overload."""
    name = func._schema.name.removeprefix("aten::")
    if name in _FORMULAS:
        return _FORMULAS[name]
    if torch.Tag.pointwise in func.tags:
        return _broadcast
    if name in _AS_THE_LARGEST or name.endswith(("_backward", "_backward_data")):
        return _as_the_largest
    return _by_its_shape_function


def tensors(
    values: Iterable[Any], named: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[torch.Tensor]:
    """Those among an operator's arguments or results; lists of them are the only nesting."""
    for value in (*values, *named.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, torch.Tensor))


def _broadcast(_func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    if len(args) <= 2 and not kwargs and isinstance(one := args[0], torch.Tensor):  # most are such
        other = args[-1]
        if isinstance(other, int | float):
            return one.nbytes
        if isinstance(other, torch.Tensor) and one.shape == other.shape:
            return max(one.nbytes, other.nbytes)
    shapes = [tensor.shape for tensor in tensors(args, kwargs)]
    first = shapes[0] if shapes else ()
    if all(shape == first for shape in shapes):
        return math.prod(first) * _item(args, kwargs)
    return math.prod(_broadcast_shape(shapes)) * _item(args, kwargs)


def _as_the_largest(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Every result is no larger than the largest argument, nor than sizes that are given."""
    largest = max((tensor.numel() for tensor in tensors(args, kwargs)), default=1)
    given = max(map(_product, _int_lists(args, kwargs)), default=1)
    return len(func._schema.returns) * max(largest, given) * _item(args, kwargs)


def _given_size(_func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    return max(map(_product, _int_lists(args, kwargs)), default=1) * _item(args, kwargs)


def _strided(_func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """From the first element to the last, by the steps between them."""
    shape, steps = [*_int_lists(args, kwargs)][:2]
    if not all(shape):
        return 0
    last = sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    return int((1 + last) * _item(args, kwargs))


def _range(_func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    numbers = [abs(value) for value in args if isinstance(value, int | float)]
    step = numbers[2] if len(numbers) > 2 else 1
    return int(2 * max(numbers, default=1) / (step or 1) + 1) * _item(args, kwargs)


def _product_of_matrices(_func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """(…, rows, inner) times (…, inner, columns), perhaps added to something before."""
    if len(args) == 2 and args[0].dim() == 2:
        return int(args[0].shape[0] * args[1].shape[1] * args[0].itemsize)
    matrices = [tensor for tensor in tensors(args) if tensor.dim() >= 2]
    if len(matrices) < 2:
        return _as_the_largest(_func, args, kwargs)
    left, right = matrices[-2:]
    batch = max(math.prod(left.shape[:-2]), math.prod(right.shape[:-2]))
    if _func._schema.name == "aten::_grouped_mm":
        batch = 1  # each row meets one matrix of the batch
    return batch * left.shape[-2] * right.shape[-1] * _item(args, kwargs)


def _joined(_func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors(args, kwargs)) * 2  # one may be widened


def _picked(_func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """One slice of the source for every index; (weight or source, [dim,] indices)."""
    source, indices = args[0], [*tensors(args[1:], kwargs)]
    count = max((tensor.numel() for tensor in indices), default=1)
    if len(args) > 2 and isinstance(args[1], int):
        across = source.shape[args[1]] if source.dim() else 1
    else:
        across = source.shape[0] if source.dim() else 1
    return int(count * source.numel() // max(1, across) * source.itemsize)


def _indexed(_func: Any, args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> int:
    source, indices = args[0], args[1]
    picked = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in picked):
        count = source.numel()  # a mask picks at most all there is
        return int(count * source.itemsize * max(1, len(picked)))
    shape = _broadcast_shape([index.shape for index in picked])
    left = [n for i, n in enumerate(source.shape) if i >= len(indices) or indices[i] is None]
    return int(math.prod(shape) * math.prod(left) * source.itemsize)


def _repeated(_func: Any, args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> int:
    return int(args[0].numel() * _product(args[1]) * args[0].itemsize)


def _counted(_func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Results as long as a number that stands in the arguments' values."""
    values = args[0]
    if _func._schema.name == "aten::bincount":
        longest = int(values.max()) + 1 if values.numel() else 1
        return max(longest, *(a for a in args if type(a) is int), 1) * _WIDEST
    return int(values.sum()) * _WIDEST


def _histogram(_func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    bins = kwargs.get("bins", args[1] if len(args) > 1 else 100)
    return int(bins) * _WIDEST


def _padded(_func: Any, args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> int:
    source, pads = args[0], args[1]
    shape = list(source.shape)
    for place in range(len(pads) // 2):
        shape[-1 - place] += pads[2 * place] + pads[2 * place + 1]
    return int(math.prod(max(0, n) for n in shape) * source.itemsize)


def _by_its_shape_function(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """By running it on tensors without data; by the product of all there is where it has none."""

    def without_data(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    import_meta_kernels()
    given = tree_map_only(torch.Tensor, without_data, (args, dict(kwargs)))
    given = tree_map_only(torch.device, lambda _: torch.device("meta"), given)
    try:
        made = func(*given[0], **given[1])
    except (NotImplementedError, RuntimeError, TypeError):
        numbers = [tensor.numel() for tensor in tensors(args, kwargs)]
        return math.prod([*numbers, *map(_product, _int_lists(args, kwargs)), _WIDEST])
    return sum(tensor.nbytes for tensor in tensors((made,)))


_FORMULAS: dict[str, Extent] = {
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "_grouped_mm"), _product_of_matrices),
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(("embedding", "index_select"), _picked),
    **dict.fromkeys(
        (
            "empty", "zeros", "ones", "full", "rand", "randn", "new_empty", "new_zeros",
            "new_ones", "new_full", "scalar_tensor", "slice_backward", "select_backward",
        ),
        _given_size,
    ),
    **dict.fromkeys(("empty_strided", "new_empty_strided"), _strided),
    **dict.fromkeys(("bincount", "repeat_interleave"), _counted),
    "arange": _range,
    "index": _indexed,
    "repeat": _repeated,
    "histc": _histogram,
    "constant_pad_nd": _padded,
    "_unsafe_view": lambda _func, _args, _kwargs: 0,
}  # fmt: skip

_AS_THE_LARGEST = frozenset(
    {
        "_to_copy", "_softmax", "_log_softmax", "native_layer_norm", "native_dropout",
        "_fused_rms_norm", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like",
        "mean", "sum", "prod", "amax", "amin", "max", "min", "any", "all", "argmax", "argmin",
        "std", "var", "var_mean", "linalg_vector_norm", "norm", "cumsum", "cumprod", "sort", "topk",
        "gather", "scatter", "scatter_add", "scatter_reduce", "index_put", "index_add",
        "index_fill", "index_copy", "tril", "triu", "flip", "roll", "masked_scatter",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    }
)  # fmt: skip


def _broadcast_shape(shapes: list[torch.Size]) -> list[int]:
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return [max(sizes) for sizes in zip(*padded, strict=True)]


def _int_lists(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, list | tuple) and all(isinstance(item, int) for item in value):
            yield value


def _product(numbers: Iterable[int]) -> int:
    return math.prod(max(1, abs(number)) for number in numbers)


def _item(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Bytes of an element: of the dtype that is asked for, or the widest argument's."""
    dtype = kwargs.get("dtype")
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize
    return max((tensor.itemsize for tensor in tensors(args, kwargs)), default=_WIDEST)
