"""Write tensors into a partial checkpoint, so that a crash at any moment costs a piece at most.

A tensor counts as there once its bytes matched its SHA-256 and were flushed to the disk; the
journal says so after that, never before. Pieces of larger tensors are noted without a flush: if the
power fails, what they say may be wrong, and then the tensor's hash is. Everything here blocks; any
thread may call. Form of the directory: see `partial`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Self

from mesh.codec import Buffer
from mesh.errors import BadCheckpoint, Busy, MeshError
from mesh.models.disk_room import require_room
from mesh.models.header import TensorEntry
from mesh.models.in_use import unused
from mesh.models.manifest import read_tensors
from mesh.models.partial import (
    JOURNAL,
    PIECE_BYTES,
    read_journal,
    read_record,
)
from mesh.models.partial_draft import discard, refused_by_disk
from mesh.private_files import flush

logger = logging.getLogger(__name__)


_LOCK = "hearthnet-partial.lock"
_COMMIT_BYTES = 64 << 20
"""So much is verified at most before it is flushed and noted."""
_READ_BYTES = 1 << 20


class WriteOutcome(Enum):
    """What became of bytes that were put in."""

    WRITTEN = auto()
    COMPLETE = auto()
    WRONG = auto()


@dataclass(slots=True)
class _Unfinished:
    """A tensor under way: `pieces` are written, and those `begun` are or will be; `digest` covers
    its first `hashed` bytes."""

    entry: TensorEntry
    pieces: set[int]
    begun: set[int] = field(default_factory=set)
    hashed: int = 0
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    lock: threading.Lock = field(default_factory=threading.Lock)


class PartialWriter:
    """The one writer of a partial checkpoint; `close` lets go of it."""

    def __init__(self, directory: Path) -> None:
        """Raises Busy while another process writes there, BadCheckpoint for a damaged record."""
        self.directory = directory
        self._lock_fd = lock_directory(directory)
        self._guard = threading.Lock()
        self._committing, self._noting = threading.Lock(), threading.Lock()
        self._at_work, self._is_closed = 0, False
        self._idle = threading.Condition()
        self._files: dict[Path, int] = {}
        opened = [self._lock_fd]
        try:
            self.record = read_record(directory)
            names = sorted(self.record.tensors)
            self.tensors = read_tensors(directory)
            self._index = {name: index for index, name in enumerate(names)}
            present = read_journal(directory, names)
            self._journal = _open_journal(directory / JOURNAL)
            opened.append(self._journal)
            for file in {entry.file for entry in self.tensors.values()}:
                self._files[file] = os.open(file, os.O_RDWR | os.O_CLOEXEC)
                opened.append(self._files[file])
        except BaseException:
            for fd in opened:
                os.close(fd)
            raise
        self.complete = present.complete
        """The tensors that are there, as the journal has them."""
        self._verified: dict[str, TensorEntry] = {}
        self._unfinished = {
            name: _Unfinished(self.tensors[name], pieces) for name, pieces in present.pieces.items()
        }
        self._suspects: dict[str, dict[int, str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def missing(self, name: str) -> list[tuple[int, int]]:
        """The pieces [start, stop) of a tensor that are not there yet."""
        with self._guard:
            if self.has(name):
                return []
            there = self._unfinished[name].pieces if name in self._unfinished else set()
            size = self.tensors[name].nbytes
            return [each for index, each in enumerate(pieces_of(size)) if index not in there]

    def has(self, name: str) -> bool:
        """Whether the tensor is here and was verified; it may not have reached the disk yet."""
        return name in self.complete or name in self._verified

    def require_room(self, names: Iterable[str]) -> None:
        """Raise DiskFull when the disk has no room for what is missing of these."""
        need = sum(stop - start for name in names for start, stop in self.missing(name))
        require_room(self.directory, need)

    def put(self, name: str, start: int, parts: Sequence[Buffer]) -> WriteOutcome:
        """Write one piece of a tensor, whose bytes are `parts` in a row; verify the tensor when it
        was the last. Raises DiskFull.

        WRONG: its bytes were not those of its hash, and all of them are void again; a tensor of one
        piece is checked before it is written.
        """
        with self._working():
            return self._put(self.tensors[name], start, parts)

    def _put(self, entry: TensorEntry, start: int, parts: Sequence[Buffer]) -> WriteOutcome:
        name, size = entry.name, sum(map(len, parts))
        if start == 0 and size == entry.nbytes:
            return self._put_whole(entry, parts)
        piece = start // PIECE_BYTES
        with self._guard:
            if self.has(name):
                return WriteOutcome.COMPLETE
            known = self._unfinished.setdefault(name, _Unfinished(entry, set()))
            # What was hashed as it came is not looked at again: nothing may be put over it.
            if piece in known.pieces or piece in known.begun:
                return WriteOutcome.WRITTEN
            known.begun.add(piece)
        self._write_at(entry, start, parts)
        with known.lock:
            if known.hashed == start:
                _updated(known.digest, parts)
                known.hashed += size
            known.pieces.add(piece)
            self._note(f"p {self._index[name]} {piece}")
            if len(known.pieces) < len(pieces_of(entry.nbytes)):
                return WriteOutcome.WRITTEN
            return self._verify(known)

    def _put_whole(self, entry: TensorEntry, parts: Sequence[Buffer]) -> WriteOutcome:
        if _updated(hashlib.sha256(), parts).hexdigest() != self.record.tensors[entry.name]:
            return WriteOutcome.WRONG
        if self.has(entry.name):
            return WriteOutcome.COMPLETE
        self._write_at(entry, 0, parts)
        self._note(f"p {self._index[entry.name]} 0")
        return self._keep(entry)

    def settle(self, name: str) -> WriteOutcome:
        """Verify a tensor all of whose pieces were here when this was opened; as `put`."""
        known = self._unfinished.get(name)
        if known is None:
            return WriteOutcome.COMPLETE if self.has(name) else WriteOutcome.WRITTEN
        with self._working(), known.lock:
            return self._verify(known)

    def void(self, name: str) -> None:
        """Forget the pieces of a tensor, as they cannot be trusted."""
        with self._guard:
            if self._unfinished.pop(name, None) is not None:
                self._note(f"x {self._index[name]}")

    def drop(self, name: str) -> None:
        """A tensor that was here is not any more. Raises DiskFull."""
        with self._working():
            self._note(f"d {self._index[name]}")
            with self._guard:
                self.complete.discard(name)

    def differing(self, name: str) -> list[int]:
        """Which pieces of a tensor that was WRONG before are other ones now that it is complete."""
        before = self._suspects.pop(name, {})
        if not before:
            return []
        entry = self.tensors[name]
        with self._working():
            return [
                index
                for index, (start, stop) in enumerate(pieces_of(entry.nbytes))
                if index in before and before[index] != self._digest(entry, start, stop)
            ]

    def commit(self) -> None:
        """Flush what was verified, then note it as complete. Raises DiskFull."""
        with self._working():
            self._commit()

    def _commit(self) -> None:
        with self._committing:
            with self._guard:
                verified = dict(self._verified)
            try:
                for file in {entry.file for entry in verified.values()}:
                    flush(self._files[file])
                if verified:
                    self._note(*(f"c {self._index[name]}" for name in verified))
                    flush(self._journal)
            except OSError as error:
                raise refused_by_disk(self.directory, error) from error
            with self._guard:
                self.complete |= verified.keys()
                for name in verified:
                    self._verified.pop(name, None)

    def close(self) -> None:
        """Let what is being put in end, note what was verified, and let others write.

        Does not raise; what is put in afterwards is refused with Busy.
        """
        with self._idle:
            self._is_closed = True
            # Another file may get the number of one that is closed: nobody may be writing then.
            self._idle.wait_for(lambda: self._at_work == 0)
        try:
            self._commit()
        except MeshError as error:
            logger.warning("what was fetched last is fetched again: %s", error)
        for fd in (*self._files.values(), self._journal, self._lock_fd):
            os.close(fd)
        self._files.clear()

    # Private

    @contextmanager
    def _working(self) -> Iterator[None]:
        with self._idle:
            if self._is_closed:
                raise Busy("The fetch has ended.", fix="Fetch it again.")
            self._at_work += 1
        try:
            yield
        finally:
            with self._idle:
                self._at_work -= 1
                self._idle.notify_all()

    def _keep(self, entry: TensorEntry) -> WriteOutcome:
        with self._guard:
            self._unfinished.pop(entry.name, None)
            self._verified[entry.name] = entry
            is_much = sum(each.nbytes for each in self._verified.values()) >= _COMMIT_BYTES
        if is_much:
            self._commit()
        return WriteOutcome.COMPLETE

    def _verify(self, known: _Unfinished) -> WriteOutcome:
        entry = known.entry
        if self.has(entry.name):
            return WriteOutcome.COMPLETE
        self._hash(known.digest, entry, known.hashed, entry.nbytes)
        if known.digest.hexdigest() == self.record.tensors[entry.name]:
            return self._keep(entry)
        self._suspects[entry.name] = {
            index: self._digest(entry, start, stop)
            for index, (start, stop) in enumerate(pieces_of(entry.nbytes))
        }
        self.void(entry.name)
        return WriteOutcome.WRONG

    def _digest(self, entry: TensorEntry, start: int, stop: int) -> str:
        digest = hashlib.sha256()
        self._hash(digest, entry, start, stop)
        return digest.hexdigest()

    def _hash(self, digest: hashlib._Hash, entry: TensorEntry, start: int, stop: int) -> None:
        fd = self._files[entry.file]
        while start < stop:
            data = os.pread(fd, min(_READ_BYTES, stop - start), entry.offset + start)
            if not data:
                raise BadCheckpoint(
                    f"{entry.file} was made shorter while it was filled.",
                    fix="Leave the directory alone, remove it with `hearthnet rm`, fetch it again.",
                )
            digest.update(data)
            start += len(data)

    def _write_at(self, entry: TensorEntry, start: int, parts: Sequence[Buffer]) -> None:
        fd, at = self._files[entry.file], entry.offset + start
        try:
            for part in parts:
                view = memoryview(part)
                while view:
                    count = os.pwrite(fd, view, at)
                    view, at = view[count:], at + count
        except OSError as error:
            raise refused_by_disk(self.directory, error) from error

    def _note(self, *facts: str) -> None:
        if not facts:
            return
        text = "".join(f"{fact}\n" for fact in facts).encode()
        with self._noting:
            size = os.fstat(self._journal).st_size
            try:
                count = os.write(self._journal, text)
                if count < len(text):
                    os.ftruncate(self._journal, size)  # half a fact would spoil the next one
            except OSError as error:
                raise refused_by_disk(self.directory, error) from error
            if count < len(text):
                full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                raise refused_by_disk(self.directory, full)


def _updated(digest: hashlib._Hash, parts: Sequence[Buffer]) -> hashlib._Hash:
    for part in parts:
        digest.update(part)
    return digest


def pieces_of(nbytes: int) -> Sequence[tuple[int, int]]:
    """The pieces [start, stop) of a tensor of so many bytes; one, without bytes, for none."""
    starts = range(0, max(nbytes, 1), PIECE_BYTES)
    return [(start, min(start + PIECE_BYTES, nbytes)) for start in starts]


def lock_directory(directory: Path) -> int:
    """Be the one process that writes there, until the descriptor is closed. Raises Busy."""
    fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise Busy(
            f"Another process of this user writes to {directory}.",
            fix="Wait until it is done.",
        ) from error
    return fd


def drop_tensor(directory: Path, name: str) -> None:
    """Have a tensor count as missing that has changed since it came. Blocks. Raises Busy while
    somebody writes there, BadCheckpoint, DiskFull."""
    with PartialWriter(directory) as writer:
        writer.drop(name)


def remove_partial(directory: Path) -> None:
    """Delete a checkpoint. Blocks. Raises ModelInUse, Busy while somebody writes there, OSError."""
    with unused(directory):
        # Else another node of this machine would fill what is gone.
        lock = lock_directory(directory)
        try:
            discard(directory)
        finally:
            os.close(lock)


def _open_journal(file: Path) -> int:
    """For appending; a line that a crash cut off goes, so that the next one is whole."""
    fd = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    size = os.fstat(fd).st_size
    tail = os.pread(fd, 64, max(0, size - 64))
    if tail and not tail.endswith(b"\n"):
        os.ftruncate(fd, size - len(tail) + tail.rfind(b"\n") + 1)
    return fd
