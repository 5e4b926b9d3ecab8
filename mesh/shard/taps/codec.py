"""Values and messages between a job and the shards: msgpack and raw tensor bytes, nothing else.

Reading one cannot run code: there are numbers, text, containers, tensors and a few fixed kinds, and
whatever is no such value stays where it is and is named by a number. What a tensor's number means
is `shared_tensors`'s business.

A message is ``u32 header length``, the header (a strict msgpack map), and the bytes of its tensors
in the order in which the header mentions them.
"""

from __future__ import annotations

import math
import struct
from collections import UserDict
from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np
import torch
from nnsight.intervention.source import NO_SKIP
from transformers import cache_utils, modeling_outputs
from transformers.cache_utils import Cache
from transformers.utils.generic import ModelOutput

from mesh.errors import SAME_VERSION, BadRequest
from mesh.shard.taps.parts import MAX_MESSAGE_BYTES

_MAX_HEADER_BYTES = 4 << 20
_MAX_ITEMS = 1 << 17
_MAX_DEPTH = 32
_MAX_RANK = 16
_LENGTH = struct.Struct("!I")
DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8,
    "bool": torch.bool, "c64": torch.complex64, "c128": torch.complex128,
}  # fmt: skip
CACHE_OPERATIONS = (
    "reset", "reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices",
    "activate_past_recording",
)  # fmt: skip
"""What a job may do to a cache, by the names of transformers, and shards to their parts of it."""
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_OUTPUTS = {
    name: cls
    for name, cls in vars(modeling_outputs).items()
    if isinstance(cls, type) and issubclass(cls, ModelOutput)
}
# What Gemma 4's layers hand on to each other is of a class of its own from transformers 5.23 on.
_MAPPINGS = {dict, UserDict, getattr(cache_utils, "KVSharingDict", UserDict)}


class EncodedKind(IntEnum):
    """What an encoded list is; its first element."""

    TENSOR = 0
    LIST = 1
    TUPLE = 2
    DICT = 3
    SET = 4
    SIZE = 5
    DTYPE = 6
    DEVICE = 7
    SLICE = 8
    OUTPUT = 9
    NO_SKIP = 10
    CACHE = 11
    KEPT = 12


class Staying:
    """A live object that stayed at the other end: it can be handed back where it was, not used."""

    __slots__ = ("kind", "number")

    def __init__(self, number: int, kind: str) -> None:
        self.number = number
        self.kind = kind

    @staticmethod
    def of(number: int, kind: str) -> Staying:
        """One whose class is called by its `kind`, which is what Python says of a wrong use."""
        return _staying_class(kind)(number, kind)

    def __repr__(self) -> str:
        return f"<{self.kind} on another machine>"


@lru_cache(maxsize=64)
def _staying_class(kind: str) -> type[Staying]:
    name = kind if kind.isidentifier() else "object"
    return type(f"{name} on another machine", (Staying,), {"__slots__": ()})


Buffers = list[memoryview]
Path = tuple[int | str, ...]


def malformed(why: str) -> BadRequest:
    """The error for a message that is not what it should be."""
    return BadRequest(f"An intervention message is malformed: {why}.", fix=SAME_VERSION)


# Messages


def pack(header: bytes, buffers: Buffers) -> bytes:
    """The bytes of a message, whose header says the `sizes` of its tensors. Raises BadRequest when
    it is too large."""
    size = _LENGTH.size + len(header) + sum(map(len, buffers))
    if size > MAX_MESSAGE_BYTES or len(header) > _MAX_HEADER_BYTES:
        raise BadRequest(
            f"{size} bytes at one point of a trace exceed {MAX_MESSAGE_BYTES}.",
            fix="Read less at once, for example only the positions you need.",
        )
    return b"".join((_LENGTH.pack(len(header)), header, *buffers))


def header_bytes(message: bytes | bytearray | memoryview) -> int:
    """How long the header of a message says it is, within what may be; 0 where none begins."""
    if len(message) < _LENGTH.size:
        return 0
    (length,) = _LENGTH.unpack_from(message)
    return min(int(length), len(message))


def unpack(message: bytes | bytearray | memoryview) -> tuple[dict[str, Any], Buffers]:
    """Header and tensor bytes of a message; what the header says is for `messages` to read. Raises
    BadRequest for anything but a whole one."""
    view = memoryview(message)
    if len(view) > MAX_MESSAGE_BYTES or len(view) < _LENGTH.size:
        raise malformed(f"{len(view)} bytes")
    (length,) = _LENGTH.unpack_from(view)
    start = _LENGTH.size + length
    if length > _MAX_HEADER_BYTES or start > len(view):
        raise malformed("its header is cut short")
    header = _unpack_header(view[_LENGTH.size : start])
    buffers = []
    sizes = header.pop("sizes", [])
    if type(sizes) is not list:
        raise malformed("its tensors have no sizes")
    for size in sizes:
        if type(size) is not int or not 0 <= size <= len(view) - start:
            raise malformed("its tensors are cut short")
        buffers.append(view[start : start + size])
        start += size
    if start != len(view):
        raise malformed("bytes are left over")
    return header, buffers


def _unpack_header(data: memoryview) -> dict[str, Any]:
    try:
        header = msgpack.unpackb(
            data, raw=False, strict_map_key=True, max_ext_len=0, max_array_len=_MAX_ITEMS,
            max_map_len=1024,
        )  # fmt: skip
    except (ValueError, RecursionError) as error:
        raise malformed(f"{error!s:.200}") from error
    if type(header) is not dict:
        raise malformed("its header is no map")
    return header


# Values


class Writer:
    """Turns values into plain data. `tensor` gives a tensor's entry, `other` that of any object."""

    def __init__(
        self,
        tensor: Callable[[torch.Tensor, Buffers], list[Any]],
        other: Callable[[Any, Path], list[Any]],
        buffers: Buffers | None = None,
    ) -> None:
        self.buffers: Buffers = [] if buffers is None else buffers
        self._tensor = tensor
        self._other = other

    def tensor(self, tensor: torch.Tensor) -> list[Any]:
        """The entry of one tensor."""
        return self._tensor(tensor, self.buffers)

    def value(self, value: Any, path: Path = ()) -> Any:
        """`value` as plain data; raises BadRequest for tensors without data here."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, self.buffers)
        if len(path) >= _MAX_DEPTH:
            raise malformed("a value is nested too deeply")
        if type(value) in _SEQUENCES:
            items = [self.value(item, (*path, i)) for i, item in enumerate(value)]
            return [_SEQUENCES[type(value)], items]
        if type(value) in _MAPPINGS:
            return [EncodedKind.DICT, self._pairs(value, path)]
        if type(value) in (set, frozenset):
            return [EncodedKind.SET, [self.value(item, (*path, 0)) for item in value]]
        return self._special(value, path)

    def _pairs(self, value: Any, path: Path) -> list[list[Any]]:
        return [
            [self.value(key, (*path, -1)), self.value(item, (*path, str(key)))]
            for key, item in value.items()
        ]

    def _special(self, value: Any, path: Path) -> list[Any]:
        if value is NO_SKIP:
            return [EncodedKind.NO_SKIP]
        if isinstance(value, torch.dtype) and value in _DTYPE_NAMES:
            return [EncodedKind.DTYPE, _DTYPE_NAMES[value]]
        if isinstance(value, torch.device):
            return [EncodedKind.DEVICE]
        if type(value) is slice:
            parts = [self.value(x, (*path, i)) for i, x in enumerate(_slice_parts(value))]
            return [EncodedKind.SLICE, parts]
        if isinstance(value, ModelOutput) and _OUTPUTS.get(type(value).__name__) is type(value):
            return [EncodedKind.OUTPUT, type(value).__name__, self._pairs(value, path)]
        return self._other(value, path)


class Reader:
    """The reverse of `Writer`. `other` gets the entries of kind CACHE and KEPT."""

    def __init__(
        self,
        buffers: Buffers,
        tensor: Callable[[list[Any], Callable[[], memoryview]], torch.Tensor],
        other: Callable[[list[Any], Path], Any],
        device: torch.device,
    ) -> None:
        self._buffers = iter(buffers)
        self._tensor = tensor
        self._other = other
        self._device = device

    def tensor(self, entry: Any) -> torch.Tensor:
        """The tensor of one entry."""
        if type(entry) is not list or len(entry) != 4 or entry[0] != EncodedKind.TENSOR:
            raise malformed("a tensor was expected")
        return self._tensor(entry, self._next_buffer)

    def value(self, data: Any, path: Path = ()) -> Any:
        """The value of `data`; raises BadRequest for anything that `Writer` does not write."""
        if data is None or type(data) in (bool, int, float, str):
            return data
        if type(data) is not list or not data or type(data[0]) is not int:
            raise malformed(f"a {type(data).__name__} where a value was expected")
        if len(path) >= _MAX_DEPTH:
            raise malformed("a value is nested too deeply")
        try:
            return self._READ[data[0]](self, data, path)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise malformed(f"{error!r:.200}") from error

    def _next_buffer(self) -> memoryview:
        buffer = next(self._buffers, None)
        if buffer is None:
            raise malformed("it names more tensors than it has")
        return buffer

    def _items(self, data: list[Any], path: Path) -> Any:
        return [self.value(item, (*path, i)) for i, item in enumerate(data[1])]

    def _pairs(self, pairs: Any, path: Path) -> dict[Any, Any]:
        result = {}
        for key, item in pairs:
            name = self.value(key, (*path, -1))
            result[name] = self.value(item, (*path, str(name)))
        return result

    def _set(self, data: list[Any], path: Path) -> Any:
        return {self.value(item, (*path, 0)) for item in data[1]}

    def _output(self, data: list[Any], path: Path) -> Any:
        return _OUTPUTS[data[1]](**self._pairs(data[2], path))

    _READ: dict[int, Callable[[Reader, list[Any], Path], Any]] = {  # noqa: RUF012 - filled once
        EncodedKind.TENSOR: lambda self, data, _: self.tensor(data),
        EncodedKind.LIST: _items,
        EncodedKind.TUPLE: lambda self, data, path: tuple(self._items(data, path)),
        EncodedKind.SIZE: lambda self, data, path: torch.Size(self._items(data, path)),
        EncodedKind.DICT: lambda self, data, path: self._pairs(data[1], path),
        EncodedKind.SET: _set,
        EncodedKind.DTYPE: lambda _self, data, _: DTYPES[data[1]],
        EncodedKind.DEVICE: lambda self, _data, _: self._device,
        EncodedKind.SLICE: lambda self, data, path: slice(*self._items(data, path)),
        EncodedKind.OUTPUT: _output,
        EncodedKind.NO_SKIP: lambda _self, _data, _: NO_SKIP,
        EncodedKind.CACHE: lambda self, data, path: self._other(data, path),
        EncodedKind.KEPT: lambda self, data, path: self._other(data, path),
    }


_SEQUENCES: dict[type, EncodedKind] = {
    list: EncodedKind.LIST,
    tuple: EncodedKind.TUPLE,
    torch.Size: EncodedKind.SIZE,
}


def _slice_parts(value: Any) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step


# Tensors


_NOT_ON_METAL = frozenset({torch.float64, torch.complex128})

# torch's own, where a job's process watches who asks a tensor for its memory.
_numpy: Callable[[torch.Tensor], Any] = torch.Tensor.numpy
storage_of: Callable[[torch.Tensor], torch.UntypedStorage] = torch.Tensor.untyped_storage


def write_tensor(tensor: torch.Tensor, buffers: Buffers) -> list[Any]:
    """Dtype and shape of `tensor`; its bytes go to the end of `buffers`. Raises as `raw`."""
    # A snapshot: the tensor may well change before the message is written.
    buffers.append(memoryview(bytes(raw(tensor))))
    return [_DTYPE_NAMES[tensor.dtype], list(tensor.shape)]


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of `tensor`, in its own memory where it lies there in one piece.

    Raises BadRequest when it has no plain data: on the meta device, sparse, quantised.
    """
    plain = tensor.detach()
    if plain.dtype not in _DTYPE_NAMES or plain.layout is not torch.strided or plain.is_meta:
        raise BadRequest(
            f"A {plain.layout} tensor of {plain.dtype} on {plain.device} has no data that another"
            " machine could take.",
            fix="Use ordinary dense tensors with values, not tensors of the meta device.",
        )
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    plain = plain.to("cpu").contiguous()
    return memoryview(_numpy(plain.reshape(-1).view(torch.uint8)) if plain.numel() else b"")


def read_tensor(description: Any, data: memoryview, device: torch.device) -> torch.Tensor:
    """The tensor of these bytes, writable and no view of another. Raises BadRequest."""
    if type(description) is not list or len(description) != 2:
        raise malformed("a tensor without dtype and shape")
    name, shape = description
    dtype = DTYPES.get(name) if type(name) is str else None
    if dtype is None or type(shape) is not list or len(shape) > _MAX_RANK:
        raise malformed(f"a tensor of {str(description)[:100]}")
    if any(type(n) is not int or n < 0 for n in shape):
        raise malformed("a tensor of negative size")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise malformed(f"{len(data)} bytes for a {name} tensor of shape {shape}")
    if device.type == "mps" and dtype in _NOT_ON_METAL:
        raise BadRequest(
            f"The layer is on an Apple card, which has no {name} tensors.",
            fix="Give a narrower one, such as `tensor.float()`.",
        )
    # Allocated by torch: kernels give other last bits on memory that is not aligned as it aligns.
    # And no view: it could not be edited in place under autograd, and nnsight asks for `_base`.
    tensor = torch.empty(shape, dtype=dtype)
    if len(data):
        bytes_ = _numpy(tensor.detach().reshape(-1).view(torch.uint8))
        bytes_[:] = np.frombuffer(data, dtype=np.uint8)
    return tensor.to(device)


def is_cache(value: Any) -> bool:
    """Whether `value` holds keys and values of layers."""
    return isinstance(value, Cache)
