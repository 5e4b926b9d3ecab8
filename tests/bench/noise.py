"""Waits for an idle machine and tells how much others used of it during a sample.

A benchmark on a shared machine measures its neighbours unless each sample says what they did.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_TICKS = os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """CPU seconds that anything spent on this machine since it started."""
    fields = [int(text) for text in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS


def wait_for_idle(limit_s: float = 20.0, window_s: float = 0.4, share: float = 0.15) -> bool:
    """Until less than `share` of one core is used, at most `limit_s`; whether that came."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        begin, started = busy_seconds(), time.monotonic()
        time.sleep(window_s)
        if (busy_seconds() - begin) / (time.monotonic() - started) < share:
            return True
    return False


@dataclass
class Meter:
    """The share of one core that processes other than `own` used since it was made."""

    own: list[int]

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self._all = busy_seconds()
        self._ours = self._own_seconds()

    def foreign(self) -> float:
        """0 on a quiet machine, 1 when others had a whole core."""
        elapsed = max(1e-6, time.monotonic() - self._started)
        others = (busy_seconds() - self._all) - (self._own_seconds() - self._ours)
        return max(0.0, others / elapsed)

    def _own_seconds(self) -> float:
        total = 0.0
        for pid in [*self.own, os.getpid()]:
            try:
                times = psutil.Process(pid).cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total
