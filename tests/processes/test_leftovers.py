"""What a node leaves to others when it crashes, and on disks: nothing, however it was started."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import contextlib, subprocess, sys
from mesh.config import Config
from mesh.errors import BadValue
from mesh.node import daemon
with contextlib.suppress(BadValue):
    daemon.run(Config(state_dir="/dev/null/none"))
subprocess.run(["sh", "-c", "ulimit -Sc; ulimit -Hc; umask"], check=True)
"""


def test_its_processes_leave_no_core_and_no_file_that_anybody_may_write_to() -> None:
    shell = 'ulimit -Sc $(ulimit -Hc); umask 000; exec "$@"'
    run = ["bash", "-c", shell, "bash", sys.executable, "-c", SCRIPT]
    found = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60)
    soft, hard, umask = found.stdout.split()
    assert (soft, int(umask, 8)) == ("0", 0o002)
    assert hard != "0", "whoever looks for a fault can have one"
