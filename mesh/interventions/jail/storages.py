"""What a tensor of the client's lies in, read out of its pickle, also where torch itself cannot.

torch writes the memory of a tensor of a newer number format (fp8, uint16 to uint64) as one without
any format, and has no way to read that.
"""

from __future__ import annotations

import io
import re

import torch

WRITTEN_AS = ("torch.storage", "_load_from_bytes")
"""What a pickle names, module and name, where `load_storage` is to be called."""

_KIND = re.compile(rb"ctorch(?:\.storage)?\n(\w*)Storage\n")  # as pickle names a class
_BYTES = b"ctorch\nByteStorage\n"


def load_storage(data: bytes) -> torch.TypedStorage:
    """The memory that `data` is, in main memory wherever it was: a job has no other."""
    kind = _KIND.search(data)  # the first such name is in front of what the memory holds
    if kind is not None and kind[1] == b"Untyped":
        data = data[: kind.start()] + _BYTES + data[kind.end() :]
    loaded: torch.TypedStorage = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    return loaded
