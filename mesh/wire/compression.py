"""Bounded zstd. Knows nothing of frames.

Tensors are never compressed on send: fp16 hidden states of a trained model (the built-in one, 512
rows, levels 1 and 3) keep 0.92 of their size for a millisecond or two per megabyte, which pays on
no LAN. Control bodies are text, and shrink. On receive both are understood.
"""

from __future__ import annotations

import zstandard

from mesh.codec import Buffer
from mesh.errors import SAME_VERSION, BadFrame, FrameTooLarge

COMPRESS_ABOVE_BYTES = 64 * 1024
WORTHWHILE_RATIO = 0.9
_LEVEL = 3
_MAX_WINDOW_BYTES = 2 * 1024 * 1024  # what a one-shot compression of one chunk can need


def compress_if_it_pays(data: Buffer) -> bytes | None:
    """The compressed form, or None when `data` is small or hardly shrinks."""
    if len(data) <= COMPRESS_ABOVE_BYTES:
        return None
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(data)
    return packed if len(packed) < WORTHWHILE_RATIO * len(data) else None


def decompress(data: Buffer, max_bytes: int) -> bytes:
    """Undo zstd, holding at most `max_bytes` of output and a window of 2 MiB.

    Raises FrameTooLarge when there is more, BadFrame when it is not zstd.
    """
    # ZstdDecompressor.decompress(max_output_size=...) is ignored when the zstd header states a
    # content size, so only the stream reader gives a bound that the sender cannot lift.
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    try:
        with decompressor.stream_reader(data, read_across_frames=True) as reader:
            raw = reader.read(max_bytes + 1)
    except zstandard.ZstdError as exc:
        raise BadFrame(
            f"A compressed payload cannot be read: {exc}.",
            fix=SAME_VERSION,
        ) from exc
    if len(raw) > max_bytes:
        raise FrameTooLarge(
            f"A compressed payload unpacks to more than {max_bytes} bytes.",
            fix="Use the same limits on both machines.",
        )
    return bytes(raw)
