"""Who is at the other end of a connection from this machine: the user whose socket it is.

Linux says in ``/proc/net`` whose each socket is. Elsewhere, and for users whom this process has no
number for (those of another user namespace), a connection is all that is known of a caller.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
import struct
import sys
from pathlib import Path

from mesh.types import Principal

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = 1
_NOBODY = 65534
"""What the kernel says for users that this namespace has no number for."""
_NONCE_BYTES = 16

Address = tuple[str, int]


class Neighbour:
    """The other end of one connection; asked for once, by the first request that has no key."""

    def __init__(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._known: Principal | None = None

    async def principal(self) -> Principal:
        """The user, where the platform tells; else a name that this connection alone has."""
        if self._known is None:
            uid = await self._uid()
            if self._known is None:  # nobody was quicker
                self._known = (
                    Principal.connection(secrets.token_hex(_NONCE_BYTES))
                    if uid is None
                    else Principal.user(uid)
                )
        return self._known

    async def _uid(self) -> int | None:
        own = self._transport.get_extra_info("sockname")
        peer = self._transport.get_extra_info("peername")
        if own is None or peer is None:
            return None
        uid = await asyncio.to_thread(user_of, peer[:2], own[:2])
        # While our end was connected nobody else can have had its other end's address.
        return uid if self._is_connected() else None

    def _is_connected(self) -> bool:
        if self._transport.is_closing() or sys.platform != "linux":
            return False
        end = self._transport.get_extra_info("socket")
        state: int = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        return state == _ESTABLISHED


def user_of(peer: Address, own: Address) -> int | None:
    """Whose the socket at `peer` is that is connected to `own`; None when it is not known. Blocks.

    Sockets that their process has closed are listed as root's: those do not count.
    """
    ends = zip(_forms(peer), _forms(own), strict=True)
    wanted = {(_hexadecimal(theirs), _hexadecimal(ours)) for theirs, ours in ends}
    for table in _TABLES:
        try:
            rows = table.read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            _, local, remote, state, _, _, _, uid, *_ = row.split()
            if (local, remote) in wanted and int(state, 16) == _ESTABLISHED:
                return None if int(uid) == _NOBODY else int(uid)
    return None


def _forms(address: Address) -> list[Address]:
    """As sockets of the address's own family have it and, for IPv4, as those of IPv6 do."""
    host, port = address
    return [address] if ":" in host else [address, (f"::ffff:{host}", port)]


def _hexadecimal(address: Address) -> str:
    """As the kernel prints it: 32 bits at a time, in the machine's order."""
    host, port = address
    packed = ipaddress.ip_address(host.partition("%")[0]).packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
