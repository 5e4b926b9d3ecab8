"""The 16-byte frame header: one websocket binary message is exactly one frame.

Knows which types and flags exist and which flags belong to which type; knows nothing of what the
payloads mean, of sequence order or of sockets.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from mesh.codec import Buffer
from mesh.errors import SAME_VERSION, BadFrame, FrameTooLarge, VersionMismatch

FRAME_VERSION = 1
HEADER = struct.Struct("!BBHIII")
"""version u8, type u8, reserved u16 (0), sequence u32, payload length u32, flags u32."""

COUNT = struct.Struct("!I")
"""The payload of ACK and FLOW: chunks."""

TOKEN = struct.Struct("!Q")
"""The payload of PING and PONG."""


class FrameType(IntEnum):
    """What a frame carries. Below 0x10: the tensor transport's own; from there on: hearthnet's."""

    DATA = 0x01
    END = 0x02
    ACK = 0x03
    NACK = 0x04
    HELLO = 0x05
    BYE = 0x06
    FLOW = 0x07
    PING = 0x08
    PONG = 0x09
    STEP = 0x10
    RESULT = 0x11
    OPEN = 0x12
    OPENED = 0x13
    PARK = 0x14
    RESUME = 0x15
    CLOSE = 0x16
    FAILURE = 0x17
    ADVERTISE = 0x18
    DRAIN = 0x19
    OPEN_TAPS = 0x1A
    GOSSIP = 0x1B
    OPEN_PART = 0x1C
    FILE_ASK = 0x1D
    FILE_PART = 0x1E
    SEAL = 0x1F
    SEALED = 0x20
    LOADING = 0x21
    BLOB = 0x22
    WEIGHTS_ASK = 0x23
    CALL_BACK = 0x24
    CALLED_BACK = 0x25
    COPY_PREFIX = 0x30
    PREFIX_COPIED = 0x31
    OPEN_ENDS = 0x32
    ROW_ASK = 0x33
    OPEN_NORMED = 0x34


class FrameFlags(IntFlag):
    """Properties of a frame's payload."""

    COMPRESSED = 1
    FINAL = 2
    GRADIENT = 4


COMPRESSED = int(FrameFlags.COMPRESSED)
FINAL = int(FrameFlags.FINAL)
GRADIENT = int(FrameFlags.GRADIENT)

_WHOLE = frozenset({FrameType.STEP, FrameType.RESULT, FrameType.BLOB})
_BARE = frozenset({FrameType.END, FrameType.ACK, FrameType.FLOW, FrameType.PING, FrameType.PONG})
"""Neither tensor nor control body, so nothing to compress."""

_KNOWN_FLAGS = COMPRESSED | FINAL | GRADIENT


def _allowed_flags(kind: FrameType) -> int:
    if kind is FrameType.DATA:
        return _KNOWN_FLAGS
    if kind in _WHOLE:
        return COMPRESSED | GRADIENT
    return 0 if kind in _BARE else COMPRESSED


# Plain dicts keyed by the wire's number: the enum's own lookup costs a microsecond per frame.
_TYPES = {int(kind): kind for kind in FrameType}
_FORBIDDEN_FLAGS = {kind: ~_allowed_flags(kind) & 0xFFFFFFFF for kind in FrameType}


@dataclass(slots=True)
class Frame:
    """One frame. `payload` of a parsed frame is a view into the message it came in."""

    type: FrameType
    sequence: int
    payload: Buffer
    flags: int = 0

    @classmethod
    def parse(cls, message: Buffer, max_payload: int) -> Frame:
        """Read one whole message.

        Raises BadFrame, FrameTooLarge or VersionMismatch; never looks at the payload.
        """
        if len(message) < HEADER.size:
            raise BadFrame(
                f"A frame of {len(message)} bytes is shorter than its header.", fix=SAME_VERSION
            )
        version, number, reserved, sequence, length, flags = HEADER.unpack_from(message)
        if version != FRAME_VERSION:
            raise version_mismatch("this node", FRAME_VERSION, "the other side", version)
        kind = _TYPES.get(number)
        if kind is None:
            raise BadFrame(f"Unknown frame type 0x{number:02x}.", fix=SAME_VERSION)
        if reserved:
            raise BadFrame("The reserved field of a frame is not 0.", fix=SAME_VERSION)
        if flags & _FORBIDDEN_FLAGS[kind]:
            what = "Unknown" if flags & ~_KNOWN_FLAGS else f"{kind.name} does not take these"
            raise BadFrame(f"{what} frame flags: 0x{flags:x}.", fix=SAME_VERSION)
        if length != len(message) - HEADER.size:
            raise BadFrame(
                f"A frame says {length} bytes of payload and has {len(message) - HEADER.size}.",
                fix=SAME_VERSION,
            )
        if length > max_payload:
            raise FrameTooLarge(
                f"A {kind.name} payload of {length} bytes exceeds the limit of {max_payload}.",
                fix="Use the same limits on both machines.",
            )
        return cls(kind, sequence, memoryview(message)[HEADER.size :], flags)

    def serialize(self) -> bytes:
        """The message of this frame."""
        return pack_frame(self.type, self.sequence, self.flags, self.payload)

    def __str__(self) -> str:
        flags = f" {FrameFlags(self.flags).name}" if self.flags else ""
        return f"{self.type.name} seq={self.sequence}{flags} [{_elide(self.payload)}]"


def number(frame: Frame, layout: struct.Struct) -> int:
    """The one number that is the frame's payload. Raises BadFrame."""
    if len(frame.payload) != layout.size:
        raise BadFrame(
            f"A {frame.type.name} payload of {len(frame.payload)} bytes.", fix=SAME_VERSION
        )
    value: int = layout.unpack(frame.payload)[0]
    return value


def pack_frame(kind: FrameType, sequence: int, flags: int, *parts: Buffer) -> bytes:
    """The message of a frame whose payload is `parts` in a row; copies each part once."""
    length = sum(map(len, parts))
    return b"".join(
        (HEADER.pack(FRAME_VERSION, kind, 0, sequence & 0xFFFFFFFF, length, flags), *parts)
    )


def version_mismatch(us: str, ours: int, them: str, theirs: int) -> VersionMismatch:
    """The error that says which of two named sides is too old."""
    old = us if ours < theirs else them
    return VersionMismatch(
        f"{us} speaks protocol version {ours} and {them} version {theirs}: {old} is too old.",
        fix=f"Update hearthnet on {old}.",
    )


def _elide(payload: Buffer) -> str:
    """The first and last bytes in hexadecimal, and the size."""
    size = len(payload)
    if size <= 24:
        return f"{bytes(payload).hex(' ')}{', ' if size else ''}{size} bytes"
    return f"{bytes(payload[:16]).hex(' ')} ... {bytes(payload[-8:]).hex(' ')}, {size} bytes"
