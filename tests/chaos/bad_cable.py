"""A cable that loses and delays packets: two TUN devices and a thread that carries between them.

Does what netem does, for kernels that are built without it.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from tests.chaos.namespaces import Namespace, ip

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 1500


def why_not() -> str:
    """Why there can be no such cable here; empty when there can."""
    try:
        os.close(_tun("hnchaos-probe"))
    except OSError as error:
        return f"no TUN device here: {error}"
    return ""


class _Carrier(Thread):
    """Takes packets from either end to the other, `delay_s` later, and forgets some on the way."""

    def __init__(self, ends: tuple[int, int], loss: float, delay_s: float, seed: int) -> None:
        super().__init__(name="bad cable", daemon=True)
        self.carried = self.lost = 0
        self._ends = ends
        self._loss = loss
        self._delay_s = delay_s
        self._random = random.Random(seed)
        self._done = Event()

    def run(self) -> None:
        far = dict(zip(self._ends, reversed(self._ends), strict=True))
        under_way: list[tuple[float, int, int, bytes]] = []
        while not self._done.is_set():
            wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 0.05
            for end in select.select(self._ends, (), (), wait_s)[0]:
                packet = os.read(end, _MTU + 64)
                if self._random.random() < self._loss:
                    self.lost += 1
                    continue
                self.carried += 1
                due = time.monotonic() + self._delay_s
                heapq.heappush(under_way, (due, self.carried, far[end], packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, end, packet = heapq.heappop(under_way)
                os.write(end, packet)

    def stop(self) -> None:
        """Let nothing through any more; waits for the thread."""
        self._done.set()
        self.join(5)


@contextmanager
def lossy(
    space: Namespace, *, loss: float, delay_s: float = 0.0, seed: int = 1
) -> Iterator[_Carrier]:
    """Meanwhile all packets to and from `space` go this way; connections open before go on."""
    here, there = (f"{space.name}{side}"[-15:] for side in "xy")
    ends = (_tun(here), _tun(there))
    carrier = _Carrier(ends, loss, delay_s, seed)
    try:
        ip("link", "set", there, "netns", space.name)
        ip("link", "set", here, "up", "mtu", str(_MTU))
        ip("-n", space.name, "link", "set", there, "up", "mtu", str(_MTU))
        carrier.start()
        # More specific than the route of the good cable.
        ip("route", "replace", f"{space.there}/32", "dev", here, "src", space.here)
        ip("-n", space.name, "route", "replace", f"{space.here}/32", "dev", there,
           "src", space.there)  # fmt: skip
        yield carrier
    finally:
        if carrier.is_alive():
            carrier.stop()
        for end in ends:
            os.close(end)  # the devices go with them, and their routes


def _tun(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR)
    try:
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(end)
        raise
    return end
