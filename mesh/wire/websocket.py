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
from dataclasses import dataclass, replace
from functools import partial
from typing import cast
from urllib.parse import urlsplit

from websockets.client import ClientProtocol
from websockets.server import ServerProtocol
from websockets.uri import WebSocketURI

from mesh.accounts import allowances
from mesh.accounts.ledger import Hold, Resource, ResourceLedger, of_peer
from mesh.clock import SystemClock
from mesh.errors import BadValue, ConnectFailed, LinkLost, PortInUse
from mesh.types import host_port
from mesh.wire.connection import PATH, WebSocketLink
from mesh.wire.encryption import Encryption
from mesh.wire.limits import DEFAULT_LIMITS, Limits
from mesh.wire.link import LinkHandler
from mesh.wire.messages import Hello
from mesh.wire.protocol import TensorSession
from mesh.wire.unreached import why_unreached

BACKLOG = 128
ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - `LinkServer.answers_at` decides

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
    websocket = ClientProtocol(uri, max_size=limits.message_bytes)
    session = TensorSession(hello, limits)
    counted = _Counted(limits.accounts)

    greet = partial(counted.greet, session, handler)
    link = WebSocketLink(websocket, session, greet, counted.settled)
    protocol: asyncio.BaseProtocol = link
    if ssl is not None:
        protocol = Encryption(link, ssl, handshake_s=timeout_s, server_side=False)
    transport: asyncio.Transport | None = None
    is_handed_over = False
    loop = asyncio.get_running_loop()
    where = host_port(host, port)
    try:
        async with asyncio.timeout(timeout_s):
            transport, _ = await loop.create_connection(lambda: protocol, host, port)
            await link.opened
        is_handed_over = True
    except TimeoutError as exc:
        raise ConnectFailed(
            f"{where} did not answer in {timeout_s} s.", fix="Check that the peer is up."
        ) from exc
    except (OSError, LinkLost, ValueError) as exc:  # ValueError: a name that no host can have
        raise ConnectFailed(
            f"No link to {where}: {why_unreached(exc)}.",
            fix="Check that the peer is up and knows this node.",
        ) from (exc.__cause__ or exc)
    finally:
        # Also when the caller is cancelled just as the link opens: it would belong to nobody.
        if transport is not None and not is_handed_over:
            link.abort(ConnectFailed(f"Gave up on {where}.", fix="Connect again."))
            transport.abort()
    return link


def place_of(endpoint: str) -> tuple[str, int]:
    """Host and port of ``wss://HOST:PORT``. Raises ConnectFailed for what is none."""
    try:
        address = urlsplit(endpoint)
        host, port = address.hostname, address.port
    except ValueError:  # brackets around what is no address, a port that none is
        host = port = None
    if host is None or port is None:
        raise ConnectFailed(f"{endpoint!r} is no endpoint.", fix="Expected wss://HOST:PORT.")
    return host, port


@dataclass(frozen=True, slots=True)
class Doorkeeper:
    """Who is let in. `identify` raises MeshError for a client that is not whom its hello says,
    before anything is put on the account of whom that names; `admit` is the `accept` of `serve`."""

    identify: Callable[[WebSocketLink], object]
    admit: Callable[[WebSocketLink], LinkHandler]


async def serve(
    host: str | Callable[[str], bool] | None,
    port: int,
    *,
    accept: Callable[[WebSocketLink], LinkHandler] | Doorkeeper,
    hello: Hello | Callable[[], Hello],
    limits: Limits = DEFAULT_LIMITS,
    ssl: tls.SSLContext | None = None,
    sock: socket.socket | None = None,
) -> LinkServer:
    """Listen for links on `host` and `port` (0: any free one), or on `sock` alone.

    Addresses that may change are given as a function: it listens on all that this machine has or
    will have, and cuts off whoever calls one for which the function is false.
    `accept` is called with each link whose client said hello; it returns the link's handler, or
    raises MeshError to refuse the client with that error. What it sends follows our hello. A client
    whose account has no room for another link is refused with Busy. Raises PortInUse, and
    BadValue for an address or a port that this process may not use.
    """
    if limits.accounts is None:
        limits = replace(limits, accounts=ResourceLedger(SystemClock(), allowances.LINKS))
    door = accept if isinstance(accept, Doorkeeper) else Doorkeeper(lambda _: None, accept)
    server = LinkServer(door, hello if callable(hello) else lambda: hello, limits, ssl)
    if callable(host):
        server.answers_at, host = host, ANY_ADDRESS
    loop = asyncio.get_running_loop()
    try:
        if sock is None:
            listener = await loop.create_server(server.door, host, port, backlog=BACKLOG)
        else:
            listener = await loop.create_server(server.door, sock=sock, backlog=BACKLOG)
    except OSError as exc:
        where = host_port(host or "*", port)
        if exc.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"Something else listens on {where}.",
                fix="Stop it, or choose another with --port (0 takes a free one).",
                param="port",
            ) from exc
        raise BadValue(
            f"Other nodes cannot be listened for on {where}: {exc.strerror}.",
            fix="Name an address of this machine and a port you may use.",
            param="port",
        ) from exc
    server.listen_on(listener)
    return server


class LinkServer:
    """A listening socket and its links. Made by `serve`."""

    def __init__(
        self,
        doorkeeper: Doorkeeper,
        hello: Callable[[], Hello],
        limits: Limits,
        ssl: tls.SSLContext | None,
    ) -> None:
        self._doorkeeper = doorkeeper
        self._hello = hello
        self._ssl = ssl
        self._listener: asyncio.Server | None = None
        self._half_open: dict[str, dict[asyncio.Transport, None]] = {}  # by host, oldest first
        self._knocking: dict[WebSocketLink, _Place] = {}  # links that are not open yet
        self._open: set[WebSocketLink] = set()
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
        remaining = [*self._open, *self._knocking]
        for link in remaining:
            link.close("The server stops.")
        for _, transport in list(self._knocking.values()):
            transport.abort()
        try:
            async with asyncio.timeout(timeout_s):
                while self._open or self._knocking:
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

    def enter(self, transport: asyncio.Transport) -> None:
        """Count a TCP connection as half-open and go on with it."""
        if not self.answers_at(transport.get_extra_info("sockname")[0]):
            transport.abort()
            return
        peer = transport.get_extra_info("peername")
        place = (str(peer[0]) if peer else "", transport)
        self._make_room(place[0])
        protocol = self._new_link(place)
        self._half_open.setdefault(place[0], {})[transport] = None
        transport.set_protocol(protocol)
        protocol.connection_made(transport)

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

    def _new_link(self, place: _Place) -> asyncio.BaseProtocol:
        websocket = ServerProtocol(max_size=self.limits.message_bytes)
        session = TensorSession(self._hello(), self.limits)
        counted = _Counted(self.limits.accounts)

        def settled(link: WebSocketLink) -> None:
            counted.settled(link)
            self._settled(link)

        link = WebSocketLink(websocket, session, partial(self._greet, session, counted), settled)
        protocol: asyncio.BaseProtocol = link
        if self._ssl is not None:
            handshake_s = self.limits.handshake_s
            protocol = Encryption(link, self._ssl, handshake_s=handshake_s, server_side=True)
        self._knocking[link] = place
        return protocol

    def _greet(self, session: TensorSession, counted: _Counted, link: WebSocketLink) -> LinkHandler:
        """Each open link costs a descriptor: no peer may take them all, nor all peers together."""
        self._doorkeeper.identify(link)
        counted.begin(session, link.peer, links=1)
        return self._doorkeeper.admit(link)

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


class _Counted:
    """What one link has on its peer's account, from the hellos until the connection is gone."""

    def __init__(self, accounts: ResourceLedger | None) -> None:
        self._accounts = accounts
        self._holds: list[Hold] = []

    def begin(self, session: TensorSession, peer: Hello, *, links: int = 0) -> None:
        """Count `links` and all that the session holds. Raises Busy."""
        if self._accounts is not None:
            principal = of_peer(peer.node_id)
            self._holds.append(self._accounts.hold(principal, Resource.LINKS, links))
            self._holds.append(self._accounts.hold(principal, Resource.BYTES_BUFFERED))
            session.count_on(self._holds[-1])

    def greet(
        self, session: TensorSession, handler: LinkHandler, link: WebSocketLink
    ) -> LinkHandler:
        """As a client: count what the session holds from now on."""
        self.begin(session, link.peer)
        return handler

    def settled(self, link: WebSocketLink) -> None:
        """The link opened or is gone."""
        if link.is_gone:
            for hold in self._holds:
                hold.close()


class _Door(asyncio.Protocol):
    """Who has just connected, until the server has made up its mind."""

    def __init__(self, server: LinkServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        try:
            self._server.enter(cast("asyncio.Transport", transport))
        except BaseException:
            cast("asyncio.Transport", transport).abort()
            raise
