"""What a tensor of the client's lies in, read out of its pickle, also where torch itself cannot.

torch writes the memory of a tensor of a newer number format (fp8, uint16 to uint64) as one without
any format, and has no way to read that.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from mesh.errors import BadRequest

_KIND = re.compile(rb"ctorch(?:\.storage)?\n(\w*)Storage\n")  # as pickle names a class
_BYTES = b"ctorch\nByteStorage\n"


def load_storage(data: bytes) -> torch.TypedStorage:
    """The memory that `data` is, in main memory wherever it was: a job has no other."""
    kind = _KIND.search(data)  # the first such name is in front of what the memory holds
    if kind is not None and kind[1] == b"Untyped":
        data = data[: kind.start()] + _BYTES + data[kind.end() :]
    loaded: torch.TypedStorage = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    return loaded


def refuse_meta(*_: Any) -> NoReturn:
    """In the place of a tensor on torch's meta device: what is computed with one has no values
    either, and adding it in place to another changes nothing, without a word."""
    raise BadRequest(
        "A tensor that came with the trace is on the meta device, where none has values.",
        fix="Where a client has no weights, model.device is that: leave .to(model.device) out, read"
        " the model's own weights inside the trace, and make yours on the CPU or inside of it.",
    )


REPLACED: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch.storage", "_load_from_bytes"): load_storage,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): refuse_meta,
}
"""What is called, by the module and the name that a pickle says."""
