"""How fast bytes may flow: buckets that fill at a rate, which whoever wants to send waits for.

And how little a process that moves weights may be in the way of one that computes. Niceness alone
does not do that: weights go through caches and memory that a decode step waits for, and a core that
is taken from it only for a moment makes a step wait all the same.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable

from mesh.clock import set_within

logger = logging.getLogger(__name__)

_BURST_S = 0.1
"""What may be saved up while nobody wants anything, as time at the rate."""
_LATE_S = 1.0
"""And while somebody waits, who is woken up so much too late on a busy machine: were it lost, what
flows there would stay far below its limit."""
_SHORTEST_S = 0.001
"""Shorter waits would only be rounding: a clock may not even tell them."""

SHARE = 0.02
"""Of what all cores of this machine can compute, for weights while somebody is answered here."""
FLOOR_BYTES_PER_S = 1e6
"""No machine is so slow, and no share so small, that a fetch would come to a stop."""
_COST_S = 3e-9
"""CPU seconds that a byte is taken to cost before that was measured: TLS, a hash and two copies."""
_DEAREST_S = 100e-9
_WEIGHED_BYTES = 64 << 20


class Bucket:
    """Fills at `rate` a second, to what is taken out at once or that of `_BURST_S`; while somebody
    waits for it, to that of `late_s`.

    Whoever takes waits in line. Use on one event loop.
    """

    def __init__(self, late_s: float = _LATE_S) -> None:
        self._late_s = late_s
        self._rate = math.inf
        self._level = 0.0
        self._level_at = 0.0
        self._line = asyncio.Lock()
        self._changed = asyncio.Event()

    def fill_at(self, rate: float) -> None:
        """At this rate from now on, also for those who wait; infinite: nobody waits."""
        self._rate = rate
        self._changed.set()

    async def take(self, amount: float) -> None:
        """Return once there is so much in it, taken out. Whoever is cancelled took nothing."""
        if math.isinf(self._rate):
            return
        loop = asyncio.get_running_loop()
        async with self._line:
            saved_s = _BURST_S
            while not math.isinf(self._rate):
                now, past_s = loop.time(), loop.time() - self._level_at
                # What was saved up before is had by whoever takes next, and not by who comes later.
                kept = self._level if past_s < _BURST_S else 0.0
                most = max(amount, kept, self._rate * saved_s)
                self._level = min(most, self._level + past_s * self._rate)
                self._level_at, saved_s = now, self._late_s
                if self._level >= amount:
                    self._level -= amount
                    return
                self._changed.clear()
                wait_s = (amount - self._level) / self._rate
                await set_within(self._changed, max(_SHORTEST_S, wait_s))


class CpuShare:
    """What of this machine's cores this process may use while it is to `make_way`.

    Bytes are counted as the CPU seconds that they cost, by what the process has used (`cpu_s`)
    since bytes were taken last; so slow machines move fewer bytes than fast ones.
    """

    def __init__(self, cores: int = 0, cpu_s: Callable[[], float] = time.process_time) -> None:
        self._rate = SHARE * (cores or os.cpu_count() or 1)
        self._bucket = Bucket(_BURST_S)  # bursts are in the way of whoever is answered
        self._cpu_s = cpu_s
        self._used_s = 0.0
        self._taken = 0
        self._byte_s = _COST_S
        self.is_making_way = False

    def make_way(self, is_on: bool) -> None:
        """Whether somebody is answered on this machine, and goes first."""
        if is_on != self.is_making_way:
            self.is_making_way = is_on
            self._used_s, self._taken = self._cpu_s(), 0
            self._bucket.fill_at(self._rate if is_on else math.inf)

    async def take(self, count: int) -> None:
        """Return once so many bytes more may flow; no later than `FLOOR_BYTES_PER_S` has it."""
        if self.is_making_way:
            self._weigh()
            await self._bucket.take(count * min(self._byte_s, self._rate / FLOOR_BYTES_PER_S))
            self._taken += count

    def _weigh(self) -> None:
        """What the bytes since the last time have cost."""
        used_s, taken = self._cpu_s(), self._taken
        if taken:
            cost_s = min(_DEAREST_S, (used_s - self._used_s) / taken)
            self._byte_s += min(1.0, taken / _WEIGHED_BYTES) * (cost_s - self._byte_s)
        self._used_s, self._taken = used_s, 0


class Pace:
    """No limit but what the `share` admits, until a `limit` is set."""

    def __init__(self, share: CpuShare | None = None) -> None:
        self._bytes = Bucket()
        self._share = share

    def limit(self, bytes_per_s: float) -> None:
        """At most so many from now on; infinite: no limit."""
        self._bytes.fill_at(bytes_per_s)

    async def take(self, count: int) -> None:
        """Return once so many bytes more may flow."""
        await self._bytes.take(count)
        if self._share is not None:
            await self._share.take(count)
