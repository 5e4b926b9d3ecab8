"""What a job's process is told besides the client's request, in front of it in one payload.

Shared by both sides of the jail's wall; knows nothing of what the request says.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgpack

from mesh import codec
from mesh.types import LayerRange

_LENGTH = struct.Struct(">I")


class JobOrder(NamedTuple):
    """How to run a request.

    `attention` is what layers compute attention with, empty for the model's own choice. `trusted`
    leaves the inner fence down.
    """

    compress: bool
    attention: str
    trusted: bool

    def pack(self, request: bytes) -> bytes:
        """The payload of the job."""
        head: bytes = msgpack.packb(self)
        return b"".join((_LENGTH.pack(len(head)), head, request))

    @classmethod
    def unpack(cls, payload: bytes) -> tuple[JobOrder, bytes]:
        """The order and the request as the client sent it. Raises Fault."""
        (length,) = _LENGTH.unpack_from(payload)
        start = _LENGTH.size + length
        return codec.convert(codec.unpack(payload[_LENGTH.size : start]), cls), payload[start:]


def pack_hops(hops: Sequence[LayerRange]) -> str:
    """The layers that the hops of a job's channel run, in order: what it may begin with."""
    return json.dumps([[hop.start, hop.stop] for hop in hops])


def unpack_hops(hint: str) -> tuple[LayerRange, ...]:
    """The reverse of `pack_hops`. Raises Fault."""
    hops = codec.convert(codec.parse_json(hint), list[tuple[int, int]])
    return tuple(LayerRange(*hop) for hop in hops)
