"""The numbers of tensors that do not lie in their file as a model computes with them.

Those in blocks are decoded by the `gguf` package, some rows at a time: no more than one tensor is
there twice. Knows no modules and no layers.
"""

from __future__ import annotations

import torch

from mesh.errors import BadCheckpoint
from mesh.models.header import Difference, TensorEntry
from mesh.models.pages import Pages
from mesh.models.stored_dtypes import STORED_DTYPES

_WEIGHTS_AT_ONCE = 1 << 20


def is_plain(entry: TensorEntry) -> bool:
    """Whether its bytes are the numbers that a model computes with."""
    is_itself = entry.unlike is None and entry.coding is None
    return is_itself and entry.dtype in STORED_DTYPES


def decode(area: Pages, entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in `dtype`, from the mapped file `area`; memory of its own.

    Raises BadCheckpoint when the `gguf` package cannot decode it.
    """
    shape = entry.shape if entry.unlike is None else entry.unlike.changed(entry.shape)
    if entry.dtype in STORED_DTYPES:
        numbers = area.tensor(STORED_DTYPES[entry.dtype], shape, entry.offset)
    else:
        numbers = _from_blocks(area, entry, shape, dtype)
    if entry.unlike is not None:
        numbers = _as_the_model_has_it(numbers, entry.unlike)
    return numbers.to(dtype, copy=entry.dtype in STORED_DTYPES).contiguous()


def model_rows(count: int, heads: int) -> torch.Tensor:
    """(count,): from which stored row each row of a model comes, where they lie in pairs.

    Of each head, llama.cpp stores row i of the first half beside row i of the second.
    """
    return torch.arange(count).view(heads, count // heads // 2, 2).transpose(1, 2).reshape(-1)


def value_order(count: int, unlike: Difference) -> torch.Tensor:
    """(count,): from which stored row or column each of a model's comes, where those of values for
    one key lie apart."""
    values = torch.arange(unlike.first, count).view(unlike.shared, unlike.heads, -1)
    return torch.cat((torch.arange(unlike.first), values.transpose(0, 1).reshape(-1)))


def row_order(count: int, unlike: Difference) -> torch.Tensor:
    """(count,): from which stored row each of a model's comes, of a difference that moves rows."""
    if unlike.kind == "rotary_rows":
        return model_rows(count, unlike.heads)
    return value_order(count, unlike)


def _from_blocks(
    area: Pages, entry: TensorEntry, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    columns = shape[-1]
    rows = stored_rows(area, entry, columns)
    numbers = torch.empty((len(rows), columns), dtype=dtype)
    at_once = max(1, _WEIGHTS_AT_ONCE // columns)
    for first in range(0, len(rows), at_once):
        part = decode_rows(rows[first : first + at_once], entry)
        numbers[first : first + len(part)] = part
    return numbers.view(shape)


def stored_rows(area: Pages, entry: TensorEntry, columns: int) -> torch.Tensor:
    """(rows, bytes) uint8, the blocks of a tensor where they lie; each row has so many numbers."""
    count = torch.Size(entry.shape).numel() // columns
    return area.tensor(torch.uint8, (count, entry.nbytes // count), entry.offset)


def decode_rows(rows: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """(rows, columns) fp32, what some of the `stored_rows` of `entry` stand for.

    Raises BadCheckpoint when the `gguf` package cannot decode them.
    """
    import numpy as np
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        with np.errstate(all="ignore"):  # what comes of damaged bytes is found where it is used
            return torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType[entry.dtype]))
    except (NotImplementedError, ValueError) as error:
        raise BadCheckpoint(
            f"{entry.file}: tensor {entry.name} of {entry.dtype} cannot be decoded: {error}.",
            fix="Use a file in another quantisation, Q8_0 or Q4_K_M for example.",
        ) from error


def _as_the_model_has_it(numbers: torch.Tensor, unlike: Difference) -> torch.Tensor:
    match unlike.kind:
        case "transposed":
            return numbers.transpose(-1, -2)
        case "less_one":
            return numbers.float() - 1
        case "rotary_rows" | "value_rows":
            return numbers[row_order(len(numbers), unlike)]
        case "value_columns":
            return numbers[..., value_order(numbers.shape[-1], unlike)]
        case "decay":
            return numbers.float()[value_order(len(numbers), unlike)].neg().log()
