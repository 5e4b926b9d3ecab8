"""What the processor is called and can do, and how much of its time others take.

Reads what the kernel says. Imports nothing that computes, so that the daemon may ask, too.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Collection
from pathlib import Path

import psutil

_CPUINFO = Path("/proc/cpuinfo")
_BRAND = b"machdep.cpu.brand_string"


def cpu_model() -> str:
    """What the processor calls itself; empty where the platform does not say."""
    return _field("model name", "hardware") or _of_macos(_BRAND) or platform.processor()


def cpu_flags() -> frozenset[str]:
    """What it can do, in the kernel's words; none where the kernel does not say."""
    return frozenset(_field("flags", "features").split())


def allowed_cores() -> frozenset[int] | None:
    """Those that this process may run on; None where the platform does not say."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    return frozenset(os.sched_getaffinity(0))


def run_on(cores: Collection[int]) -> None:
    """Have all threads of this process, and those that they start, run on these cores alone. Raises
    OSError; only where `allowed_cores` says which there are."""
    if sys.platform == "linux":
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)


class OthersLoad:
    """Counts from when it is made what others take of all processors."""

    def __init__(self) -> None:
        self._begun = _busy_and_all()
        self._own_s = time.process_time()

    def share(self) -> float:
        """Of the time of all processors since then, what neither idled nor was this process', 0 to
        1; time that the machine below a virtual one took counts as others'."""
        busy, whole = (now - then for now, then in zip(_busy_and_all(), self._begun, strict=True))
        others = busy - (time.process_time() - self._own_s)
        return min(1.0, max(0.0, others / whole)) if whole > 0 else 0.0


def _busy_and_all() -> tuple[float, float]:
    """Seconds of all processors together since the machine started."""
    times = psutil.cpu_times()._asdict()
    # A guest's time is within that of who runs it.
    whole = sum(seconds for kind, seconds in times.items() if not kind.startswith("guest"))
    return whole - times["idle"] - times.get("iowait", 0.0), whole


def _field(*names: str) -> str:
    """The first such field of the first processor that has one."""
    try:
        with _CPUINFO.open(encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.lower().startswith(names):
                    return line.partition(":")[2].strip()
    except OSError:  # no such file elsewhere than on Linux
        pass
    return ""


def _of_macos(name: bytes) -> str:
    """What its kernel says under that name, sysctlbyname(3); nothing elsewhere."""
    if sys.platform == "darwin":
        text, size = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
        ask = ctypes.CDLL(None).sysctlbyname
        ask.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 3, ctypes.c_size_t]
        if ask(name, text, ctypes.byref(size), None, 0) == 0:
            return text.value.decode("ascii", "replace")
    return ""
