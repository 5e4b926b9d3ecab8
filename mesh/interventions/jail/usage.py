"""What a job's process has used so far, read from outside while it still exists."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds of processor time, and the most memory that was resident at once."""

    cpu_s: float
    peak_bytes: int


def usage_of(process_fd: int) -> Usage | None:
    """Of the process behind a pidfd; None where this system does not say. Reads small files of the
    kernel's, so it blocks for a moment."""
    with contextlib.suppress(OSError, ValueError):
        info = (_PROC / "self" / "fdinfo" / str(process_fd)).read_text("ascii")
        if (pid := re.search(r"^Pid:\s*([1-9]\d*)$", info, re.MULTILINE)) is not None:
            process = _PROC / pid[1]
            # A job has one thread: its limits let it begin no other.
            on_cpu_ns = int((process / "schedstat").read_text("ascii").split()[0])
            peak = re.search(r"^VmHWM:\s*(\d+) kB$", (process / "status").read_text(), re.MULTILINE)
            if peak is not None and on_cpu_ns > 0:
                return Usage(on_cpu_ns / 1e9, int(peak[1]) << 10)
    return None
