"""Real control groups with a memory limit, where this machine lets one be made."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mesh.processes.headroom import control_groups

_SETTLE_S = 10.0


@contextmanager
def limited_group(limit_mb: int, name: str = "test") -> Iterator[Path]:
    """A group below this process' own; skips the test where there can be none.

    Whoever writes its process id to ``cgroup.procs`` is in it, with all it starts from then on:
    see `joining`.
    """
    made = None
    for parent, version in control_groups():
        limit = "memory.max" if version == 2 else "memory.limit_in_bytes"
        directory = parent / f"hearthnet-{name}-{os.getpid()}"
        with contextlib.suppress(OSError):
            directory.mkdir()
            made = directory
            (directory / limit).write_text(str(limit_mb << 20))
            break
        if made is not None:
            made.rmdir()
            made = None
    if made is None:
        pytest.skip("no memory control group can be made here")
    try:
        yield made
    finally:
        deadline = time.monotonic() + _SETTLE_S
        while True:  # who was in it takes a moment to be gone
            try:
                made.rmdir()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)


def joining(group: Path, *command: str) -> list[str]:
    """What joins `group` and then is `command`."""
    return ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group), *command]
