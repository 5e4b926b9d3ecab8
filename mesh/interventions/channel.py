"""The one way out of a job: a message to a hop and its answer, as bytes. Knows no message.

`SocketChannel` is the job's end of a socket pair; `mesh.interventions.relay` is the other. A frame
is ``u32 hop, u32 status, u64 length`` and the bytes. A message is one; an answer is any number with
status `MORE` and a last one, which with status `ERROR` is an error, as a msgpack map.
"""

from __future__ import annotations

import socket
import struct
from typing import Protocol

from mesh import codec
from mesh.errors import BadFrame, LinkLost, from_dict
from mesh.interventions.receiving import receive_exactly
from mesh.shard.taps.parts import MAX_MESSAGE_BYTES

HEAD = struct.Struct("!IIQ")
ANSWER, ERROR, MORE = 0, 1, 2
MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + (1 << 20)


class SpanChannel(Protocol):
    """Calls block: the process has nothing else to do meanwhile."""

    def call(self, hop: int, message: bytes) -> bytes | bytearray:
        """The answer of hop number `hop`. Raises MeshError when there is none."""


class SocketChannel:
    """The job's end of a connected stream socket; calls block."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def call(self, hop: int, message: bytes) -> bytearray:
        """The answer of hop number `hop`, all its parts joined. Raises MeshError when there is
        none."""
        try:
            self._socket.sendall(HEAD.pack(hop, ANSWER, len(message)))
            self._socket.sendall(message)
            answer, status = bytearray(), MORE
            while status == MORE:
                about, status, length = HEAD.unpack(receive_exactly(self._socket, HEAD.size))
                if about != hop or len(answer) + length > MAX_FRAME_BYTES:
                    raise BadFrame("The job's channel is out of step.", fix="This is a bug.")
                part = receive_exactly(self._socket, length)
                if answer and status != ERROR:
                    answer += part
                else:
                    answer = part
        except OSError as error:
            raise LinkLost(f"The job's channel broke: {error}.", fix="Run it again.") from error
        if status != ANSWER:
            raise from_dict(codec.unpack_map(answer))
        return answer
