"""The numbers of tensors that do not lie in their file as a model computes with them.

Those in blocks are decoded by the `gguf` package, some rows at a time: no more than one tensor is
there twice. Knows no modules and no layers.
"""

from __future__ import annotations

import torch

from mesh.errors import BadCheckpoint
from mesh.models.gguf.container import BLOCK_TYPES
from mesh.models.header import Difference, TensorEntry
from mesh.models.pages import Pages
from mesh.models.stored_dtypes import STORED_DTYPES

_WEIGHTS_AT_ONCE = 1 << 20


def is_plain(entry: TensorEntry) -> bool:
    """Whether its bytes are the numbers that a model computes with."""
    return entry.unlike is None and entry.dtype in STORED_DTYPES


def decode(area: Pages, entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in `dtype`, from the mapped file `area`; memory of its own.

    Raises BadCheckpoint when the `gguf` package cannot decode it.
    """
    transposed = entry.unlike is not None and entry.unlike.kind == "transposed"
    shape = entry.shape[::-1] if transposed else entry.shape
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


def _from_blocks(
    area: Pages, entry: TensorEntry, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    import numpy as np
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    assert entry.dtype in BLOCK_TYPES  # noqa: S101 - the header knows no others
    kind = GGMLQuantizationType[entry.dtype]
    columns = shape[-1]
    stored = np.frombuffer(area, np.uint8, entry.nbytes, entry.offset)
    rows = stored.reshape(-1, entry.nbytes * columns // torch.Size(shape).numel())
    numbers = torch.empty((len(rows), columns), dtype=dtype)
    at_once = max(1, _WEIGHTS_AT_ONCE // columns)
    try:
        with np.errstate(all="ignore"):  # what comes of damaged bytes is found where it is used
            for first in range(0, len(rows), at_once):
                part = dequantize(rows[first : first + at_once], kind)
                numbers[first : first + len(part)] = torch.from_numpy(part)
    except (NotImplementedError, ValueError) as error:
        raise BadCheckpoint(
            f"{entry.file}: tensor {entry.name} of {entry.dtype} cannot be decoded: {error}.",
            fix="Use a file in another quantisation, Q8_0 or Q4_K_M for example.",
        ) from error
    return numbers.view(shape)


def _as_the_model_has_it(numbers: torch.Tensor, unlike: Difference) -> torch.Tensor:
    match unlike.kind:
        case "transposed":
            return numbers.t()
        case "less_one":
            return numbers.float() - 1
        case "rotary_rows":
            return numbers[model_rows(len(numbers), unlike.heads)]
