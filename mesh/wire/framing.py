"""The one websocket frame that matters: binary, unfragmented, alone in its read.

websockets' Sans-I/O layer handles the upgrade and every frame; this is a shortcut past its parser
for the frame that makes up a decode step, because with cold caches a generator-based parser costs
as much as all of our own protocol. It says no to everything that is not plainly that frame.
"""

from __future__ import annotations

import secrets

try:
    from websockets.speedups import apply_mask
except ImportError:  # a build of websockets without its C extension
    from websockets.utils import apply_mask

_BINARY_FINAL = 0x82
_MASKED = 0x80


def wrap(payload: bytes, *, masked: bool) -> bytes:
    """One binary message as one websocket frame (RFC 6455, section 5.2)."""
    size = len(payload)
    bit = _MASKED if masked else 0
    if size < 126:
        head = bytes((_BINARY_FINAL, bit | size))
    elif size < 65536:
        head = bytes((_BINARY_FINAL, bit | 126, size >> 8, size & 0xFF))
    else:
        head = bytes((_BINARY_FINAL, bit | 127)) + size.to_bytes(8, "big")
    if not masked:
        return head + payload
    mask = secrets.token_bytes(4)
    return head + mask + apply_mask(payload, mask)


def unwrap(data: bytes, *, masked: bool) -> bytes | memoryview | None:
    """The payload when `data` is exactly one frame of 126 to 65535 bytes, else None."""
    start = 8 if masked else 4
    if (
        len(data) <= start
        or data[0] != _BINARY_FINAL
        or data[1] != (_MASKED | 126 if masked else 126)
        or len(data) - start != (data[2] << 8 | data[3])
    ):
        return None
    payload = memoryview(data)[start:]
    return apply_mask(payload, data[4:8]) if masked else payload


def frame_size(payload_size: int, *, masked: bool) -> int:
    """How many bytes a frame takes, its length written the shortest way."""
    extended = 0 if payload_size < 126 else 2 if payload_size < 65536 else 8
    return 2 + extended + (4 if masked else 0) + payload_size
