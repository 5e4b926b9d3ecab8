"""How a process of the node stands behind other programs of its machine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

_IO_LEVEL = 7


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
