"""Small files that only this user may read: written whole or not at all, checked before reading.

Knows permissions and atomic replacement. Knows nothing of what the files hold.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shlex
import stat
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from mesh.errors import KeyUnreadable

_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
"""What file systems without hard links say: FAT, exFAT, some of networks."""
_SQLITE_CANTOPEN = 14
_SQLITE_FILES = 4
"""The database, its write-ahead log, the index of that, and their directory."""
_DRAFT = re.compile(r"\.[0-9a-f]{8}")


def read_private(path: Path, limit: int) -> bytes:
    """At most `limit` bytes of the file, after checking who else could have read them.

    The check is on the open descriptor, so nothing can be swapped in between. Raises KeyUnreadable
    when the file is not a regular one, not ours, or open to others; OSError when it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise KeyUnreadable(f"{path} is not a regular file.", fix="Remove what lies there.")
        if status.st_uid != os.geteuid():
            raise KeyUnreadable(
                f"{path} belongs to user id {status.st_uid}, not to this user.",
                fix="Use another state directory, or change the file's owner.",
            )
        if status.st_mode & 0o077:
            raise KeyUnreadable(
                f"{path} is open to others (mode {status.st_mode & 0o777:04o}).",
                fix=f"If nobody has copied it, run: chmod 600 {shlex.quote(str(path))}",
            )
        return file.read(limit)


def write_private(path: Path, data: bytes) -> None:
    """Put `data` in the place of the file, 0600; a crash leaves the old one. Raises OSError."""
    draft = write_draft(path, data)
    try:
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync(path.parent)


def write_once(path: Path, data: bytes) -> bool:
    """Put `data` there, 0600, unless there is a file by then; whether that was done. Of several who
    do that at once one has its way, and a crash leaves no half file. Raises OSError."""
    draft = write_draft(path, data)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):  # the best that can be had there: one moment is left
            return False
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return True


def sync(path: Path) -> None:
    """Have a file's bytes survive a power cut, or the names in a directory. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush(descriptor: int) -> None:
    """Have the bytes of an open file survive a power cut. Raises OSError."""
    if sys.platform == "darwin":  # which has no call for bytes alone
        os.fsync(descriptor)
    else:
        os.fdatasync(descriptor)


def mending(error: Exception, otherwise: str) -> str:
    """What helps against an error of a file, SQLite's as well: that of its disk or of this process,
    or else what the caller says, which is about the file."""
    if _lacks_descriptors(error):
        return (
            "This process has as many files and connections open as it may: start it with a higher"
            " limit (`ulimit -n`, a service's LimitNOFILE), or with fewer who are connected."
        )
    if not isinstance(error, OSError):
        return otherwise
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free some room on that disk; the file is as it was."
    if error.errno == errno.EROFS:
        return "That file system takes no writes: mount it for writing; the file is as it was."
    return otherwise


def _lacks_descriptors(error: Exception) -> bool:
    if getattr(error, "sqlite_errorcode", None) != _SQLITE_CANTOPEN:
        return isinstance(error, OSError) and error.errno in _NO_DESCRIPTORS
    # SQLite does not tell why it could not open one of its files.
    with ExitStack() as opened:
        for _ in range(_SQLITE_FILES):
            try:
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            except OSError as why:
                return why.errno in _NO_DESCRIPTORS
    return False


def remove_stale_drafts(directory: Path) -> None:
    """Remove what writers of these functions that were killed have left there and one level below;
    what is younger than a day may be another process's. Raises nothing: it is asked again."""
    before = time.time() - 86400
    for file in (*directory.glob("*.????????"), *directory.glob("*/*.????????")):
        with suppress(OSError):
            if _DRAFT.fullmatch(file.suffix) and file.lstat().st_mtime < before:
                file.unlink()


def write_draft(path: Path, data: bytes) -> Path:
    """A new 0600 file with `data` beside `path`, on the disk; the caller moves or removes it."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        draft.unlink(missing_ok=True)
        error.filename = str(path)  # a write that fails says none
        raise
    return draft
