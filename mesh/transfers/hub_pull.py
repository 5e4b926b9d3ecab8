"""Fetch a whole repository from the hub, once: every byte of its weights is read and hashed.

Needed where nobody in the hearth knows the hashes of the tensors. The files lie in a staging
directory until all of them are there and match what the hub says; then it becomes a checkpoint like
any that was fetched (`mesh.models.partial`), with everything in it. A file that was cut off goes on
where it stopped; the first part is hashed again from the disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from mesh.errors import DiskFull, TransferFailed
from mesh.models.hashing import hash_tensors, weights_sha256
from mesh.models.manifest import read_tensors
from mesh.models.partial import JOURNAL, RECORD, PartialRecord, partial_directory
from mesh.models.partial_draft import refused_by_disk
from mesh.models.partial_writer import lock_directory
from mesh.transfers.hub import Hub, HubFile, Repository
from mesh.transfers.hub_files import read_small, weights_files, write_small
from mesh.transfers.meter import Meter
from mesh.transfers.pacing import Pace

logger = logging.getLogger(__name__)

_STAGING = ".hub"
_TRIES = 2
_SPARE_BYTES = 64 << 20
_READ_BYTES = 1 << 20


class HubPull:
    """One repository; `meter` counts what came of its weights."""

    def __init__(
        self,
        hub: Hub,
        repository: Repository,
        models_dir: Path,
        pace: Pace,
        meter: Meter,
    ) -> None:
        self._hub = hub
        self._repository = repository
        self._models_dir = models_dir
        self._pace = pace
        self._meter = meter
        name = f"{repository.id.replace('/', '--')}@{repository.sha[:12]}"
        self.staging = models_dir / _STAGING / name

    async def run(self) -> Path:
        """The directory of the checkpoint, once it is complete.

        Raises BadCheckpoint for a repository without safetensors, UnsupportedFamily for one whose
        weights are stored quantised, DiskFull, TransferFailed for bytes that are wrong twice, Busy
        while another process of this user does it, and what the hub raises.
        """
        small = await read_small(self._hub, self._repository)
        weights = weights_files(self._repository, small)
        await asyncio.to_thread(_make, self.staging)
        lock = await asyncio.to_thread(lock_directory, self.staging)
        try:
            await asyncio.to_thread(write_small, self.staging, small)
            meter = self._meter
            meter.total = sum(file.length for file in weights)
            meter.done = await asyncio.to_thread(self._here, weights)
            await asyncio.to_thread(_require_room, self.staging, meter.total - meter.done)
            for file in weights:
                await self._weights(file)
            return await asyncio.to_thread(self._finish)
        finally:
            os.close(lock)

    def _here(self, weights: list[HubFile]) -> int:
        found = [self.staging / file.rfilename for file in weights]
        parts = [path if path.exists() else _part(path) for path in found]
        return sum(path.stat().st_size for path in parts if path.exists())

    async def _weights(self, file: HubFile) -> None:
        path = self.staging / file.rfilename
        if path.exists():
            return  # only what matched gets its name
        for _ in range(_TRIES):
            if await self._download(file, _part(path)):
                await asyncio.to_thread(_part(path).rename, path)
                return
            self._meter.done -= file.length
            await asyncio.to_thread(_part(path).unlink)
            logger.warning("%s came with wrong bytes from the hub", file.rfilename)
        raise TransferFailed(
            f"{file.rfilename} of {self._repository.id} came with other bytes than the hub says,"
            f" {_TRIES} times.",
            fix="Try again later; a proxy in between may change it.",
        )

    async def _download(self, file: HubFile, part: Path) -> bool:
        """Whether what is there in the end is the file."""
        assert file.lfs is not None  # noqa: S101 - only such are asked for
        loop = asyncio.get_running_loop()
        digest, start = await asyncio.to_thread(_digest_of, part)
        chunks = self._hub.stream(self._repository, file.rfilename, start, file.length)
        fd = await asyncio.to_thread(os.open, part, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            together = bytearray()
            try:
                async for chunk in chunks:
                    await self._pace.take(len(chunk))
                    together += chunk
                    self._meter.done += len(chunk)
                    self._meter.arrived("hub", "the hub", len(chunk), loop.time())
                    if len(together) >= _READ_BYTES:
                        await asyncio.to_thread(_append, fd, bytes(together), digest)
                        together.clear()
            finally:
                await asyncio.to_thread(_append, fd, bytes(together), digest)
            await asyncio.to_thread(os.fsync, fd)
        finally:
            await chunks.aclose()
            os.close(fd)
        return digest.hexdigest() == file.lfs.sha256

    def _finish(self) -> Path:
        """Hash the tensors, and make the staging directory a checkpoint."""
        tensors, _ = hash_tensors(read_tensors(self.staging), cache_dir=None)
        sha256 = weights_sha256(tensors.values())
        repository = self._repository
        names = {name: entry.sha256 for name, entry in tensors.items()}
        record = PartialRecord(1, repository.id, sha256, repository.origin, names)
        directory = partial_directory(self._models_dir, repository.model_id, sha256)
        if (directory / RECORD).exists():  # a part of it came from a neighbour before
            shutil.rmtree(directory)
        facts = "".join(f"c {index}\n" for index in range(len(names)))
        write_small(self.staging, {JOURNAL: facts.encode()})
        write_small(self.staging, {RECORD: json.dumps(asdict(record)).encode()})
        self.staging.rename(directory)
        return directory


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused_by_disk(directory, error) from error


def _require_room(directory: Path, need: int) -> None:
    free = shutil.disk_usage(directory).free
    if need + _SPARE_BYTES > free:
        raise DiskFull(
            f"{directory} needs {need / 1e6:.0f} MB; the disk has {free / 1e6:.0f} MB free.",
            fix="Free some room, or remove models with `hearthnet rm`.",
        )


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
