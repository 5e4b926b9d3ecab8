"""What the suite says of its own cost."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

from tests.cpu_cost import CpuCost, calibration_seconds, spent_by_all, summary

BUSY_S = 0.2
BUSY = f"""
import time
while time.process_time() < {BUSY_S}:
    pass
print("done", flush=True)
input()
"""
TICK_S = 0.02
"""What the kernel's tables may be late by."""


def test_what_processes_spent_is_counted_while_they_live_and_when_they_ended() -> None:
    before = spent_by_all()
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        living = spent_by_all()
        child.communicate(b"\n")
    assert living - before >= BUSY_S - TICK_S
    assert spent_by_all() >= living - TICK_S


def test_a_test_is_charged_what_was_spent_since_the_one_before() -> None:
    cost = CpuCost()
    cost.count("outside")
    calibration_seconds()
    cost.count("tests/a/test_b.py::test_c")
    cost.count("tests/a/test_b.py::test_d")
    dear, cheap = (
        cost.seconds["tests/a/test_b.py::test_c"],
        cost.seconds["tests/a/test_b.py::test_d"],
    )
    assert dear > cheap >= 0


def test_what_the_workers_counted_is_added_up() -> None:
    session = SimpleNamespace(config=SimpleNamespace(workeroutput={}))
    worker = CpuCost()
    worker.add({"tests/a/test_b.py::test_c": 2.0, "(imports and collection)": 1.0})
    worker.pytest_sessionfinish(session)  # type: ignore[arg-type]
    controller = CpuCost()
    for _ in range(2):
        controller.pytest_testnodedown(SimpleNamespace(workeroutput=session.config.workeroutput))
    controller.pytest_testnodedown(SimpleNamespace())  # it crashed
    assert controller.seconds == {"tests/a/test_b.py::test_c": 4.0, "(imports and collection)": 2.0}


def test_the_dearest_come_first_by_folder_and_by_test() -> None:
    seconds = {f"tests/a/test_x.py::test_{n}": float(n) for n in range(12)}
    seconds |= {"tests/b/c/test_y.py::test_y": 70.0, "(imports and collection)": 5.0}
    lines = list(summary(seconds, 0.25))
    assert lines[:4] == [
        "   141.0  all; the calibration loop takes 0.25 s on this machine",
        "    70.0  tests/b/c",
        "    66.0  tests/a",
        "     5.0  (imports and collection)",
    ]
    assert lines[4] == "the 10 dearest tests:"
    assert lines[5] == "    70.0  tests/b/c/test_y.py::test_y"
    assert [line.rpartition("_")[2] for line in lines[6:]] == [str(n) for n in range(11, 2, -1)]
