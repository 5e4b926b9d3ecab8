"""Token ids, and what a head says of rows, in the form in which steps and results bear them.

One row for each position, as hidden states have it, so that what is kept, cut and replayed of a hop
need not know which of them it is. Rows are bytes: ``int8`` tensors (1, rows, bytes of a row). An
id is an int32; candidates are the logarithm of the sum of the exponentials of all logits (fp32),
then ids (int32), then logits (fp32), strongest first; all little-endian.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesh.errors import SAME_VERSION, BadRequest
from mesh.wire.messages import WireTensor

ID_BYTES = 4


def ids_to_wire(ids: Sequence[int]) -> WireTensor:
    """Token ids as the input of a step, (1, rows, `ID_BYTES`)."""
    return WireTensor("int8", (1, len(ids), ID_BYTES), np.array(ids, "<i4").tobytes())


def ids_from_wire(tensor: WireTensor, vocab: int) -> NDArray[np.int64]:
    """(rows,) ids below `vocab`. Raises BadRequest for anything else."""
    shape = tensor.shape
    is_ids = len(shape) == 3 and shape[0] == 1 and shape[1] > 0 and shape[2] == ID_BYTES
    size = ID_BYTES * shape[1] if is_ids else -1
    if tensor.dtype != "int8" or tensor.gradient or len(tensor.data) != size:
        raise BadRequest(
            f"A {tensor.dtype} tensor of shape {tuple(shape)} is no row of token ids.",
            fix=SAME_VERSION,
            param="tensor",
        )
    ids = np.frombuffer(tensor.data, "<i4").astype(np.int64)
    if ids.min() < 0 or ids.max() >= vocab:
        raise BadRequest(
            f"Token ids from {ids.min()} to {ids.max()} are not of a vocabulary of {vocab}.",
            fix="Send ids of this model's own tokenizer.",
            param="tensor",
        )
    return ids


Rows = NDArray[np.void]
"""What a head says of rows, (rows,) with the fields of `top_layout`."""


def top_layout(count: int) -> np.dtype[Any]:
    """A row with so many candidates: `total`, `ids` and `logits`, strongest first."""
    return np.dtype([("total", "<f4"), ("ids", "<i4", (count,)), ("logits", "<f4", (count,))])


def top_to_wire(rows: Rows) -> WireTensor:
    """(1, rows, bytes of a row)."""
    return WireTensor("int8", (1, len(rows), rows.dtype.itemsize), rows.tobytes())


def top_from_wire(tensor: WireTensor) -> Rows:
    """What rows of candidates say, whatever that is; `tensor` has the shape of such."""
    return np.frombuffer(tensor.data, top_layout(candidates_in(tensor.shape[2])))


def candidates_in(row_bytes: int) -> int:
    """How many candidates a row of so many bytes has."""
    return (row_bytes - 4) // 8


def behind_blanks(tensor: WireTensor, rows: int) -> WireTensor:
    """The same candidates as the last of `rows` rows; `is_blank` holds for those before."""
    lacking = rows - tensor.shape[1]
    if lacking <= 0:
        return tensor
    blank = np.zeros(lacking, top_layout(candidates_in(tensor.shape[2])))
    blank["total"] = np.nan
    data = b"".join((blank.tobytes(), tensor.data))
    return WireTensor("int8", (1, rows, tensor.shape[2]), data)


def is_blank(rows: Rows) -> NDArray[np.bool_]:
    """(rows,) of which nothing is said."""
    blank: NDArray[np.bool_] = np.isnan(rows["total"])
    return blank


def rows_due(position: int, rows: int, since: int, most: int) -> int:
    """Of how many of its last rows a step of `rows` from `position` on gets candidates: of those
    from `since` on, at least one and at most `most`."""
    return max(1, min(rows, most, position + rows - since))
