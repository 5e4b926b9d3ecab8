"""The user at the other end of a connection from this machine: the owner of its socket.

Linux says so by `sock_diag`, the way of `ss`. Elsewhere, and for users whom this process has no
number for (those of another user namespace), a connection is all that is known of a caller.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
import struct
import sys
from collections.abc import Callable

from mesh.types import Principal

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_HEADER = struct.Struct("=IHHII")
"""length, type, flags, sequence, port"""
_QUESTION = struct.Struct("=BBBxI2s2s16s16sIII")
"""family, protocol, extensions, states; its own port, its peer's, both addresses, interface, and
the socket's cookie, not known"""
_ANSWER = struct.Struct("=BBxx48xIIIII")
"""family, state; timer, both queues, the user, the inode"""
_ANY_STATE = _ANY_COOKIE = 0xFFFFFFFF
_ESTABLISHED = 1

_NOBODY = 65534
"""What the kernel says for users that this namespace has no number for."""
_NONCE_BYTES = 16

Address = tuple[str, int]


def user_of(peer: Address, own: Address) -> int | None:
    """Whose the socket at `peer` is that is connected to `own`; None when it is not known.

    Asks the kernel, which answers at once. Sockets that their process has closed are told as
    root's: those do not count.
    """
    if sys.platform != "linux":
        return None
    family = socket.AF_INET6 if ":" in peer[0] else socket.AF_INET
    question = _QUESTION.pack(
        family, socket.IPPROTO_TCP, 0, _ANY_STATE, _port(peer), _port(own), _packed(peer),
        _packed(own), 0, _ANY_COOKIE, _ANY_COOKIE,
    )  # fmt: skip
    size = _HEADER.size + len(question)
    header = _HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
            kernel.setblocking(False)
            kernel.send(header + question)
            answer = kernel.recv(1024)
    except OSError:  # a kernel without it, or a sandbox around this process
        return None
    _, kind, *_ = _HEADER.unpack_from(answer)
    if kind != _SOCK_DIAG_BY_FAMILY or len(answer) < _HEADER.size + _ANSWER.size:
        return None  # there is no such socket
    _, state, _, _, _, uid, _ = _ANSWER.unpack_from(answer, _HEADER.size)
    return uid if state == _ESTABLISHED and uid != _NOBODY else None


class Neighbour:
    """The other end of one connection; asked for once, by the first request that has no key."""

    def __init__(
        self,
        transport: asyncio.BaseTransport,
        user_of: Callable[[Address, Address], int | None] = user_of,
    ) -> None:
        """`user_of` is who says whose a socket is."""
        self._transport = transport
        self._user_of = user_of
        self._known: Principal | None = None

    @property
    def principal(self) -> Principal:
        """The user, where the platform tells; else a name that this connection alone has."""
        if self._known is None:
            uid = self._uid()
            self._known = (
                Principal.connection(secrets.token_hex(_NONCE_BYTES))
                if uid is None
                else Principal.user(uid)
            )
        return self._known

    def _uid(self) -> int | None:
        own = self._transport.get_extra_info("sockname")
        peer = self._transport.get_extra_info("peername")
        if own is None or peer is None:
            return None
        uid = self._user_of(peer[:2], own[:2])
        # While our end was connected nobody else can have had its other end's address.
        return uid if self._is_connected() else None

    def _is_connected(self) -> bool:
        if self._transport.is_closing() or sys.platform != "linux":
            return False
        end = self._transport.get_extra_info("socket")
        state: int = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        return state == _ESTABLISHED


def _port(address: Address) -> bytes:
    return struct.pack("!H", address[1])


def _packed(address: Address) -> bytes:
    return ipaddress.ip_address(address[0].partition("%")[0]).packed.ljust(16, b"\0")
