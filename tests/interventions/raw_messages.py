"""Messages of the tap protocol as whoever speaks it by himself writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from mesh.shard.taps.codec import Buffers, pack


def raw_message(header: dict[str, Any], buffers: Sequence[bytes | memoryview] = ()) -> bytes:
    """Any header with any tensors."""
    tensors: Buffers = [memoryview(each) for each in buffers]
    return pack(msgpack.packb({**header, "sizes": list(map(len, tensors))}), tensors)
