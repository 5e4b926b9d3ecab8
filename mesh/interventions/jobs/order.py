"""What a job's process is told besides the client's request, in front of it in one payload.

Shared by both sides of the jail's wall; knows nothing of what the request says.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgpack

from mesh.types import LayerRange

_LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class JobOrder:
    """How to run a request.

    Hop i of the job's channel runs the layers ``hops[i]``. `attention` is what layers compute
    attention with, empty for the model's own choice. `trusted` leaves the inner fence down.
    """

    hops: tuple[LayerRange, ...]
    compress: bool
    attention: str
    trusted: bool

    def pack(self, request: bytes) -> bytes:
        """The payload of the job."""
        hops = [[hop.start, hop.stop] for hop in self.hops]
        head: bytes = msgpack.packb([hops, self.compress, self.attention, self.trusted])
        return b"".join((_LENGTH.pack(len(head)), head, request))

    @classmethod
    def unpack(cls, payload: bytes) -> tuple[JobOrder, bytes]:
        """The order and the request as the client sent it."""
        (length,) = _LENGTH.unpack_from(payload)
        start = _LENGTH.size + length
        hops, compress, attention, trusted = msgpack.unpackb(payload[_LENGTH.size : start])
        spans = tuple(LayerRange(*hop) for hop in hops)
        return cls(spans, compress, attention, trusted), payload[start:]
