"""Control bodies: strict msgpack maps, one per message without a tensor.

Every key of a message must be there and no other; open-ended content lives in the `dict` and `list`
fields only. What each field may be is said by the message's class, see `messages`.
"""

from __future__ import annotations

from typing import Any

import msgpack

from mesh import codec
from mesh.codec import Buffer, Fault
from mesh.errors import SAME_VERSION, BadFrame, BadRequest
from mesh.wire import call_back  # noqa: F401 - its messages enter CONTROL_MESSAGES
from mesh.wire.frames import FrameType
from mesh.wire.messages import CONTROL, CONTROL_MESSAGES, EVERY, TENSORS, WEIGHTS, Message

_ALWAYS = {FrameType.NACK, FrameType.PING, FrameType.PONG} | {
    kind for kind, message in CONTROL_MESSAGES.items() if message.link == EVERY
}
_ONLY_CONTROL = {kind for kind, message in CONTROL_MESSAGES.items() if message.link == CONTROL}
_ONLY_WEIGHTS = {kind for kind, message in CONTROL_MESSAGES.items() if message.link == WEIGHTS}
_ANSWERS = {FrameType.BLOB, FrameType.ACK, FrameType.FLOW, FrameType.FAILURE}
_BY_PURPOSE = {
    CONTROL: frozenset(_ALWAYS | _ONLY_CONTROL),
    TENSORS: frozenset(FrameType) - _ONLY_CONTROL - _ONLY_WEIGHTS,
    WEIGHTS: frozenset(_ALWAYS | _ONLY_WEIGHTS | _ANSWERS),
}


def frames_for(purpose: str) -> frozenset[FrameType]:
    """What a link of this purpose may bear; what belongs on every link, for one that is unknown."""
    return _BY_PURPOSE.get(purpose, frozenset(_ALWAYS))


def encode(message: Message) -> tuple[FrameType, bytes]:
    """The frame type and body of a message without a tensor.

    Raises BadRequest when a field does not fit the wire.
    """
    kind, form = message.frame, type(message)
    values = {name: getattr(message, name) for name in codec.field_names(form)}
    try:
        codec.convert(values, form)
        return kind, pack_map(values)
    except Fault as fault:
        raise BadRequest(
            f"{fault.field} of a {kind.name} message does not fit the wire: {fault.why}.",
            fix="Shorten it, or pass a value of the declared type.",
            param=fault.field,
        ) from fault
    except (TypeError, ValueError, OverflowError) as exc:
        raise BadRequest(
            f"A {kind.name} message cannot be written: {exc}.",
            fix="Use only text, numbers, bytes, lists and maps in its fields.",
        ) from exc


def decode(kind: FrameType, values: dict[str, Any]) -> Message:
    """The message of an unpacked control body; raises BadFrame for anything but its layout."""
    try:
        return codec.convert(values, CONTROL_MESSAGES[kind], complete=True, closed=True)
    except Fault as fault:
        named = f"{fault.field} in a " if fault.field else "A "
        said = f"{named}{kind.name} body has a wrong type or size: {fault.why}."
        raise BadFrame(said, fix=SAME_VERSION, param=fault.field or None) from fault


def pack_map(values: dict[str, Any]) -> bytes:
    """msgpack of a map of plain values."""
    packed: bytes = msgpack.packb(values, use_bin_type=True)
    return packed


def unpack_map(body: Buffer) -> dict[str, Any]:
    """Read exactly one msgpack map with text keys; raises BadFrame for anything else."""
    try:
        return codec.unpack_map(body)
    except Fault as fault:
        raise BadFrame(f"A control body {fault.why}.", fix=SAME_VERSION) from fault
