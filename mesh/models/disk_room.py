"""How much of a disk may be filled with weights. Blocks for a moment."""

from __future__ import annotations

import shutil
from pathlib import Path

from mesh.errors import DiskFull

_SPARE_BYTES = 64 << 20
"""Left free on a disk that is filled."""


def free_bytes(directory: Path) -> int:
    """What weights may still take on the disk of a directory, which need not be there yet. Raises
    OSError."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return max(0, shutil.disk_usage(directory).free - _SPARE_BYTES)


def require_room(directory: Path, need: int) -> None:
    """Raise DiskFull where so many bytes have no room. Raises OSError."""
    free = free_bytes(directory)
    if need > free:
        raise DiskFull(
            f"{directory} needs {need / 1e6:.0f} MB more; the disk has"
            f" {free / 1e6:.0f} MB free for it.",
            fix="Free some room, remove models with `hearthnet rm`, or fetch fewer layers.",
        )
