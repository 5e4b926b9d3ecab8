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
import threading
from collections.abc import Iterable
from typing import Any, cast

_READ_BYTES = 256 * 1024
_WRITE_BYTES = 256 * 1024
_ALERT_GRACE_S = 1.0


class _Buffers(threading.local):
    """What one read of TCP, and what comes of it, goes through; nothing stays there.

    An event loop reads, decrypts and hands on in one go, so all of a thread's connections share
    them: a fresh buffer of that size for each read costs more in page faults than the decryption.
    """

    def __init__(self) -> None:
        self.cipher = memoryview(bytearray(_READ_BYTES))
        self.plain = memoryview(bytearray(_READ_BYTES))


_buffers = _Buffers()


class PlainProtocol(asyncio.Protocol):
    """A protocol above TCP or `Encryption`."""

    def data_received(self, data: bytes | memoryview) -> None:
        """These came; a view holds them until this returns."""


class Encryption(asyncio.Transport, asyncio.BufferedProtocol):
    """The protocol of a TCP connection, and the transport of `inner`.

    `inner` hears `connection_made` once the handshake is done, which has to be within
    `handshake_s`, and `connection_lost` in any case. It can ask for the extra ``ssl_object``.
    """

    def __init__(
        self,
        inner: PlainProtocol,
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
        self._tcp = cast("asyncio.Transport", None)  # from `connection_made` on
        self._timer: asyncio.TimerHandle | None = None
        self._is_made = False
        self._is_closing = False
        self._is_over = False  # the peer has said that it is done
        self._failure: Exception | None = None  # of decrypting; what came before is handed on first
        self._error: Exception | None = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """TCP is there: begin the handshake."""
        self._tcp = cast("asyncio.Transport", transport)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._handshake_s, self._expire)
        self._shake_hands()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where TCP's bytes go."""
        return _buffers.cipher

    def buffer_updated(self, nbytes: int) -> None:
        """So many came."""
        self.data_received(_buffers.cipher[:nbytes])

    def data_received(self, data: bytes | memoryview) -> None:
        """Decrypt what came, and hand it on in as few pieces as may be."""
        if self._is_closing:
            return
        self._received.write(data)
        if not self._is_made and not self._shake_hands():
            return
        if self.is_closing():  # `inner` wants nothing of it
            return
        is_more = True
        while is_more and not self.is_closing():
            plain, is_more = self._decrypt()
            if self._to_send.pending:
                self._tcp.write(self._to_send.read())
            if plain:
                self._inner.data_received(plain)
        if self._failure is not None:
            self._fail(self._failure)
        elif self._is_over:
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
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        """The same for several in a row, which need not be copied into one before."""
        if self._is_closing:
            return
        try:
            for data in list_of_data:
                self._encrypt(data)
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

    def _encrypt(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Into `_to_send`; of much, all but the end goes out at once, from warm caches."""
        size = len(data)
        if size <= _WRITE_BYTES:
            written = self._tls.write(data)
            while written < size:
                written += self._tls.write(memoryview(data)[written:])
            return
        view, written = memoryview(data), 0
        while written < size:
            written += self._tls.write(view[written : written + _WRITE_BYTES])
            if self._to_send.pending >= _WRITE_BYTES:
                self._tcp.write(self._to_send.read())

    def _decrypt(self) -> tuple[memoryview, bool]:
        """What can be read now, up to a buffer full, and whether there is more."""
        # OpenSSL gives one record at a time, 16 KiB at most.
        room, count = _buffers.plain, 0
        try:
            while count < _READ_BYTES:
                size = cast("int", self._tls.read(_READ_BYTES - count, room[count:]))
                if size == 0:
                    self._is_over = True
                    return room[:count], False
                count += size
                if not self._received.pending and not self._tls.pending():
                    # As a rule: it spares the exception that another `read` would raise.
                    return room[:count], False
        except tls.SSLWantReadError:  # a part of a record, or none for us
            return room[:count], False
        except tls.SSLError as error:
            self._failure = error
            return room[:count], False
        return room, True

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
