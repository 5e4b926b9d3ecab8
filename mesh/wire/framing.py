"""The one websocket frame that matters: binary and unfragmented.

websockets' Sans-I/O layer handles the upgrade and every frame; this is a shortcut past its parser.
For the frame that makes up a decode step and is alone in its read (`unwrap`), because with cold
caches a generator-based parser costs as much as all of our own protocol; for those of weights and
prefills (`FrameReader`), because it copies each of their bytes three times. Both say no to
everything that is not plainly that frame.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

from websockets.exceptions import PayloadTooBig

from mesh.errors import SAME_VERSION, BadFrame, FrameTooLarge, MeshError

try:
    from websockets.speedups import apply_mask
except ImportError:  # a build of websockets without its C extension
    from websockets.utils import apply_mask

_BINARY_FINAL = 0x82
_MASKED = 0x80
_LARGE_BYTES = 65536


def write(transport: asyncio.WriteTransport, payload: bytes, *, masked: bool) -> None:
    """Send one binary message; a large one is not copied to have its head before it."""
    if masked or len(payload) < _LARGE_BYTES:
        transport.write(wrap(payload, masked=masked))
    else:
        transport.writelines((_head_of(len(payload), masked=False), payload))


def wrap(payload: bytes, *, masked: bool) -> bytes:
    """One binary message as one websocket frame (RFC 6455, section 5.2)."""
    head = _head_of(len(payload), masked=masked)
    if not masked:
        return head + payload
    mask = secrets.token_bytes(4)
    return head + mask + apply_mask(payload, mask)


def unwrap(data: bytes | memoryview, *, masked: bool) -> bytes | None:
    """The payload when `data` is exactly one frame of 126 to 65535 bytes, else None."""
    start = 8 if masked else 4
    if (
        len(data) <= start
        or data[0] != _BINARY_FINAL
        or data[1] != (_MASKED | 126 if masked else 126)
        or len(data) - start != (data[2] << 8 | data[3])
    ):
        return None
    payload = bytes(data[start:])
    return apply_mask(payload, bytes(data[4:8])) if masked else payload


def fault_of(error: Exception) -> MeshError:
    """What websockets' own parser refuses, as one of our errors."""
    if isinstance(error, PayloadTooBig):
        return FrameTooLarge(f"A websocket message is too large: {error}.", fix=SAME_VERSION)
    return BadFrame(f"The peer broke the websocket protocol: {error}.", fix=SAME_VERSION)


class FrameReader:
    """Cuts a stream into the payloads of binary frames; each part of one is put where it belongs.

    A parser for all of the protocol gathers a frame behind whatever else has come, and copies it
    out again. What is not plainly a binary unfragmented frame of at most `limit` bytes is left.
    """

    def __init__(self, limit: int, *, masked: bool) -> None:
        self._limit = limit
        self._masked = masked
        self._head = b""  # of a frame of which no more is here
        self._mask = b""
        self._payload: bytearray | None = None
        self._count = 0

    def take(self, data: bytes | memoryview) -> tuple[Sequence[bytes | bytearray], bytes]:
        """The payloads that `data` completes; and from where on it is for another parser."""
        if not self._is_amid and (whole := unwrap(data, masked=self._masked)) is not None:
            return (whole,), b""
        payloads: list[bytes | bytearray] = []
        if self._head:
            data, self._head = self._head + bytes(data), b""
        view, at = memoryview(data), 0
        while at < len(data):
            if self._payload is None:
                start, size = self._begin(view[at:])
                if start == 0:
                    return payloads, bytes(view[at:])
                if len(data) - at < start:
                    self._head = bytes(view[at:])
                    break
                at += start
                self._mask = bytes(view[at - 4 : at]) if self._masked else b""
                if len(data) - at >= size:
                    payloads.append(self._unmasked(bytes(view[at : at + size])))
                    at += size
                    continue
                self._payload, self._count = bytearray(size), 0
            at += self._add(view[at:])
            if self._count == len(self._payload):
                payloads.append(self._unmasked(self._payload))
                self._payload = None
        return payloads, b""

    @property
    def _is_amid(self) -> bool:
        return self._payload is not None or self._head != b""

    def _begin(self, data: memoryview) -> tuple[int, int]:
        """How long a frame's head is, 0 for none of ours; its payload, once all of that is here."""
        if data[0] != _BINARY_FINAL:
            return 0, 0
        bit = _MASKED if self._masked else 0
        short = data[1] - bit if len(data) > 1 else 0
        if not 0 <= short <= 127:
            return 0, 0
        extended = 8 if short == 127 else 2 if short == 126 else 0
        start = 2 + extended + (4 if self._masked else 0)
        if len(data) < start:
            return (start, 0) if len(data) > 1 else (2, 0)
        size = int.from_bytes(data[2 : 2 + extended], "big") if extended else short
        is_shortest = size >= (0, 0, 126, 0, 0, 0, 0, 0, 65536)[extended]
        return (start, size) if is_shortest and size <= self._limit else (0, 0)

    def _add(self, data: memoryview) -> int:
        assert self._payload is not None  # noqa: S101 - it has begun
        size = min(len(data), len(self._payload) - self._count)
        self._payload[self._count : self._count + size] = data[:size]
        self._count += size
        return size

    def _unmasked(self, payload: bytes | bytearray) -> bytes | bytearray:
        return apply_mask(payload, self._mask) if self._mask else payload


def frame_size(payload_size: int, *, masked: bool) -> int:
    """How many bytes a frame takes, its length written the shortest way."""
    extended = 0 if payload_size < 126 else 2 if payload_size < 65536 else 8
    return 2 + extended + (4 if masked else 0) + payload_size


def _head_of(size: int, *, masked: bool) -> bytes:
    """What comes before the mask, or before the payload of so many bytes where there is none."""
    bit = _MASKED if masked else 0
    if size < 126:
        return bytes((_BINARY_FINAL, bit | size))
    if size < 65536:
        return bytes((_BINARY_FINAL, bit | 126, size >> 8, size & 0xFF))
    return bytes((_BINARY_FINAL, bit | 127)) + size.to_bytes(8, "big")
