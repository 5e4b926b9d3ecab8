"""A number that grows with every start of a node, whatever its clock does.

Others keep the newest word of a node by it (see `mesh.events.ephemera`): a start that counted lower
than the one before would not be listened to.
"""

from __future__ import annotations

from pathlib import Path

from mesh.clock import Clock
from mesh.errors import KeyUnreadable
from mesh.private_files import mending, read_private, write_private

_MAX_BYTES = 64


def next_epoch(path: Path, clock: Clock) -> int:
    """One more than last time, or the Unix time in milliseconds when that is more; kept at `path`.

    The time helps where the file is lost or restored from a backup, the file where the clock is
    set back. Raises KeyUnreadable when it cannot be kept.
    """
    try:
        try:
            last = int(read_private(path, _MAX_BYTES))
        except (FileNotFoundError, ValueError):
            last = 0
        epoch = max(last + 1, int(clock.now().timestamp() * 1000))
        write_private(path, str(epoch).encode())
    except OSError as error:
        raise KeyUnreadable(
            f"{path} cannot be used: {error.strerror or error}.",
            fix=mending(error, "Make it readable and writable for this user only."),
        ) from error
    return epoch
