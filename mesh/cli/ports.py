"""Whether a node could listen, asked before anything is made that outlives a start that fails."""

from __future__ import annotations

import errno
import ipaddress
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

from mesh.errors import BadValue, PortInUse, no_such_address

if TYPE_CHECKING:
    from mesh.config import Config

_EVERYWHERE = "0.0.0.0"  # noqa: S104 - nothing is accepted


def require_free(config: Config) -> None:
    """Take both ports of a node for a moment, at the addresses where it will listen.

    Raises PortInUse, and BadValue for an address or a port that this process may not use. Whoever
    takes one in the moment until the node listens makes its start fail all the same.
    """
    with ExitStack() as taken:
        _take(taken, "port", _node_host(config), config.port)
        _take(taken, "api-port", _api_host(config), config.api_port)


def require_api_address(config: Config) -> None:
    """As `require_free`, while another daemon may have the ports."""
    with ExitStack() as taken:
        _take(taken, "api-host", _api_host(config), 0)


def _take(taken: ExitStack, flag: str, host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = taken.enter_context(socket.socket(family, socket.SOCK_STREAM))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the node's own
    try:
        listener.bind(socket.getaddrinfo(host, port, family)[0][4])  # with its interface
        listener.listen(1)
    except OSError as error:
        raise _refusal(error, flag, host, port) from None


def _api_host(config: Config) -> str:
    return "127.0.0.1" if config.api_host == "localhost" else config.api_host


def _node_host(config: Config) -> str:
    """One address where one was asked for, else all (`mesh.discovery.interfaces.Reach`)."""
    if len(config.interface) != 1:
        return _EVERYWHERE
    try:
        return str(ipaddress.ip_address(config.interface[0]))
    except ValueError:
        return _EVERYWHERE  # the name of an interface


def _refusal(error: OSError, flag: str, host: str, port: int) -> BadValue | PortInUse:
    from mesh.types import host_port

    param = flag.replace("-", "_")
    if error.errno == errno.EADDRINUSE:
        fix = f"Stop what uses it, or choose another with --{flag} (0 takes a free one)."
        return PortInUse(f"Port {port} on {host} is taken.", fix=fix, param=param)
    if error.errno == errno.EADDRNOTAVAIL:
        return no_such_address(host, param)
    return BadValue(
        f"Nothing can listen on {host_port(host, port)}: {error.strerror}.",
        fix="Name an address of this machine and a port you may use.",
        param=param,
    )
