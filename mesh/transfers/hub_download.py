"""Files of the hub that are fetched whole, as the hub says that they are: their sizes and SHA-256.

A file that was cut off goes on where it stopped; the first part is hashed again from the disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from mesh.errors import DiskFull, TransferFailed
from mesh.models.disk_room import require_room
from mesh.models.partial_draft import refused_by_disk
from mesh.processes.tasks import to_its_end
from mesh.transfers.hub import Hub, HubFile, Repository
from mesh.transfers.meter import Meter
from mesh.transfers.pacing import Pace

logger = logging.getLogger(__name__)

TRIES = 2
_READ_BYTES = 1 << 20


class HubDownload:
    """Of one repository; `meter` counts what is here and what comes."""

    def __init__(self, hub: Hub, repository: Repository, pace: Pace, meter: Meter) -> None:
        self._hub = hub
        self._repository = repository
        self._pace = pace
        self._meter = meter

    async def fetch(self, files: Mapping[Path, HubFile]) -> None:
        """Have each of these files, all of which have an `lfs`, where it says, in one directory.

        Raises DiskFull, TransferFailed for bytes that are wrong twice, and what the hub raises.
        """
        meter = self._meter
        meter.total = sum(file.length for file in files.values())
        meter.done = await asyncio.to_thread(_here, files)
        for path, file in files.items():
            await self._one(path, file)

    async def pour(self, file: HubFile, start: int, into: Callable[[bytes], None]) -> None:
        """Put the bytes of a file from `start` on into what takes them and blocks, in their order;
        what came before it broke off as well. Raises what the hub and `into` raise."""
        loop, together = asyncio.get_running_loop(), bytearray()
        chunks = self._hub.stream(self._repository, file.rfilename, start, file.length)
        try:
            async for chunk in chunks:
                await self._pace.take(len(chunk))
                together += chunk
                self._meter.done += len(chunk)
                self._meter.arrived("hub", "the hub", len(chunk), loop.time())
                if len(together) >= _READ_BYTES:
                    data = bytes(together)
                    together.clear()  # once only, also when this is cancelled now
                    await to_its_end(into, data)
        finally:
            await chunks.aclose()
            await to_its_end(into, bytes(together))

    def wrong(self, file: HubFile) -> TransferFailed:
        """The error for bytes that are other ones each time."""
        return TransferFailed(
            f"{file.rfilename} of {self._repository.id} came with other bytes than the hub says,"
            f" {TRIES} times.",
            fix="Try again later; a proxy in between may change it.",
        )

    # Private

    async def _one(self, path: Path, file: HubFile) -> None:
        if await asyncio.to_thread(path.exists):
            return  # only what matched gets its name
        for _ in range(TRIES):
            if await self._attempt(file, _part(path)):
                await asyncio.to_thread(_part(path).rename, path)
                return
            self._meter.done -= file.length
            await asyncio.to_thread(_part(path).unlink)
            logger.warning("%s came with wrong bytes from the hub", file.rfilename)
        raise self.wrong(file)

    async def _attempt(self, file: HubFile, part: Path) -> bool:
        """Whether what is there in the end is the file."""
        assert file.lfs is not None  # noqa: S101 - only such are asked for
        digest, start = await asyncio.to_thread(_digest_of, part)
        fd = await asyncio.to_thread(os.open, part, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            await self.pour(file, start, lambda data: _append(fd, data, digest))
            await asyncio.to_thread(os.fsync, fd)
        finally:
            os.close(fd)
        return digest.hexdigest() == file.lfs.sha256


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _here(files: Iterable[Path]) -> int:
    """How many bytes there are already."""
    parts = [path if path.exists() else _part(path) for path in files]
    return sum(path.stat().st_size for path in parts if path.exists())


def make_directory(directory: Path) -> None:
    """With all above it. Blocks. Raises DiskFull."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused_by_disk(directory, error) from error


def has_room_for(files: Mapping[Path, HubFile]) -> bool:
    """Whether `require_room_for` raises nothing. Blocks."""
    try:
        require_room_for(files)
    except DiskFull:
        return False
    return True


def require_room_for(files: Mapping[Path, HubFile]) -> None:
    """Raise DiskFull where the disk has no room for what is not there yet of these. Blocks."""
    need = sum(file.length for file in files.values()) - _here(files)
    require_room(next(iter(files)).parent, need)


def _append(fd: int, chunk: bytes, digest: hashlib._Hash) -> None:
    view = memoryview(chunk)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError as error:
        raise refused_by_disk(Path("the models' directory"), error) from error
    digest.update(chunk)


def _digest_of(part: Path) -> tuple[hashlib._Hash, int]:
    """Of what came before, and how much that is."""
    digest, size = hashlib.sha256(), 0
    if part.exists():
        with part.open("rb") as stream:
            while data := stream.read(_READ_BYTES):
                digest.update(data)
                size += len(data)
    return digest, size
