"""What the suite costs: CPU seconds per folder and of the ten dearest tests, printed at its end.

Seconds are user and system time of the test's process and of all processes it started, living and
ended. A fixture that several tests share counts where it was made, and a test that is over at once
counts with the next that is not: to look at all processes would cost as much as it did. Nothing
here ever fails a test; the calibration loop, a fixed amount of work, makes the numbers of two
machines comparable.
"""

from __future__ import annotations

import hashlib
import resource
import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from pathlib import PurePosixPath
from typing import Any

import psutil
import pytest

DEAREST = 10
_AT_ONCE_S = 0.02
_OUTPUT = "cpu_cost"
_OUTSIDE = "(imports and collection)"


def spent_by_all() -> float:
    """CPU seconds of this process, of its ended and of its living descendants, since their start.

    What is lost is only a descendant that outlived its own parent, as init inherits that one.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        try:
            spent += sum(child.cpu_times()[:4])
        except psutil.Error:
            continue
    return spent


def calibration_seconds() -> float:
    """CPU seconds that a fixed loop takes here: interpreted arithmetic, then hashing."""
    before = time.process_time()
    total = 0
    for number in range(1_500_000):
        total = (total * 31 + number) & 0xFFFF
    block = bytes(1 << 20)
    for _ in range(50):
        hashlib.sha256(block).digest()
    return time.process_time() - before


class CpuCost:
    """Seconds per test of this process, or, where xdist spreads the tests, of all workers."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._counted = 0.0

    def count(self, name: str) -> None:
        """Add what was spent since the last call to `name`."""
        now = spent_by_all()
        self.seconds[name] += max(0.0, now - self._counted)
        self._counted = now

    def add(self, seconds: dict[str, float]) -> None:
        """Take in what another process counted."""
        for name, spent in seconds.items():
            self.seconds[name] += spent

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if not self.seconds:
            self.count(_OUTSIDE)
        began_s = time.monotonic()
        try:
            return (yield)
        finally:
            if time.monotonic() - began_s > _AT_ONCE_S:
                self.count(item.nodeid)

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_OUTPUT] = dict(self.seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        # A worker that crashed has no output.
        self.add(getattr(node, "workeroutput", {}).get(_OUTPUT, {}))

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.seconds:
            terminalreporter.write_sep("-", "CPU seconds")
            for line in summary(self.seconds, calibration_seconds()):
                terminalreporter.write_line(line)


def summary(seconds: dict[str, float], calibration: float) -> Iterable[str]:
    """The lines that are printed: the total, every folder, the dearest tests."""
    folders: dict[str, float] = defaultdict(float)
    for name, spent in seconds.items():
        path = PurePosixPath(name.split("::")[0])
        folders[str(path.parent) if "::" in name else name] += spent
    total = sum(seconds.values())
    yield f"{total:8.1f}  all; the calibration loop takes {calibration:.2f} s on this machine"
    yield from _dearest_first(folders)
    yield f"the {DEAREST} dearest tests:"
    tests = {name: spent for name, spent in seconds.items() if "::" in name}
    yield from list(_dearest_first(tests))[:DEAREST]


def _dearest_first(seconds: dict[str, float]) -> Iterable[str]:
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True):
        yield f"{seconds[name]:8.1f}  {name}"


def pytest_configure(config: pytest.Config) -> None:
    """Count in every process that runs tests, and in the one that prints."""
    config.pluginmanager.register(CpuCost(), "cpu-cost")
