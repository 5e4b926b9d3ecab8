"""The files of jobs: payloads as they came, results as they were left. Opaque bytes, 0600.

Knows how much may lie there and removes what nobody needs. Everything but the accounting blocks,
so it runs in a thread.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Set
from pathlib import Path
from typing import BinaryIO

from mesh.errors import BodyTooLarge, StorageFull
from mesh.interventions.jobs.files import part_of
from mesh.private_files import mending, sync
from mesh.units import data_size


class Spool:
    """One directory with a payload and a result per job, and at most `budget_bytes` in it."""

    def __init__(self, root: Path, budget_bytes: int) -> None:
        self.root = root
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        """What lies there, and what was promised to running jobs for their results."""

    def create(self) -> None:
        """Make the directories, for this user alone. Blocks. Raises OSError."""
        for directory in (self.root, self._payloads, self._results, self._incoming):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.chmod(0o700)

    def open(self, waiting: Set[str], kept: Set[str]) -> set[str]:
        """Remove all but the payloads of `waiting` jobs and the results of `kept` ones; count them.

        Returns whose payloads are there. Blocks. Raises OSError.
        """
        self.used_bytes = 0
        there: set[str] = set()
        for directory, known in (
            (self._payloads, waiting),
            (self._results, kept),
            (self._incoming, frozenset[str]()),
        ):
            for file in directory.iterdir():
                if file.name in known:
                    self.used_bytes += file.stat().st_size
                    there.add(file.name)
                else:
                    file.unlink()
        return there

    def payload(self, job_id: str) -> Path:
        """Where a job's payload lies."""
        return self._payloads / job_id

    def result(self, job_id: str) -> Path:
        """Where a job's result lies, or is to be written."""
        return self._results / job_id

    def fits(self, size_bytes: int) -> bool:
        """Whether there is room for so much more."""
        return self.used_bytes + size_bytes <= self.budget_bytes

    def reserve(self, size_bytes: int) -> None:
        """Set room aside. Raises StorageFull."""
        if not self.fits(size_bytes):
            raise StorageFull(
                f"The jobs of this node may take {data_size(self.budget_bytes)} of disk, and do.",
                fix="Try again later: results are deleted two hours after their job; or raise"
                " jobs.queue.disk_mb.",
            )
        self.used_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Give room back."""
        self.used_bytes = max(0, self.used_bytes - size_bytes)

    def receive(self) -> Incoming:
        """A new file for a payload that is arriving. Blocks. Raises OSError."""
        path = self._incoming / secrets.token_hex(8)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        return Incoming(self, path, os.fdopen(descriptor, "wb", buffering=0))

    def prepare_result(self, job_id: str) -> Path:
        """An empty result file, ours alone. Blocks. Raises OSError."""
        path = self.result(job_id)
        path.unlink(missing_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        return path

    def settle_result(self, job_id: str, *, durable: bool) -> int:
        """The size of a finished result, which survives a power cut where it has to be `durable`.

        Blocks. Raises OSError.
        """
        path = self.result(job_id)
        path.chmod(0o600)
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if durable:
                os.fsync(file.fileno())
                sync(path.parent)
        return size_bytes

    def keep_result(self, size_bytes: int) -> None:
        """Count a settled result, whether there was room for it or not."""
        self.used_bytes += size_bytes

    def remove(self, *files: Path) -> None:
        """Delete files that may be gone already, or not be whole. Blocks. Raises OSError."""
        for file in files:
            file.unlink(missing_ok=True)
            part_of(file).unlink(missing_ok=True)

    @property
    def _payloads(self) -> Path:
        return self.root / "payloads"

    @property
    def _results(self) -> Path:
        return self.root / "results"

    @property
    def _incoming(self) -> Path:
        return self.root / "incoming"


class Incoming:
    """A payload that is arriving. Ends with `keep` or with `discard`."""

    def __init__(self, spool: Spool, path: Path, file: BinaryIO) -> None:
        self.size_bytes = 0
        self._spool = spool
        self._path = path
        self._file = file

    def grow(self, size_bytes: int, limit_bytes: int) -> None:
        """Make room for what `write` is given next. Raises BodyTooLarge, StorageFull."""
        if self.size_bytes + size_bytes > limit_bytes:
            raise BodyTooLarge(
                f"The payload is larger than {limit_bytes} bytes.",
                fix="Send less data with the trace, or raise jobs.queue.payload_mb.",
            )
        self._spool.reserve(size_bytes)
        self.size_bytes += size_bytes

    def write(self, data: bytes) -> None:
        """Append. Blocks. Raises OSError."""
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def keep(self, job_id: str, *, durable: bool) -> None:
        """Make it that job's payload, which survives a power cut where it has to be `durable`.

        Blocks. Raises OSError.
        """
        if durable:
            os.fsync(self._file.fileno())
        self._file.close()
        kept = self._spool.payload(job_id)
        self._path.rename(kept)
        if durable:
            sync(kept.parent)

    def discard(self) -> None:
        """Remove what has come. Blocks. Raises OSError."""
        self._file.close()
        self._path.unlink(missing_ok=True)


def unstored(what: str, error: OSError) -> StorageFull:
    """What is told where a file of these could not be written; `what` begins the sentence."""
    return StorageFull(f"{what}: {error}.", fix=mending(error, "Free space on the node's disk."))
