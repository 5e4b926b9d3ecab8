"""Serving the application: one uvicorn server inside the daemon's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import math
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette

from mesh.api.auth import MAX_HEADER_BYTES
from mesh.api.connection import BoundedConnection
from mesh.api.listener import TlsListener
from mesh.api.services import ApiSettings
from mesh.api.sockets import MAX_BYTES, BoundedSocket
from mesh.api.tls import ApiTls
from mesh.clock import next_tick, set_by
from mesh.config import is_loopback
from mesh.errors import BadValue, PortInUse, no_such_address
from mesh.types import host_port

_GRACE_S = 5
_TELLING_S = 2.0
"""How long clients have to read that their answers end."""
_BACKLOG = 128
_DATE_S = 1.0
"""Answers carry the time in seconds."""


class _Server(uvicorn.Server):
    """Leaves signals to the daemon, says when it has started, and takes TLS in its own way."""

    def __init__(
        self,
        config: uvicorn.Config,
        listener: socket.socket,
        tls: ApiTls | None,
        settings: ApiSettings,
    ) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self._leaving = asyncio.Event()
        self._listener = listener
        self.tls = tls
        self._settings = settings

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """As uvicorn's, which looks ten times a second: here leaving is said by `leave`."""
        # It writes the Date header anew in turns of ten, of which this is always the first.
        while not await self.on_tick(0):
            await set_by(self._leaving, next_tick(_DATE_S))

    def leave(self) -> None:
        """End `serve`."""
        self.should_exit = True
        self._leaving.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([self._listener] if self.tls is None else [])
        if self.tls is not None:
            speaking_tls = TlsListener(
                self._listener,
                self._context,
                self._connection,
                self._settings.head_timeout_s,
                self._settings.max_opening,
            )
            self.servers.append(speaking_tls)  # type: ignore[arg-type]
        self.ready.set()

    def _context(self) -> ssl.SSLContext:
        assert self.tls is not None  # noqa: S101 - asked of what speaks TLS
        return self.tls.context

    def _connection(self) -> asyncio.Protocol:
        """As uvicorn makes one for its own listeners."""
        config: Any = self.config
        made: asyncio.Protocol = config.http_protocol_class(
            config=config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


class ApiServer:
    """A running server. `close` must be awaited."""

    def __init__(
        self, app: Starlette, server: _Server, task: asyncio.Task[None], host: str, port: int
    ) -> None:
        self._app = app
        self._server = server
        self._task = task
        self._host = host
        self.port = port

    def url(self, address: str = "") -> str:
        """Where it answers; where it does at all of this machine's addresses, at this one.

        Without an address that is the loopback one, which is always there.
        """
        host = ipaddress.ip_address(self._host)
        if host.is_unspecified:
            host = ipaddress.ip_address(address or ("::1" if host.version == 6 else "127.0.0.1"))
        scheme = "http" if self._server.tls is None else "https"
        return f"{scheme}://{host_port(str(host), self.port)}"

    @property
    def tls(self) -> ApiTls | None:
        """What it speaks TLS with, if it does."""
        return self._server.tls

    def renew(self, tls: ApiTls) -> None:
        """Speak TLS with this from the next connection on; those that are open stay."""
        self._server.tls = tls

    def reached(self, address: str) -> dict[str, Any]:
        """The fields of a `mesh.runtime.DaemonRecord` that say where it answers, and to whom."""
        fields: dict[str, Any] = {"api_url": self.url(), "api_port": self.port}
        if self.tls is not None:
            fields |= {"certificate": self.tls.certificate, "certificate_file": str(self.tls.file)}
        if not is_loopback(self._host):
            fields["public_url"] = self.url(address)
        return fields

    async def close(self, grace_s: float = _GRACE_S) -> None:
        """Stop listening; running answers get `grace_s` seconds, then their clients are told that
        they end."""
        state, limit_s = self._server.server_state, max(1.0, grace_s)
        # An answer that outlasts its grace is no error; what does not end when told to is one.
        self._server.config.timeout_graceful_shutdown = math.ceil(limit_s + 2 * _TELLING_S)
        self._app.state.closing.set()
        self._server.leave()
        await asyncio.wait({self._task}, timeout=limit_s)
        for answer in state.tasks:
            answer.cancel()
        await asyncio.wait({self._task}, timeout=_TELLING_S)
        for unread in state.connections:
            unread.transport.abort()
        await self._task
        await self._app.state.kept.close()


async def serve_api(app: Starlette, host: str, port: int, tls: ApiTls | None = None) -> ApiServer:
    """Listen on `host`, an IP address or ``localhost``, and on `port`, 0 for a free one.

    Raises PortInUse, and BadValue for an address that is not this machine's or that others reach
    while no key is set, or where keys would travel without `tls`.
    """
    if not is_loopback(host):
        _require_closed(app, host, tls)
    host = "127.0.0.1" if host == "localhost" else host
    listener = _listen(host, port)
    config = uvicorn.Config(
        app,
        # h11 because it limits headers, and so that every platform runs the same parser.
        http=partial(BoundedConnection, app.state.settings),  # type: ignore[arg-type]
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws=partial(BoundedSocket, app.state.settings),  # type: ignore[arg-type]
        ws_max_size=MAX_BYTES,
        ws_per_message_deflate=False,  # results go out, and those are compressed already
        ws_ping_timeout=None,  # clients answer pings only while they wait, and may be uploading
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # Also how many are accepted before the loop serves others.
        backlog=_BACKLOG,
        # As long as the next request may take to begin, twice what httpx keeps a connection: where
        # both give one up at the same time, a request that is just being sent is lost.
        timeout_keep_alive=math.ceil(app.state.settings.head_timeout_s),
    )
    server = _Server(config, listener, tls, app.state.settings)
    task = asyncio.create_task(server.serve(), name="api-server")
    api = ApiServer(app, server, task, host, listener.getsockname()[1])
    await server.ready.wait()
    return api


def _require_closed(app: Starlette, host: str, tls: ApiTls | None) -> None:
    if not app.state.access.has_keys:
        raise BadValue(
            f"The API would be open to everybody who reaches {host}.",
            fix="Set an API key, or bind to 127.0.0.1.",
            param="api_host",
        )
    if tls is None:
        raise BadValue(
            f"Keys would travel to {host} in the clear.", fix="Serve TLS.", param="api_host"
        )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only where the protocol is named; without that every
    # answer waits 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(socket.getaddrinfo(host, port, family)[0][4])  # with its interface
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"Port {port} on {host} is taken.",
                fix="Stop what uses it, or choose another with --api-port (0 takes a free one).",
                param="api_port",
            ) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise no_such_address(host, "api_host") from None
        raise BadValue(
            f"The API cannot listen on {host_port(host, port)}: {error.strerror}.",
            fix="Name an address of this machine and a port you may use.",
            param="api_host",
        ) from None
    return listener
