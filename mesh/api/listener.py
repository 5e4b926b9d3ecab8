"""Accepts connections that must speak TLS; whoever speaks plain HTTP is told so, and why.

A connection's first byte is looked at before it is taken: with TLS alone, a client that speaks HTTP
would see its connection end without a word. Who says nothing is cut off in time, and whoever comes
with most connections at once makes room for others. Knows nothing of what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import closing

from mesh.api.faults import error_body
from mesh.errors import TlsRequired

logger = logging.getLogger(__name__)

_HANDSHAKE = b"\x16"
"""RFC 8446, 5.1: what a TLS connection begins with."""

_AGAIN_S = 1.0
_DRAIN_S = 1.0
_DRAIN_BYTES = 1 << 20


class TlsListener:
    """Owns `listener` and what is being opened; connections that are open are their protocols'.

    To whoever closes it, it is an `asyncio.Server`.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: Callable[[], ssl.SSLContext],
        make_protocol: Callable[[], asyncio.Protocol],
        opening_limit_s: float,
        max_opening: int,
    ) -> None:
        """Each connection is opened with what `context` is by then. Of connections whose handshake
        is under way there are `max_opening` at most, for `opening_limit_s` each."""
        self._listener = listener
        self._context = context
        self._make_protocol = make_protocol
        self._limit_s = opening_limit_s
        self._max_opening = max_opening
        self._loop = asyncio.get_running_loop()
        self._opening: dict[asyncio.Task[None], str] = {}
        self._accepting = asyncio.create_task(self._accept_for_ever(), name="accept TLS")
        listener.setblocking(False)

    def close(self) -> None:
        """Take no more; see `wait_closed`."""
        for task in (self._accepting, *self._opening):
            task.cancel()

    async def wait_closed(self) -> None:
        """Until nothing is being opened any more and the port is free."""
        await asyncio.gather(self._accepting, *self._opening, return_exceptions=True)
        self._listener.close()

    async def _accept_for_ever(self) -> None:
        while True:
            try:
                theirs, (host, *_) = await self._loop.sock_accept(self._listener)
            except OSError as error:  # the process has no descriptors left, most likely
                logger.warning("no connection could be accepted: %s", error)
                await asyncio.sleep(_AGAIN_S)
                continue
            if len(self._opening) >= self._max_opening:
                self._make_room()
            task = asyncio.create_task(self._open(theirs), name=f"open TLS for {host}")
            self._opening[task] = host
            task.add_done_callback(lambda opened: self._opening.pop(opened, None))

    def _make_room(self) -> None:
        """Give up the oldest of the address that has most."""
        hosts = list(self._opening.values())
        most = max(hosts, key=hosts.count)
        oldest = next(task for task, host in self._opening.items() if host == most)
        del self._opening[oldest]
        oldest.cancel()

    async def _open(self, theirs: socket.socket) -> None:
        # It leaves, fails the handshake, or is too slow; nobody here has to hear of it.
        with contextlib.suppress(OSError, TimeoutError):
            if await self._speaks_tls(theirs):
                await self._loop.connect_accepted_socket(
                    self._make_protocol,
                    theirs,
                    ssl=self._context(),
                    ssl_handshake_timeout=self._limit_s,
                    ssl_shutdown_timeout=self._limit_s,
                )

    async def _speaks_tls(self, theirs: socket.socket) -> bool:
        """Whether it does; if not it has been told, and the socket is closed."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(closing(theirs))
            async with asyncio.timeout(self._limit_s):
                first = await self._peek(theirs)
                if first == _HANDSHAKE:
                    stack.pop_all()
                    return True
                if first:
                    await self._refuse(theirs)
        return False

    async def _peek(self, theirs: socket.socket) -> bytes:
        """The first byte, left where it is; none when there will be none."""
        readable = asyncio.Event()
        self._loop.add_reader(theirs, readable.set)
        try:
            await readable.wait()
            return theirs.recv(1, socket.MSG_PEEK)
        finally:
            self._loop.remove_reader(theirs)

    async def _refuse(self, theirs: socket.socket) -> None:
        body = json.dumps(error_body(_refusal())).encode()
        head = (
            f"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        await self._loop.sock_sendall(theirs, head.encode() + body)
        theirs.shutdown(socket.SHUT_WR)
        # Closed with something unread, the connection would be reset, and the answer lost.
        left = _DRAIN_BYTES
        async with asyncio.timeout(_DRAIN_S):
            while left > 0 and (read := await self._loop.sock_recv(theirs, 1 << 16)):
                left -= len(read)


def _refusal() -> TlsRequired:
    return TlsRequired(
        "This port speaks https:// only.",
        fix="Ask at https:// and trust the certificate that `hearthnet status` names there. A key"
        " that came with this request went over the network in the clear: make another.",
    )
