"""The doctor tries to change weights, and sees when it can."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mesh.health.weight_doctor import ABSENT, MEMORY, NETS, examine

GET_THROUGH = {"stored", "converted", "operation"}
UNSAFE = """
from mesh.processes.lean import import_modelling
import_modelling()
from mesh.shard import protection
from mesh.shard.taps import guard
protection.set_writable = lambda *_args, writable: False
guard.OperationGuard._require_writable = lambda *_: None
"""


@pytest.mark.timeout(900)
def test_all_ways_to_change_a_weight_are_stopped() -> None:
    command = [sys.executable, "-m", "mesh.cli.main", "doctor", "weights", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert report["broken"] == {}
    assert {*report["held"], *report["absent"]} == {*MEMORY, *NETS}
    assert {"stored", "converted", "operation", "unnoticed"} <= set(report["held"])


def test_what_gets_through_is_said(tmp_path: Path) -> None:
    """In processes in which nothing is protected; they try three ways, which is enough to tell."""
    report = examine(_unsafe(tmp_path))
    assert set(report.broken) == GET_THROUGH
    assert "it was changed" in report.broken["stored"]
    assert report.to_text().startswith("weights: not safe\n  OPEN  weights as they are stored")


def _unsafe(directory: Path) -> list[str]:
    script = directory / "unsafe.py"
    script.write_text(
        "import runpy, sys\n"
        f"if sys.argv[1] not in {sorted(GET_THROUGH)}:\n"
        f"    sys.exit(print('{ABSENT} not tried'))\n"
        f"{UNSAFE}runpy.run_module('mesh.shard.canaries', run_name='__main__')\n"
    )
    return [sys.executable, str(script)]


def saying(words: str) -> list[str]:
    """A canary that says so."""
    return ["/bin/sh", "-c", f"echo '{words}'"]


def test_a_canary_that_does_not_run_counts_as_one_that_got_through() -> None:
    assert set(examine(saying("hello")).broken) == {*MEMORY, *NETS}
    report = examine(saying(f"{ABSENT} it is warm"))
    assert not report.broken
    assert "it is warm" in report.to_text()
