"""The tensor part of a frame: id, dtype, shape, then raw bytes. Knows nothing of torch.

A size is always computed and checked against the limit before anything of that size exists.

Tensors are put together from chunks, and memory grows with what arrived, never with what was
announced.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod

from mesh.codec import Buffer
from mesh.errors import SAME_VERSION, BadFrame, BadRequest, FrameTooLarge
from mesh.wire.limits import Limits
from mesh.wire.messages import WireTensor

MAX_OPEN_TENSORS = 16
MAX_RANK = 8
_FIXED = struct.Struct("!HBB")
_SHAPES = [struct.Struct(f"!{rank}I") for rank in range(MAX_RANK + 1)]

CODES = {"fp16": 1, "fp32": 2, "bf16": 3, "int8": 4}
NAMES = {code: name for name, code in CODES.items()}
ITEMSIZE = {"fp16": 2, "fp32": 4, "bf16": 2, "int8": 1}
"""Bytes of one element, by dtype."""


class _Partial:
    __slots__ = ("data", "final", "gradient", "header")

    def __init__(self, header: TensorHeader, gradient: bool) -> None:
        self.header = header
        self.gradient = gradient
        self.data = bytearray()
        self.final = False


class Reassembly:
    """The incomplete tensors of one direction, by tensor id."""

    def __init__(self, limits: Limits) -> None:
        self._limit = limits.reassembly_bytes
        self._open: dict[int, _Partial] = {}
        self.size_bytes = 0
        """Bytes held now."""

    def room_for(self, header: TensorHeader) -> int:
        """How many bytes the next chunk of this tensor may have.

        Raises BadFrame when the header contradicts the tensor's first chunk, when its last chunk
        was already seen, or when too many tensors are open.
        """
        partial = self._open.get(header.tensor_id)
        if partial is None:
            if len(self._open) >= MAX_OPEN_TENSORS:
                raise BadFrame(
                    f"More than {MAX_OPEN_TENSORS} tensors are open at once.", fix=SAME_VERSION
                )
            return header.size_bytes
        if partial.header.encoded != header.encoded:
            raise BadFrame("A tensor changed its shape or dtype between chunks.", fix=SAME_VERSION)
        if partial.final:
            raise BadFrame("A chunk follows the final chunk of its tensor.", fix=SAME_VERSION)
        return header.size_bytes - len(partial.data)

    def add(
        self, header: TensorHeader, data: bytes | memoryview, *, final: bool, gradient: bool
    ) -> None:
        """Take one chunk that `room_for` admitted.

        Raises BadFrame for an empty or surplus chunk or a changed gradient flag, FrameTooLarge when
        all incomplete tensors together exceed the limit.
        """
        partial = self._open.get(header.tensor_id)
        if partial is None:
            partial = self._open[header.tensor_id] = _Partial(header, gradient)
        if partial.gradient != gradient:
            raise BadFrame("A tensor changed its gradient flag between chunks.", fix=SAME_VERSION)
        if not data:
            raise BadFrame("A data frame bears no bytes.", fix=SAME_VERSION)
        if len(partial.data) + len(data) > header.size_bytes:
            raise BadFrame("A tensor has more bytes than its shape says.", fix=SAME_VERSION)
        if self.size_bytes + len(data) > self._limit:
            raise FrameTooLarge(
                f"Incomplete tensors exceed {self._limit} bytes.",
                fix="Use the same limits on both machines.",
            )
        partial.data += data
        partial.final = final
        self.size_bytes += len(data)

    def end(self, tensor_id: int) -> WireTensor:
        """The finished tensor. Raises BadFrame when it is unknown or incomplete."""
        partial = self._open.pop(tensor_id, None)
        if partial is None:
            raise BadFrame(f"END for tensor {tensor_id}, which nobody started.", fix=SAME_VERSION)
        self.size_bytes -= len(partial.data)
        if not partial.final:
            raise BadFrame(f"END for tensor {tensor_id} before its final chunk.", fix=SAME_VERSION)
        return partial.header.tensor(partial.data, gradient=partial.gradient)


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
            raise BadFrame("A tensor header is cut short.", fix=SAME_VERSION)
        tensor_id, code, rank = _FIXED.unpack_from(payload)
        dtype = NAMES.get(code)
        if dtype is None:
            raise BadFrame(f"Unknown tensor dtype {code}.", fix=SAME_VERSION)
        if rank > MAX_RANK:
            raise BadFrame(f"A tensor of rank {rank}; at most {MAX_RANK}.", fix=SAME_VERSION)
        end = _FIXED.size + 4 * rank
        if len(payload) < end:
            raise BadFrame("A tensor header is cut short.", fix=SAME_VERSION)
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
                fix=SAME_VERSION,
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
