"""One round of multicast DNS on one interface: is what is sent heard, and does anybody answer?

What a machine sends to the group comes back to its own members of it through the way in, so that a
packet filter which drops what others send drops this as well. Sends two questions that any
responder knows, and believes nothing of what comes.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

GROUP, PORT = "224.0.0.251", 5353
_AGAIN_S = 0.5
"""A packet may be lost on Wi-Fi; the question is asked twice."""
_ANY_MEMBERSHIP = 49
"""IP_MULTICAST_ALL of linux/in.h: unless it is off, a socket hears what any other has joined."""
_PTR, _IN = 12, 1
_MAX_HEARD = 256


@dataclass(slots=True)
class Echo:
    """How a round went: why nothing could be sent, empty where it was; whether it was `heard` here;
    the addresses of other machines that said anything meanwhile."""

    error: str = ""
    heard: bool = False
    others: set[str] = field(default_factory=set)


async def echo(address: str, own: frozenset[str], seconds: float) -> Echo:
    """A round on the interface that has this address, which takes so many seconds; `own` are all
    addresses of this machine."""
    found = Echo()
    question = _question(f"{secrets.token_hex(8)}._hearthnet._tcp.local")
    try:
        sock = _open(address)
    except OSError as error:
        found.error = error.strerror or str(error)
        return found
    listener = _Listener(found, question, own)
    transport: asyncio.DatagramTransport | None = None
    try:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: listener, sock=sock)
        for pause_s in (min(_AGAIN_S, seconds / 2), max(seconds - _AGAIN_S, seconds / 2)):
            sock.sendto(question, (GROUP, PORT))
            await asyncio.sleep(pause_s)
    except OSError as error:
        found.error = error.strerror or str(error)
    finally:
        if transport is not None:
            transport.close()
        else:
            sock.close()
    return found


class _Listener(asyncio.DatagramProtocol):
    def __init__(self, found: Echo, question: bytes, own: frozenset[str]) -> None:
        self._found = found
        self._question = question
        self._own = own

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        if data == self._question:
            self._found.heard = True
        elif addr[0] not in self._own and len(self._found.others) < _MAX_HEARD:
            self._found.others.add(str(addr[0]))


def _open(address: str) -> socket.socket:
    """A socket that is in the group on this interface alone. Raises OSError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if hasattr(socket, "SO_BINDTODEVICE"):  # Linux
            sock.setsockopt(socket.IPPROTO_IP, _ANY_MEMBERSHIP, 0)
        sock.bind(("", PORT))
        interface = socket.inet_aton(address)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, interface)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
        member = socket.inet_aton(GROUP) + interface
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _question(nonce: str) -> bytes:
    """RFC 6762: which services there are at all, and one whose name nobody else asks for."""
    names = (nonce, "_services._dns-sd._udp.local")
    return struct.pack("!6H", 0, 0, len(names), 0, 0, 0) + b"".join(map(_asked, names))


def _asked(name: str) -> bytes:
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return labels + b"\0" + struct.pack("!2H", _PTR, _IN)
