"""Opening links over TCP: `connect` and `serve`.

Half-open connections are counted from the TCP accept on, before any TLS handshake: a household
machine must not be talked to death by something that connects and stays silent. Knows nothing of
keys; who may connect is decided by the `ssl` context and by `accept`.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl as tls
from collections.abc import Callable
from typing import cast

from websockets.client import ClientProtocol
from websockets.server import ServerProtocol
from websockets.uri import WebSocketURI

from mesh.errors import ConnectFailed, LinkLost, PeerRefused, PortInUse
from mesh.wire.connection import PATH, WebSocketLink
from mesh.wire.limits import DEFAULT_LIMITS, Limits
from mesh.wire.link import LinkHandler
from mesh.wire.messages import Hello
from mesh.wire.protocol import TensorSession

_BACKLOG = 128
_ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - `LinkServer.answers_at` decides

_Place = tuple[str, asyncio.Transport]
"""A half-open connection: the address that it comes from, and its TCP side."""


async def connect(
    host: str,
    port: int,
    *,
    hello: Hello,
    handler: LinkHandler,
    limits: Limits = DEFAULT_LIMITS,
    ssl: tls.SSLContext | None = None,
    timeout_s: float = 5.0,
) -> WebSocketLink:
    """Open a link; returns once the server's hello is here.

    What the server sends right after its hello may reach `handler` before this returns. Raises
    ConnectFailed when nobody answers in time, VersionMismatch, or the error the server refused us
    with. `handler.closed` is not called for a link that never opened.
    """
    uri = WebSocketURI(ssl is not None, host.partition("%")[0], port, PATH, "")

    def new_link() -> WebSocketLink:
        websocket = ClientProtocol(uri, max_size=limits.message_bytes)
        return WebSocketLink(
            websocket, TensorSession(hello, limits), lambda _: handler, lambda _: None
        )

    link: WebSocketLink | None = None
    is_handed_over = False
    loop = asyncio.get_running_loop()
    where = f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout_s):
            _, link = await loop.create_connection(new_link, host, port, ssl=ssl)
            await link.opened
        is_handed_over = True
    except TimeoutError as exc:
        raise ConnectFailed(
            f"{where} did not answer in {timeout_s} s.", fix="Check that the peer is up."
        ) from exc
    except (OSError, LinkLost) as exc:
        raise ConnectFailed(
            f"No link to {where}: {exc}", fix="Check that the peer is up and knows this node."
        ) from exc
    finally:
        # Also when the caller is cancelled just as the link opens: it would belong to nobody.
        if link is not None and not is_handed_over and not link.is_gone:
            link.abort(ConnectFailed(f"Gave up on {where}.", fix="Connect again."))
    return link


async def serve(
    host: str | Callable[[str], bool] | None,
    port: int,
    *,
    accept: Callable[[WebSocketLink], LinkHandler],
    hello: Hello | Callable[[], Hello],
    limits: Limits = DEFAULT_LIMITS,
    ssl: tls.SSLContext | None = None,
    sock: socket.socket | None = None,
) -> LinkServer:
    """Listen for links on `host` and `port` (0: any free one), or on `sock` alone.

    Addresses that may change are given as a function: it listens on all that this machine has or
    will have, and cuts off whoever calls one for which the function is false.
    `accept` is called with each link whose client said hello; it returns the link's handler, or
    raises MeshError to refuse the client with that error. What it sends follows our hello. Clients
    beyond `Limits.links` and `Limits.links_per_peer` are refused with PeerRefused. Raises
    PortInUse.
    """
    server = LinkServer(accept, hello if callable(hello) else lambda: hello, limits, ssl)
    if callable(host):
        server.answers_at, host = host, _ANY_ADDRESS
    loop = asyncio.get_running_loop()
    try:
        if sock is None:
            listener = await loop.create_server(server.door, host, port, backlog=_BACKLOG)
        else:
            listener = await loop.create_server(server.door, sock=sock, backlog=_BACKLOG)
    except OSError as exc:
        if exc.errno != errno.EADDRINUSE:
            raise
        raise PortInUse(
            f"Something else listens on {host}:{port}.", fix="Stop it, or choose another port."
        ) from exc
    server.listen_on(listener)
    return server


class LinkServer:
    """A listening socket and its links. Made by `serve`."""

    def __init__(
        self,
        accept: Callable[[WebSocketLink], LinkHandler],
        hello: Callable[[], Hello],
        limits: Limits,
        ssl: tls.SSLContext | None,
    ) -> None:
        self._accept = accept
        self._hello = hello
        self._ssl = ssl
        self._listener: asyncio.Server | None = None
        self._half_open: dict[str, dict[asyncio.Transport, None]] = {}  # by host, oldest first
        self._knocking: dict[WebSocketLink, _Place] = {}  # links that are not open yet
        self._open: set[WebSocketLink] = set()
        self._doors: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self.limits = limits
        self.answers_at: Callable[[str], bool] = lambda address: True
        """Whether who calls this address of ours is let in."""
        self.port = 0
        """The port of the first listening socket."""

    @property
    def links(self) -> tuple[WebSocketLink, ...]:
        """The open links."""
        return tuple(self._open)

    @property
    def half_open(self) -> int:
        """Connections that did not say hello yet."""
        return sum(map(len, self._half_open.values()))

    async def close(self, timeout_s: float = 3.0) -> None:
        """Stop listening, say bye on every link, wait until all are gone; cut what remains."""
        if self._listener is not None:
            self._listener.close()
        for task in self._doors:
            task.cancel()
        remaining = [*self._open, *self._knocking]
        for link in remaining:
            link.close("The server stops.")
        try:
            async with asyncio.timeout(timeout_s):
                while self._open or self._knocking or self._doors:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            for link in remaining:
                link.abort(LinkLost("The server stopped.", fix="Connect again."))

    # For `serve` and `_Door`.

    def listen_on(self, listener: asyncio.Server) -> None:
        """Own the listener from now on."""
        self._listener = listener
        self.port = listener.sockets[0].getsockname()[1]

    def door(self) -> _Door:
        """The protocol of a new TCP connection."""
        return _Door(self)

    def enter(self, door: _Door, transport: asyncio.Transport) -> None:
        """Count a TCP connection as half-open and go on with it."""
        if not self.answers_at(transport.get_extra_info("sockname")[0]):
            transport.abort()
            return
        peer = transport.get_extra_info("peername")
        place = (str(peer[0]) if peer else "", transport)
        self._make_room(place[0])
        self._half_open.setdefault(place[0], {})[transport] = None
        if self._ssl is None:
            self._make_link(place, transport, door)
            return
        transport.pause_reading()
        task = asyncio.create_task(self._encrypt(place, door, self._ssl), name="link-tls-handshake")
        self._doors.add(task)
        task.add_done_callback(self._door_closed)

    def _make_room(self, host: str) -> None:
        """Cut the oldest half-open connection of whoever has the most, when there are too many.

        Whoever means it is through its handshake in milliseconds; those that fill the room are the
        ones that stay. So a flood cuts its own connections, not those of a peer that comes back.
        """
        crowd = host
        if len(self._half_open.get(host, ())) < self.limits.half_open_per_host:
            if self.half_open < self.limits.half_open:
                return
            crowd = max(self._half_open, key=lambda each: len(self._half_open[each]))
        oldest = next(iter(self._half_open[crowd]))
        self._leave((crowd, oldest))
        oldest.abort()

    async def _encrypt(self, place: _Place, door: _Door, ssl: tls.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        transport = place[1]
        secured: asyncio.Transport | None = None
        try:
            secured = await loop.start_tls(
                transport, door, ssl,
                server_side=True, ssl_handshake_timeout=self.limits.handshake_s,
            )  # fmt: skip
        except OSError:
            pass  # a stranger or a broken connection; the TLS layer has closed it
        finally:
            if secured is None:
                self._leave(place)
                transport.abort()
        if secured is not None:
            self._make_link(place, secured, door)

    def _make_link(self, place: _Place, transport: asyncio.Transport, door: _Door) -> None:
        websocket = ServerProtocol(max_size=self.limits.message_bytes)
        session = TensorSession(self._hello(), self.limits)
        link = WebSocketLink(websocket, session, self._greet, self._settled)
        self._knocking[link] = place
        transport.set_protocol(link)
        link.connection_made(transport)
        if door.early:
            link.data_received(bytes(door.early))

    def _greet(self, link: WebSocketLink) -> LinkHandler:
        """Each open link costs a descriptor: no peer may take them all, nor all peers together."""
        of_peer = sum(each.peer.node_id == link.peer.node_id for each in self._open)
        if of_peer >= self.limits.links_per_peer or len(self._open) >= self.limits.links:
            raise PeerRefused(
                f"{len(self._open)} links are open here, {of_peer} of them from you.",
                fix="Close those that are not used, or try again later.",
            )
        return self._accept(link)

    def _settled(self, link: WebSocketLink) -> None:
        """A link opened or is gone."""
        place = self._knocking.pop(link, None)
        if place is not None:
            self._leave(place)
        if link.is_gone:
            self._open.discard(link)
            self._idle.set()
        else:
            self._open.add(link)

    def _leave(self, place: _Place) -> None:
        host, transport = place
        half_open = self._half_open.get(host, {})
        half_open.pop(transport, None)
        if not half_open:
            self._half_open.pop(host, None)

    def _door_closed(self, task: asyncio.Task[None]) -> None:
        self._doors.discard(task)
        self._idle.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error  # a bug: let the loop's exception handler have it


class _Door(asyncio.Protocol):
    """A TCP connection until its link exists; keeps what comes with the end of the handshake."""

    def __init__(self, server: LinkServer) -> None:
        self._server = server
        self.early = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._server.enter(self, cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        self.early += data
