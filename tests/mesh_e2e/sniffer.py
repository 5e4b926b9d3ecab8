"""Everything that crosses the loopback interface, as TCP streams. Needs root."""

from __future__ import annotations

import socket
import struct
import threading
from collections import defaultdict
from types import TracebackType
from typing import Self

_ETH_IP = 0x0800
_TCP = 6
_MAX_PACKET = 1 << 17
_TLS_TYPES = frozenset({20, 21, 22, 23})

Flow = tuple[int, int]
"""Source port, destination port."""


def may_sniff() -> bool:
    """Whether this process may open a packet socket."""
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()
    except (OSError, AttributeError):
        return False
    return True


class Sniffer:
    """Records TCP payloads on ``lo`` while the block runs."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_IP))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        self._socket.bind(("lo", _ETH_IP))
        self._socket.settimeout(0.1)
        self._packets: list[bytes] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="sniffer")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
        self._socket.close()

    def streams(self) -> dict[Flow, bytes]:
        """The bytes of each direction of each connection, in order."""
        parts: dict[Flow, dict[int, bytes]] = defaultdict(dict)
        for packet in self._packets:
            header = 14 + (packet[14] & 15) * 4
            if packet[23] != _TCP:
                continue
            source, target, sequence = struct.unpack_from("!HHI", packet, header)
            (length,) = struct.unpack_from("!H", packet, 16)
            payload = packet[header + (packet[header + 12] >> 4) * 4 : 14 + length]
            if payload:
                parts[source, target].setdefault(sequence, payload)
        return {flow: _joined(pieces) for flow, pieces in parts.items()}

    def _listen(self) -> None:
        while not self._done.is_set():
            try:
                self._packets.append(self._socket.recv(_MAX_PACKET))
            except TimeoutError:
                continue


def _joined(pieces: dict[int, bytes]) -> bytes:
    """Pieces by sequence number (which may wrap), without what was sent twice."""
    first = next(iter(pieces))
    out = bytearray()
    for sequence, piece in sorted(pieces.items(), key=lambda p: (p[0] - first) % (1 << 32)):
        offset = (sequence - first) % (1 << 32)
        if offset >= 1 << 31:
            continue
        out[offset : offset + len(piece)] = piece
    return bytes(out)


def is_tls(stream: bytes) -> bool:
    """Whether all of it, to the last byte that came, is TLS records and nothing else."""
    at = 0
    while at < len(stream):
        header = stream[at : at + 5]
        if len(header) < 5:
            return header[0] in _TLS_TYPES
        if header[0] not in _TLS_TYPES or header[1] != 3:
            return False
        at += 5 + int.from_bytes(header[3:5], "big")
    return True
