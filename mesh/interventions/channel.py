"""The one way out of a job: a message to a hop and its answer, as bytes. Knows no message.

`SocketChannel` is the job's end of a socket pair; `mesh.interventions.relay` is the other. A frame
is ``u32 hop, u32 status, u64 length`` and the bytes. A message is one; an answer is any number with
status `MORE` and a last one, which with status `ERROR` is an error, as a msgpack map.
"""

from __future__ import annotations

import socket
import struct
from typing import Protocol

import msgpack

from mesh.errors import BadFrame, LinkLost, from_dict
from mesh.shard.taps.parts import MAX_MESSAGE_BYTES

HEAD = struct.Struct("!IIQ")
ANSWER, ERROR, MORE = 0, 1, 2
MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + (1 << 20)
_PIECE = 1 << 20


class SpanChannel(Protocol):
    """Calls block: the process has nothing else to do meanwhile."""

    def call(self, hop: int, message: bytes) -> bytes | bytearray:
        """The answer of hop number `hop`. Raises MeshError when there is none."""


class SocketChannel:
    """See `SpanChannel`, over a connected stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def call(self, hop: int, message: bytes) -> bytearray:
        """See `SpanChannel`."""
        try:
            self._socket.sendall(HEAD.pack(hop, ANSWER, len(message)))
            self._socket.sendall(message)
            answer, status = bytearray(), MORE
            while status == MORE:
                about, status, length = HEAD.unpack(self._receive(HEAD.size))
                if about != hop or len(answer) + length > MAX_FRAME_BYTES:
                    raise BadFrame("The job's channel is out of step.", fix="This is a bug.")
                part = self._receive(length)
                if answer and status != ERROR:
                    answer += part
                else:
                    answer = part
        except OSError as error:
            raise LinkLost(f"The job's channel broke: {error}.", fix="Run it again.") from error
        if status != ANSWER:
            raise from_dict(msgpack.unpackb(answer))
        return answer

    def _receive(self, length: int) -> bytearray:
        received = bytearray(length)
        data = memoryview(received)
        got = 0
        while got < length:
            count = self._socket.recv_into(data[got : got + _PIECE])
            if not count:
                raise ConnectionError("the other end closed it")
            got += count
        return received
