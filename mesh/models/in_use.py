"""Which directories of checkpoints are in use, across all nodes of this user on this machine.

Several nodes share what was fetched. Whoever asks or serves a model holds a lock on its directory
for as long as its process lives, however that ends; whoever removes one needs it for itself.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mesh.errors import Busy, ModelInUse

_used: dict[Path, int] = {}
"""By directory: the descriptor that this process holds the lock with."""


def use(directory: Path) -> None:
    """Have nobody remove it before this process has ended. Blocks for a moment. Raises Busy while
    somebody does."""
    if directory in _used or not directory.is_dir():  # a file is none of ours
        return
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise Busy(f"{directory} is being removed.", fix="Fetch the model again.") from error
    _used[directory] = fd


@contextmanager
def unused(directory: Path) -> Iterator[None]:
    """The block may remove it. Blocks for a moment. Raises ModelInUse, OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ModelInUse(
                f"A node of this machine still uses {directory}.",
                fix="Have it serve and ask that model no more, then remove it.",
            ) from error
        yield
    finally:
        os.close(fd)
