"""What a process may have open at once: enough, wherever it was started."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource
from mesh.processes.descriptors import allow_enough
allow_enough()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("limits", "after"),
    [
        ("ulimit -Sn 256", 4096),
        ("ulimit -Sn 256; ulimit -Hn 500", 500),
        ("ulimit -Sn 5000", 5000),
    ],
    ids=["as on macOS", "where no more are to be had", "where there are more"],
)
def test_as_many_as_a_house_takes(limits: str, after: int) -> None:
    shell = ["bash", "-c", f'{limits}; exec "$@"', "bash", sys.executable, "-c", SCRIPT]
    found = subprocess.run(shell, capture_output=True, text=True, check=True, timeout=60)
    assert int(found.stdout.split()[0]) == after
