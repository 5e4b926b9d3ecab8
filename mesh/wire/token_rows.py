"""Token ids, and what a head says of rows, in the form in which steps and results bear them.

One row for each position, as hidden states have it, so that what is kept, cut and replayed of a hop
needs not know which of them it is. Rows are bytes: ``int8`` tensors (1, rows, bytes of a row). An
id is an int32; candidates are the logarithm of the sum of the exponentials of all logits (fp32),
then ids (int32), then logits (fp32), strongest first; all little-endian.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mesh.errors import BadRequest
from mesh.wire.messages import WireTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

ID_BYTES = 4

_FIX = "Run the same hearthnet version on both machines."


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
            fix=_FIX,
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


@dataclass(frozen=True, slots=True)
class TopRows:
    """The strongest `k` next tokens of each row, strongest first: `ids` (rows, k) int32, `logits`
    (rows, k) float32; `totals` (rows,) float32 is the logarithm of the sum of the exponentials of
    all logits of the row, NaN for a row of which nothing is said."""

    ids: NDArray[np.int32]
    logits: NDArray[np.float32]
    totals: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.totals)


def top_bytes(count: int) -> int:
    """Bytes of a row with so many candidates."""
    return _layout(count).itemsize


def top_to_wire(top: TopRows) -> WireTensor:
    """(1, rows, `top_bytes`)."""
    rows, count = top.ids.shape
    packed = np.empty(rows, _layout(count))
    packed["total"], packed["ids"], packed["logits"] = top.totals, top.ids, top.logits
    return WireTensor("int8", (1, rows, packed.itemsize), packed.tobytes())


def top_from_wire(tensor: WireTensor) -> TopRows:
    """What rows of candidates say, whatever that is; `tensor` has the shape of such."""
    count = (tensor.shape[2] - 4) // 8
    packed = np.frombuffer(tensor.data, _layout(count))
    return TopRows(packed["ids"], packed["logits"], packed["total"])


def behind_blanks(tensor: WireTensor, rows: int) -> WireTensor:
    """The same candidates as the last of `rows` rows, of which the first say nothing."""
    lacking = rows - tensor.shape[1]
    if lacking <= 0:
        return tensor
    blank = np.zeros(lacking, _layout((tensor.shape[2] - 4) // 8))
    blank["total"] = np.nan
    data = b"".join((blank.tobytes(), tensor.data))
    return WireTensor("int8", (1, rows, tensor.shape[2]), data)


def _layout(count: int) -> np.dtype[Any]:
    return np.dtype([("total", "<f4"), ("ids", "<i4", (count,)), ("logits", "<f4", (count,))])
