"""Control bodies: strict msgpack maps, one per message without a tensor.

Every key of a message must be there and no other; open-ended content lives in the `dict` and `list`
fields only. Refuses extension types, timestamps, duplicate keys, trailing bytes, keys that are not
text, and anything deep or large enough to cost memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import msgpack

from mesh.errors import BadFrame, BadRequest
from mesh.types import WireDtype
from mesh.wire.frames import Buffer, FrameType
from mesh.wire.messages import (
    Advertise,
    Bye,
    Close,
    Drain,
    Failure,
    FileAsk,
    FilePart,
    Gossip,
    Hello,
    Loading,
    Message,
    Open,
    Opened,
    OpenPart,
    OpenTaps,
    Park,
    Resume,
    Seal,
    Sealed,
)

MAX_DEPTH = 12
# A nest of arrays that each announce the most elements costs depth * this * 8 bytes before msgpack
# notices that the input ends: 8 MiB.
_MAX_ARRAY = 1024
_MAX_MAP = 1024

_FIX = "Run the same hearthnet version on both machines."

Check = Callable[[object], bool]


def _uint32(value: object) -> bool:
    return type(value) is int and 0 <= value <= 0xFFFFFFFF


def _optional_uint32(value: object) -> bool:
    return value is None or _uint32(value)


def _text(limit: int) -> Check:
    return lambda value: type(value) is str and len(value) <= limit


def _mapping(value: object) -> bool:
    return type(value) is dict


def _mappings(value: object) -> bool:
    return type(value) is list and all(type(item) is dict for item in value)


def _bytes(value: object) -> bool:
    return type(value) is bytes


_DTYPES = frozenset(WireDtype)

_SESSION: dict[str, Check] = {"session": _uint32}
_LAYOUT: dict[FrameType, tuple[type[Message], dict[str, Check]]] = {
    FrameType.HELLO: (
        Hello,
        {
            "node_id": _text(128), "node_name": _text(128), "purpose": _text(32),
            "software": _text(64), "version": _uint32, "fields": _mapping,
        },
    ),
    FrameType.BYE: (Bye, {"reason": _text(1024)}),
    FrameType.OPEN: (
        Open,
        {
            "session": _uint32, "model_id": _text(512), "weights_sha256": _text(128),
            "start": _uint32, "stop": _uint32, "max_tokens": _uint32,
            "wire_dtype": lambda value: type(value) is str and value in _DTYPES,
            "edits": _mappings, "harvest": _mapping, "token": _text(2048),
        },
    ),
    FrameType.OPEN_PART: (OpenPart, {"session": _uint32, "data": _bytes}),
    FrameType.OPEN_TAPS: (
        OpenTaps,
        {
            "session": _uint32, "model_id": _text(512), "weights_sha256": _text(128),
            "start": _uint32, "stop": _uint32, "token": _text(2048),
        },
    ),
    FrameType.LOADING: (Loading, _SESSION),
    FrameType.OPENED: (Opened, {"session": _uint32, "max_tokens": _uint32}),
    FrameType.PARK: (Park, _SESSION),
    FrameType.RESUME: (Resume, {"session": _uint32, "max_tokens": _uint32}),
    FrameType.CLOSE: (Close, _SESSION),
    FrameType.SEAL: (Seal, _SESSION),
    FrameType.SEALED: (Sealed, {"session": _uint32, "files": _mappings}),
    FrameType.FAILURE: (
        Failure, {"error": _mapping, "session": _optional_uint32, "step": _optional_uint32}
    ),
    FrameType.DRAIN: (Drain, {"reason": _text(1024)}),
    FrameType.GOSSIP: (Gossip, {"body": _mapping}),
    FrameType.FILE_ASK: (FileAsk, {"number": _uint32, "sha256": _text(64), "offset": _uint32}),
    FrameType.FILE_PART: (FilePart, {"number": _uint32, "data": _bytes}),
    FrameType.ADVERTISE: (Advertise, {"body": _bytes, "signature": _bytes}),
}  # fmt: skip

_TYPE_OF: dict[type, FrameType] = {message: kind for kind, (message, _) in _LAYOUT.items()}


def encode(message: Message) -> tuple[FrameType, bytes]:
    """The frame type and body of a message without a tensor.

    Raises BadRequest when a field does not fit the wire.
    """
    kind = _TYPE_OF[type(message)]
    values = {name: getattr(message, name) for name in _LAYOUT[kind][1]}
    for name, check in _LAYOUT[kind][1].items():
        plain = values[name] = str(values[name]) if name == "wire_dtype" else values[name]
        if not check(plain):
            raise BadRequest(
                f"{name} of a {kind.name} message does not fit the wire.",
                fix="Shorten it, or pass a value of the declared type.",
                param=name,
            )
    try:
        return kind, pack_map(values)
    except (TypeError, ValueError, OverflowError) as exc:
        raise BadRequest(
            f"A {kind.name} message cannot be written: {exc}.",
            fix="Use only text, numbers, bytes, lists and maps in its fields.",
        ) from exc


def decode(kind: FrameType, values: dict[str, Any]) -> Message:
    """The message of an unpacked control body; raises BadFrame for anything but its layout."""
    cls, checks = _LAYOUT[kind]
    if values.keys() != checks.keys():
        odd = sorted(values.keys() ^ checks.keys())
        raise BadFrame(
            f"A {kind.name} body has missing or unknown keys: {str(odd)[:200]}.", fix=_FIX
        )
    for name, check in checks.items():
        if not check(values[name]):
            raise BadFrame(f"{name} in a {kind.name} body has a wrong type or size.", fix=_FIX)
    if kind is FrameType.OPEN:
        values["wire_dtype"] = WireDtype(values["wire_dtype"])
    return cls(**values)


def pack_map(values: dict[str, Any]) -> bytes:
    """msgpack of a map of plain values."""
    packed: bytes = msgpack.packb(values, use_bin_type=True)
    return packed


def unpack_map(body: Buffer) -> dict[str, Any]:
    """Read exactly one msgpack map with text keys; raises BadFrame for anything else."""
    try:
        value = msgpack.unpackb(
            body, raw=False, strict_map_key=True, ext_hook=_refuse_extension,
            object_pairs_hook=_unique_keys, max_array_len=_MAX_ARRAY, max_map_len=_MAX_MAP,
            max_ext_len=0,
        )  # fmt: skip
    except ValueError as exc:  # every msgpack error is one, and so is a wrong UTF-8 sequence
        raise BadFrame(f"A control body is not strict msgpack: {exc!s:.200}.", fix=_FIX) from exc
    if type(value) is not dict:
        raise BadFrame("A control body is not a map.", fix=_FIX)
    _check_depth(value)
    return value


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code} with {len(data)} bytes")


def _unique_keys(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    if not all(type(key) is str for key in result):
        raise ValueError("a key that is not text")
    return result


def _check_depth(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) in (dict, list)
        ]
        if not level:
            return
    raise BadFrame(f"A control body is nested deeper than {MAX_DEPTH}.", fix=_FIX)
