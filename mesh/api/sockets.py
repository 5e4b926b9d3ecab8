"""One client's WebSocket: as uvicorn serves it, but nobody is served for nothing.

uvicorn keeps the connection of whoever opens a WebSocket with a request that is none, without a
word and for ever; and answers the pings of whoever does not read the answers, out of memory. Knows
nothing of what is said on it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from mesh.api.services import ApiSettings

MAX_BYTES = 4 << 10
"""Of a message, and of one read: clients send a few short texts, and now and then a ping. What can
come at once is parsed at once, some ten microseconds a frame, and 256 KiB are 40,000 frames."""


class BoundedSocket(WebSocketsSansIOProtocol):
    """Cuts who asks for none after all, says too much at once, or does not read."""

    def __init__(self, settings: ApiSettings, **given: Any) -> None:
        super().__init__(**given)
        self._unread_limit_s = settings.unread_timeout_s
        self._unread: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came: at first the whole head, or none ever comes."""
        if self.handshake_initiated and len(data) > MAX_BYTES:
            self.transport.abort()
            return
        super().data_received(data)
        if not self.handshake_initiated:
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def pause_writing(self) -> None:
        """The client reads nothing: nor is it listened to, until it does or is cut off."""
        super().pause_writing()
        self.transport.pause_reading()
        self._unread = self.loop.call_later(self._unread_limit_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again: stop that clock."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
        if not self.read_paused:
            self.transport.resume_reading()

    async def receive(self) -> Any:
        """The next event for the application."""
        event = await super().receive()
        if not self.writable.is_set():
            self.transport.pause_reading()  # which was resumed to make room for the next
        return event
