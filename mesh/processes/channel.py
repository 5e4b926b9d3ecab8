"""The private channel between the daemon and a process of its own: messages over a socket pair.

Each stands behind a four-byte length. What arrives is handed on unread (`exchange` reads it).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Callable
from typing import cast

from mesh.clock import next_tick
from mesh.errors import InternalError, LinkLost
from mesh.processes.messages import Alive, ProcessMessage, encode

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct(">I")
MAX_MESSAGE_BYTES = 64 << 20
MAX_UNREAD_BYTES = 64 << 20

BEAT_S = 1.0
"""How often a process says that its loop turns."""


class Channel(asyncio.Protocol):
    """One end of the pair: `on_message` gets each body in order, `on_closed` the end, once."""

    def __init__(self, on_message: Callable[[bytes], None], on_closed: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._beating: asyncio.TimerHandle | None = None
        self._waiting: list[bytes] = []
        self._flushing: asyncio.Handle | None = None

    @classmethod
    async def open(
        cls,
        end: socket.socket,
        on_message: Callable[[bytes], None],
        on_closed: Callable[[], None],
    ) -> Channel:
        """Serve `end`, which the channel owns from now on."""
        loop = asyncio.get_running_loop()
        end.setblocking(False)
        _, channel = await loop.create_connection(lambda: cls(on_message, on_closed), sock=end)
        return channel

    def send(self, message: ProcessMessage, *, soon: bool = False) -> None:
        """Queue one message, `soon`: in the next turn of the loop, in one write with those that
        come until then. Order is kept. Raises LinkLost when the other side is gone.

        One that has `MAX_UNREAD_BYTES` before it and reads none of them is cut off, and counts as
        gone.
        """
        if self._transport is None or self._transport.is_closing():
            raise LinkLost(
                "the process on the other end is gone.", fix="It is restarted; try again."
            )
        body = encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise InternalError(f"a message of {len(body)} bytes exceeds the channel.", fix="")
        if self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self._transport.abort()
            raise LinkLost(
                "the process on the other end reads nothing.", fix="It is restarted; try again."
            )
        self._waiting += (_LENGTH.pack(len(body)), body)
        if not soon:
            self._flush()
        elif self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_soon(self._flush)

    def beat(self) -> None:
        """Say every `BEAT_S` from now on that this side's loop turns, until the channel's end."""
        with contextlib.suppress(LinkLost):
            self.send(Alive())
            self._beating = asyncio.get_running_loop().call_at(next_tick(BEAT_S), self.beat)

    def close(self) -> None:
        """Close this end, behind what was sent; the other side reads end-of-file."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Split the stream into bodies."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if length > MAX_MESSAGE_BYTES:
                logger.error("channel message of %d bytes refused", length)
                self.close()
                return
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            self._on_message(body)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end once."""
        self._transport = None
        for handle in (self._beating, self._flushing):
            if handle is not None:
                handle.cancel()
        self._on_closed()

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self._waiting and self._transport is not None:
            self._transport.write(b"".join(self._waiting))
        self._waiting.clear()
