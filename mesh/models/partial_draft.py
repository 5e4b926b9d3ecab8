"""Make a new partial checkpoint: all files and the record, no tensor. Form: see `partial`."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mesh.errors import BadCheckpoint, DiskFull
from mesh.models.partial import RECORD, PartialRecord
from mesh.private_files import sync

_DRAFTS = ".drafts"
_OLD_S = 3600.0


@dataclass(frozen=True, slots=True)
class SparseFile:
    """A file of weights as it is to look: its header, its size, and what else of it is there, by
    where that begins."""

    header: bytes
    size: int
    pieces: Mapping[int, bytes] = field(default_factory=dict)


def create_partial(
    directory: Path,
    record: PartialRecord,
    sparse: Mapping[str, SparseFile],
    small: Mapping[str, bytes],
) -> None:
    """Make a partial checkpoint without any tensor; all of it appears at once, or nothing.

    `small` are the other files. Does nothing where there is one already. Raises DiskFull, and
    BadCheckpoint where something else is in its place.
    """
    record_file = json.dumps(asdict(record)).encode()
    create_sparse(directory, sparse, {**small, RECORD: record_file}, RECORD)


def create_sparse(
    directory: Path, sparse: Mapping[str, SparseFile], small: Mapping[str, bytes], mark: str
) -> None:
    """Make a directory of these files; all of it appears at once, or nothing.

    Does nothing where there is one that has the file `mark`. Raises as `create_partial`.
    """
    if (directory / mark).exists():
        return
    # Beside the checkpoints, where nobody takes for one what a crash left behind.
    drafts = directory.parent / _DRAFTS
    draft = drafts / f"{directory.name}.{os.getpid()}.{threading.get_ident()}"
    try:
        _sweep(drafts)
        draft.mkdir(parents=True)
        for name, content in small.items():
            (draft / name).parent.mkdir(exist_ok=True)
            _write(draft / name, {0: content}, len(content))
        for name, file in sparse.items():
            _write(draft / name, {0: file.header, **file.pieces}, file.size)
        sync(draft)
        with suppress(FileExistsError):
            take_place(draft, directory)
        sync(directory.parent)
    except OSError as error:
        if (directory / mark).exists():
            return  # somebody else was quicker
        raise refused_by_disk(directory, error) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def take_place(draft: Path, directory: Path) -> None:
    """Give a finished directory its name. Blocks. Raises BadCheckpoint where something that is no
    checkpoint has that already, OSError."""
    try:
        draft.rename(directory)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY or (directory / RECORD).exists():
            raise
        raise BadCheckpoint(
            f"{directory} is in the way: it holds files, and no record of a checkpoint.",
            fix="Move it elsewhere or delete it, then try again.",
        ) from error


def discard(directory: Path) -> None:
    """Delete a directory that is beside the drafts. What is left when this is cut short is not
    taken for a checkpoint, is in nobody's way and is swept up later. Blocks. Raises OSError."""
    drafts = directory.parent / _DRAFTS
    drafts.mkdir(parents=True, exist_ok=True)
    gone = drafts / f"{directory.name}.{os.getpid()}.{threading.get_ident()}.gone"
    directory.rename(gone)
    _delete(gone)


def refused_by_disk(directory: Path, error: OSError) -> DiskFull:
    """What a checkpoint that cannot be written is refused with."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"The disk of {directory} is full.",
            fix="Free some room, or remove models with `hearthnet rm`; what was fetched is kept.",
        )
    if error.errno == errno.EFBIG:
        return DiskFull(
            f"The file system of {directory} takes no file of the size of the model's: FAT takes up"
            " to 4 GiB.",
            fix="Name a models_dir on another file system.",
        )
    return DiskFull(
        f"{directory} cannot be written: {error.strerror}.",
        fix="Check the disk, and that this user may write there; what was fetched is kept.",
    )


def _sweep(drafts: Path) -> None:
    """Remove what crashes left there; younger ones may be somebody's at work."""
    for draft in drafts.glob("*"):
        with suppress(FileNotFoundError):
            if time.time() - draft.stat().st_mtime > _OLD_S:
                _delete(draft)


def _delete(directory: Path) -> None:
    """What is left is swept up by others, or they do so already. A checkpoint that was moved to
    another disk, with a link in its place, is deleted there."""
    if directory.is_symlink():
        shutil.rmtree(directory.resolve(), ignore_errors=True)
        directory.unlink(missing_ok=True)
    else:
        shutil.rmtree(directory, ignore_errors=True)


def _write(file: Path, pieces: Mapping[int, bytes], size: int) -> None:
    with file.open("wb") as stream:
        for offset, content in pieces.items():
            stream.seek(offset)
            stream.write(content)
        stream.truncate(size)
        stream.flush()
        os.fsync(stream.fileno())
