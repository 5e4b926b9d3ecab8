"""Reading so many bytes from a blocking socket. Used on both sides of the jail's wall."""

from __future__ import annotations

import socket

_PIECE = 1 << 20


def receive_exactly(sock: socket.socket, length: int) -> bytearray:
    """The next `length` bytes. Raises ConnectionError when the other end closes it before."""
    received = bytearray(length)
    left = memoryview(received)
    while left:
        count = sock.recv_into(left[:_PIECE])
        if not count:
            raise ConnectionError("the other end closed it")
        left = left[count:]
    return received
