"""The tensor part of a frame: id, dtype, shape, then raw bytes. Knows nothing of torch.

A size is always computed and checked against the limit before anything of that size exists.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod

from mesh.errors import BadFrame, BadRequest, FrameTooLarge
from mesh.wire.frames import Buffer
from mesh.wire.messages import WireTensor

MAX_RANK = 8
_FIXED = struct.Struct("!HBB")
_SHAPES = [struct.Struct(f"!{rank}I") for rank in range(MAX_RANK + 1)]

CODES = {"fp16": 1, "fp32": 2, "bf16": 3, "int8": 4}
NAMES = {code: name for name, code in CODES.items()}
ITEMSIZE = {"fp16": 2, "fp32": 4, "bf16": 2, "int8": 1}

_FIX_PEER = "Run the same hearthnet version on both machines."


@dataclass(slots=True)
class TensorHeader:
    """What every tensor-bearing frame repeats. `encoded` are the header's own bytes."""

    tensor_id: int
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    encoded: bytes

    @classmethod
    def unpack(cls, payload: memoryview, max_bytes: int) -> TensorHeader:
        """Read the header at the start of `payload`.

        Raises BadFrame for an unknown dtype, a rank above `MAX_RANK` or a short payload,
        FrameTooLarge when product(shape) * itemsize exceeds `max_bytes`.
        """
        if len(payload) < _FIXED.size:
            raise BadFrame("A tensor header is cut short.", fix=_FIX_PEER)
        tensor_id, code, rank = _FIXED.unpack_from(payload)
        dtype = NAMES.get(code)
        if dtype is None:
            raise BadFrame(f"Unknown tensor dtype {code}.", fix=_FIX_PEER)
        if rank > MAX_RANK:
            raise BadFrame(f"A tensor of rank {rank}; at most {MAX_RANK}.", fix=_FIX_PEER)
        end = _FIXED.size + 4 * rank
        if len(payload) < end:
            raise BadFrame("A tensor header is cut short.", fix=_FIX_PEER)
        shape = _SHAPES[rank].unpack_from(payload, _FIXED.size)
        size = prod(shape) * ITEMSIZE[dtype]
        if size > max_bytes:
            raise FrameTooLarge(
                f"A {dtype} tensor of shape {shape} is {size} bytes; the limit is {max_bytes}.",
                fix="Send fewer rows per step.",
            )
        return cls(tensor_id, dtype, shape, size, bytes(payload[:end]))

    def tensor(self, data: Buffer, *, gradient: bool) -> WireTensor:
        """The tensor with this header and exactly these bytes; raises BadFrame otherwise."""
        if len(data) != self.size_bytes:
            raise BadFrame(
                f"A {self.dtype} tensor of shape {self.shape} needs {self.size_bytes} bytes, "
                f"{len(data)} came.",
                fix=_FIX_PEER,
            )
        return WireTensor(self.dtype, self.shape, data, gradient)


def pack_header(tensor: WireTensor, tensor_id: int) -> bytes:
    """The header of `tensor`."""
    shape = tensor.shape
    rank = len(shape)
    return _FIXED.pack(tensor_id, CODES[tensor.dtype], rank) + _SHAPES[rank].pack(*shape)


def checked_bytes(tensor: WireTensor, max_bytes: int) -> Buffer:
    """The raw bytes of a tensor that is about to be sent.

    Raises BadRequest when dtype, shape and bytes do not fit together or exceed `max_bytes`.
    """
    data = tensor.data
    if type(data) is memoryview:
        data = data.cast("B")
    itemsize = ITEMSIZE.get(tensor.dtype)
    if itemsize is None or len(tensor.shape) > MAX_RANK:
        raise BadRequest(
            f"A {tensor.dtype} tensor of rank {len(tensor.shape)} cannot be sent.",
            fix=f"Send {', '.join(CODES)} of at most {MAX_RANK} dimensions.",
            param="tensor",
        )
    if prod(tensor.shape) * itemsize != len(data):
        raise BadRequest(
            f"A {tensor.dtype} tensor of shape {tensor.shape} has {len(data)} bytes.",
            fix="Give dtype, shape and bytes that belong together.",
            param="tensor",
        )
    if len(data) > max_bytes:
        raise BadRequest(
            f"A tensor of {len(data)} bytes exceeds the link's limit of {max_bytes}.",
            fix="Send fewer rows per step.",
            param="tensor",
        )
    return data
