"""Writing a job's result: it is there whole or not at all. Knows nothing of what is in it."""

from __future__ import annotations

import os
from pathlib import Path


def part_of(file: Path) -> Path:
    """Where a file lies until it is whole."""
    return file.with_name(file.name + ".part")


def write_whole(file: Path, data: bytes) -> None:
    """All of it or nothing, readable by this user only. Blocks. Raises OSError, and leaves
    nothing then."""
    part = part_of(file)
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as out:
            out.write(data)
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
