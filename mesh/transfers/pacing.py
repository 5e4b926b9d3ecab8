"""How fast bytes may flow: a bucket that fills at a rate, which whoever wants to send waits for.

And how little a process that moves weights may be in the way of one that computes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from contextlib import suppress
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

_BURST_S = 0.1
_IO_LEVEL = 7


class Pace:
    """At most `bytes_per_s`, in bursts of a tenth of a second; infinite: no limit."""

    def __init__(self, bytes_per_s: float = math.inf) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0

    async def take(self, count: int) -> None:
        """Return once so many bytes more may flow."""
        if math.isinf(self.bytes_per_s):
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now - _BURST_S) + count / self.bytes_per_s
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


def yield_to_others(nice: int) -> None:
    """Have this process, at this niceness, compute and read what others leave over; 0: as they do.

    Where every core computes for others, it gets 3 % of one at 15; at 19 half of that. Each process
    of a node is a session of its own, which Linux may schedule as a group: then it is the group's
    priority that counts.
    """
    if nice == 0:
        return
    with suppress(OSError):
        os.nice(nice)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice), encoding="ascii")
    if hasattr(psutil, "IOPRIO_CLASS_BE"):
        with suppress(OSError, psutil.Error):
            psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, _IO_LEVEL)
