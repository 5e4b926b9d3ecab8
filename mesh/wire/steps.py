"""The fixed binary part of what bears bytes: `Step`, `Result` and `Blob`, which travels as a tensor
of ``int8``; and the END frame that has it for those of several chunks.

A decode step is made of these, so they are structs and not msgpack maps. Each also gives credits
back: ``credits u16, reserved u16`` come first.

A step whose tensor fits one frame is *plain*: `pack_plain` and `unpack_plain` treat header, fields,
tensor header and shape as one struct. With cold caches the cost of a hop is the amount of code it
touches, and this path halves it. `unpack_plain` only ever says yes; whoever wants to know what is
wrong with a frame takes the long way.
"""

from __future__ import annotations

import struct
from math import prod

from mesh.codec import Buffer
from mesh.errors import SAME_VERSION, BadFrame, BadRequest
from mesh.wire.frames import FRAME_VERSION, GRADIENT, HEADER, FrameType, pack_frame
from mesh.wire.messages import Bearer, Blob, BlobKind, Result, Step, WireTensor
from mesh.wire.tensors import CODES, ITEMSIZE, MAX_RANK, NAMES, pack_header

CREDITS = struct.Struct("!HH")
_STEP_FIELDS = struct.Struct("!III")
_RESULT_FIELDS = struct.Struct("!IIII")
_BLOB_FIELDS = struct.Struct("!IIII")
_END = struct.Struct("!HBB")
_UINT32_MAX = 0xFFFFFFFF
_SIZES = {
    FrameType.STEP: CREDITS.size + _STEP_FIELDS.size,
    FrameType.RESULT: CREDITS.size + _RESULT_FIELDS.size,
    FrameType.BLOB: CREDITS.size + _BLOB_FIELDS.size,
}
_PLAIN_STEP = [struct.Struct(f"!BBHIIIHHIIIHBB{rank}I") for rank in range(MAX_RANK + 1)]
_PLAIN_RESULT = [struct.Struct(f"!BBHIIIHHIIIIHBB{rank}I") for rank in range(MAX_RANK + 1)]
_PLAIN_MIN = _PLAIN_RESULT[0].size
_BLOB_KINDS = frozenset(map(int, BlobKind))
_STEP = int(FrameType.STEP)
_RESULT = int(FrameType.RESULT)


def pack_plain(message: Bearer, sequence: int, credits: int, data: Buffer) -> bytes:
    """The whole frame of a message whose checked tensor bytes are `data`.

    Raises BadRequest when a number does not fit 32 bits.
    """
    tensor = message.tensor
    shape = tensor.shape
    rank = len(shape)
    flags = GRADIENT if tensor.gradient else 0
    try:
        if type(message) is Step:
            layout = _PLAIN_STEP[rank]
            head = layout.pack(
                FRAME_VERSION, _STEP, 0, sequence, layout.size - HEADER.size + len(data), flags,
                credits, 0, message.session, message.step, message.position,
                0, CODES[tensor.dtype], rank, *shape,
            )  # fmt: skip
        elif type(message) is Result:
            layout = _PLAIN_RESULT[rank]
            head = layout.pack(
                FRAME_VERSION, _RESULT, 0, sequence, layout.size - HEADER.size + len(data), flags,
                credits, 0, message.session, message.step,
                min(message.compute_us, _UINT32_MAX), min(message.queue_us, _UINT32_MAX),
                0, CODES[tensor.dtype], rank, *shape,
            )  # fmt: skip
        else:
            fields = CREDITS.pack(credits, 0), pack(message), pack_header(tensor, 0)
            return pack_frame(FrameType.BLOB, sequence, 0, *fields, data)
    except struct.error as exc:
        raise _out_of_range(message, exc) from exc
    return head + data


def unpack_plain(
    message: Buffer, sequence: int, max_bytes: int
) -> tuple[Step | Result, int, int] | None:
    """Message, credits and tensor size of a faultless plain frame with this sequence number.

    None for every other frame and for every fault.
    """
    number = message[1] if len(message) >= _PLAIN_MIN else 0
    if number == _STEP:
        layouts, at = _PLAIN_STEP, 12
    elif number == _RESULT:
        layouts, at = _PLAIN_RESULT, 13
    else:
        return None
    rank = message[layouts[0].size - 1]
    layout = layouts[min(rank, MAX_RANK)]
    if len(message) < layout.size:
        return None
    values = layout.unpack_from(message)
    dtype = NAMES.get(values[at])
    if dtype is None or rank > MAX_RANK:
        return None
    shape = values[at + 2 :]
    size = prod(shape) * ITEMSIZE[dtype]
    version, _, reserved, number_in_line, length, flags, credits, reserved_too = values[:8]
    if (
        version != FRAME_VERSION
        or reserved
        or reserved_too
        or number_in_line != sequence
        or length != len(message) - HEADER.size
        or flags & ~GRADIENT
        or size > max_bytes
        or size != len(message) - layout.size
    ):
        return None
    tensor = WireTensor(dtype, shape, memoryview(message)[layout.size :], flags != 0)
    if number == _STEP:
        return Step(values[8], values[9], values[10], tensor), credits, size
    return Result(values[8], values[9], tensor, values[10], values[11]), credits, size


def pack(message: Bearer) -> bytes:
    """The fields between credits and tensor; raises BadRequest when one does not fit."""
    try:
        if type(message) is Step:
            return _STEP_FIELDS.pack(message.session, message.step, message.position)
        if type(message) is Result:
            return _RESULT_FIELDS.pack(
                message.session,
                message.step,
                min(message.compute_us, _UINT32_MAX),
                min(message.queue_us, _UINT32_MAX),
            )
        assert type(message) is Blob  # noqa: S101 - for the type checker
        return _BLOB_FIELDS.pack(message.session, message.kind, message.length, message.offset)
    except struct.error as exc:
        raise _out_of_range(message, exc) from exc


def pack_end(tensor_id: int, kind: FrameType) -> bytes:
    """What an END frame has before the credits."""
    return _END.pack(tensor_id, kind, 0)


def unpack_end(payload: memoryview) -> tuple[int, FrameType, memoryview]:
    """Tensor id, kind and the rest of an END payload; raises BadFrame."""
    if len(payload) < _END.size:
        raise BadFrame("An END frame is cut short.", fix=SAME_VERSION)
    tensor_id, number, reserved = _END.unpack_from(payload)
    rest = payload[_END.size :]
    if reserved or number not in _SIZES or len(rest) != _SIZES[FrameType(number)]:
        raise BadFrame("An END frame names no step, no result and no blob.", fix=SAME_VERSION)
    return tensor_id, FrameType(number), rest


def unpack_credits(kind: FrameType, payload: memoryview) -> tuple[int, int]:
    """The credits at the start of `payload`, and where the tensor header begins after the fields.

    Raises BadFrame.
    """
    size = _SIZES[kind]
    if len(payload) < size:
        raise BadFrame(f"A {kind.name} frame is cut short.", fix=SAME_VERSION)
    credits, reserved = CREDITS.unpack_from(payload)
    if reserved:
        raise BadFrame(f"The reserved field of a {kind.name} frame is not 0.", fix=SAME_VERSION)
    return credits, size


def build(kind: FrameType, payload: memoryview, tensor: WireTensor) -> Bearer:
    """The message whose checked fields start `payload`. Raises BadFrame for what is no blob."""
    if kind is FrameType.STEP:
        session, step, position = _STEP_FIELDS.unpack_from(payload, CREDITS.size)
        return Step(session, step, position, tensor)
    if kind is FrameType.BLOB:
        session, way, length, offset = _BLOB_FIELDS.unpack_from(payload, CREDITS.size)
        is_bytes = tensor.dtype == "int8" and len(tensor.shape) == 1 and not tensor.gradient
        if not is_bytes or way not in _BLOB_KINDS or offset + len(tensor.data) > length:
            raise BadFrame("A blob has bytes or fields that are none of a blob.", fix=SAME_VERSION)
        return Blob(session, BlobKind(way), length, offset, tensor.data)
    session, step, compute_us, queue_us = _RESULT_FIELDS.unpack_from(payload, CREDITS.size)
    return Result(session, step, tensor, compute_us, queue_us)


def _out_of_range(message: Bearer, exc: struct.error) -> BadRequest:
    return BadRequest(
        f"A {type(message).__name__} of session {message.session}: {exc}.",
        fix="Number sessions, steps and positions from 0 to 2**32-1.",
        param="step",
    )
