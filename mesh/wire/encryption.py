"""TLS between a TCP connection and the protocol above it, without a transport of asyncio's own.

asyncio's TLS transport goes through some ten Python calls and an exception for each message, most
of what a hop's message costs once the caches are cold; and a server that counts connections from
the TCP accept on has to put it in afterwards, which not every event loop does without losing what
has arrived by then. OpenSSL does the work here as there, over two memory buffers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl as tls
from typing import Any, cast

_BUFFER_BYTES = 64 * 1024
"""For what TCP has. A read that brings its own memory takes it for the most that could be there,
and for that the allocator asks the kernel, each time."""
_ALERT_GRACE_S = 1.0


class Encryption(asyncio.Transport, asyncio.BufferedProtocol):
    """The protocol of a TCP connection, and the transport of `inner`.

    `inner` hears `connection_made` once the handshake is done, which has to be within
    `handshake_s`, and `connection_lost` in any case. It can ask for the extra ``ssl_object``.
    """

    def __init__(
        self,
        inner: asyncio.Protocol,
        context: tls.SSLContext,
        *,
        handshake_s: float,
        server_side: bool,
    ) -> None:
        super().__init__()
        self._inner = inner
        self._received, self._to_send = tls.MemoryBIO(), tls.MemoryBIO()
        # No name: a peer is known by its key, not by where it answers.
        self._tls = context.wrap_bio(self._received, self._to_send, server_side)
        self._handshake_s = handshake_s
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._tcp = cast("asyncio.Transport", None)  # from `connection_made` on
        self._timer: asyncio.TimerHandle | None = None
        self._is_made = False
        self._is_closing = False
        self._error: Exception | None = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """TCP is there: begin the handshake."""
        self._tcp = cast("asyncio.Transport", transport)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._handshake_s, self._expire)
        self._shake_hands()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where what comes next is to be put."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Decrypt what came, and hand it on in one piece."""
        if self._is_closing:
            return
        self._received.write(self._buffer[:nbytes])
        if not self._is_made and not self._shake_hands():
            return
        if self.is_closing():  # `inner` wants nothing of it
            return
        plain, is_over, failure = self._decrypt()
        if self._to_send.pending:
            self._tcp.write(self._to_send.read())
        if plain:
            self._inner.data_received(plain)
        if failure is not None:
            self._fail(failure)
        elif is_over:
            self.close()

    def eof_received(self) -> None:
        """Without the peer's word it is an end all the same; TCP closes, see `connection_lost`."""

    def pause_writing(self) -> None:
        """Handed on: what is written is encrypted at once, so TCP's buffer is the only one."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Handed on."""
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end; `inner` hears of the first thing that went wrong."""
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        self._inner.connection_lost(self._error or exc)

    # What `inner` calls.

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Encrypt and send. An error ends the connection."""
        if self._is_closing:
            return
        try:
            written = self._tls.write(data)
            while written < len(data):
                written += self._tls.write(memoryview(data)[written:])
        except tls.SSLError as error:
            self._fail(error)
            return
        self._tcp.write(self._to_send.read())

    def close(self) -> None:
        """Send what is written and TLS's goodbye, then close TCP."""
        if self._is_closing:
            return
        self._is_closing = True
        with contextlib.suppress(tls.SSLError):
            self._tls.unwrap()  # does not wait for the peer's
        self._tcp.write(self._to_send.read())
        self._tcp.close()

    def abort(self) -> None:
        """Cut TCP."""
        self._is_closing = True
        self._tcp.abort()

    def is_closing(self) -> bool:
        """Whether it ends."""
        return self._is_closing or self._tcp.is_closing()

    def pause_reading(self) -> None:
        """Handed on: TCP is not read."""
        self._tcp.pause_reading()

    def resume_reading(self) -> None:
        """Handed on."""
        self._tcp.resume_reading()

    def get_write_buffer_size(self) -> int:
        """Encrypted bytes that TCP has not taken."""
        return self._tcp.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Of TCP's buffer."""
        self._tcp.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """``ssl_object``, or what TCP knows."""
        return self._tls if name == "ssl_object" else self._tcp.get_extra_info(name, default)

    # Between.

    def _shake_hands(self) -> bool:
        """One round of the handshake; whether it is done, and `inner` told."""
        try:
            self._tls.do_handshake()
        except tls.SSLWantReadError:
            self._tcp.write(self._to_send.read())
            return False
        except tls.SSLError as error:
            self._fail(error)
            return False
        if self._to_send.pending:
            self._tcp.write(self._to_send.read())
        self._is_made = True
        if self._timer is not None:
            self._timer.cancel()
        self._inner.connection_made(self)
        return True

    def _decrypt(self) -> tuple[bytes, bool, Exception | None]:
        """What can be read now; whether the peer has said that it is done; what is wrong."""
        pieces: list[bytes] = []
        try:
            # What is decrypted is shorter than what came; if there is more, the next read gets it.
            while piece := self._tls.read(self._received.pending or _BUFFER_BYTES):
                pieces.append(piece)
                if not self._received.pending and not self._tls.pending():
                    # As a rule: it spares the exception that another `read` would raise.
                    return b"".join(pieces), False, None
        except tls.SSLWantReadError:
            return b"".join(pieces), False, None  # a part of a record, or none for us
        except tls.SSLError as error:
            return b"".join(pieces), False, error
        return b"".join(pieces), True, None

    def _fail(self, error: Exception) -> None:
        """Let TLS's alert out, if there is one, and close."""
        self._error = self._error or error
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_ALERT_GRACE_S, self._tcp.abort)
        self._tcp.write(self._to_send.read())
        self._tcp.close()

    def _expire(self) -> None:
        self._error = TimeoutError(f"no TLS handshake in {self._handshake_s:g} s")
        self.abort()
