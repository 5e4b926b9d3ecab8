"""The doctor tries to change weights, and sees when it can."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mesh.health import weight_doctor
from mesh.health.weight_doctor import ABSENT, MEMORY, NETS, examine

posix = pytest.mark.skipif(sys.platform == "win32", reason="no read-only memory there")

UNSAFE = """
from mesh.shard import protection
from mesh.shard.taps import guard
protection.set_writable = lambda *_args, writable: False
guard.OperationGuard._require_writable = lambda *_: None
"""


@posix
def test_all_ways_to_change_a_weight_are_stopped() -> None:
    command = [sys.executable, "-m", "mesh.cli.main", "doctor", "weights", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert report["broken"] == {}
    assert {*report["held"], *report["absent"]} == {*MEMORY, *NETS}
    assert {"stored", "converted", "operation", "unnoticed"} <= set(report["held"])


@posix
def test_what_gets_through_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes in which nothing is protected."""
    monkeypatch.setattr(weight_doctor, "_CANARIES", _unsafe(tmp_path))
    report = examine()
    assert {"stored", "converted", "operation"} <= set(report.broken)
    assert "it was changed" in report.broken["stored"]
    assert report.to_text().startswith("weights: not safe\n  OPEN  weights as they are stored")


def _unsafe(directory: Path) -> list[str]:
    script = directory / "unsafe.py"
    script.write_text(
        UNSAFE + "import runpy, sys\nrunpy.run_module('mesh.shard.canaries', run_name='__main__')\n"
    )
    return [sys.executable, str(script)]


def test_a_canary_that_does_not_run_counts_as_one_that_got_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_doctor, "_CANARIES", [sys.executable, "-c", "print('hello')"])
    assert set(examine().broken) == {*MEMORY, *NETS}
    monkeypatch.setattr(
        weight_doctor, "_CANARIES", [sys.executable, "-c", f"print('{ABSENT} it is warm')"]
    )
    report = examine()
    assert not report.broken
    assert "it is warm" in report.to_text()


def test_where_memory_cannot_be_protected_the_doctor_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(
        weight_doctor, "_CANARIES", [sys.executable, "-c", "print('STARTED REFUSED')"]
    )
    report = examine()
    assert set(report.absent) == set(MEMORY)
    assert set(report.held) == set(NETS)
    assert "cannot make such memory read-only" in report.to_text()
