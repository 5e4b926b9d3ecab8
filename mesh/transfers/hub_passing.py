"""Read a model of the hub of which only a part is to stay: bytes are hashed as they pass.

For a disk that has no room for all of it. What is wanted later comes by ranges, as the hashes are
known then. A file that has passed is not asked for again; one that was cut off is, from its
beginning, as a hash cannot be put away half done.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from mesh.codec import Sha256
from mesh.errors import TransferFailed
from mesh.models.hashing import read_cached, weights_sha256, write_json_atomically
from mesh.models.header import TensorEntry
from mesh.models.manifest import read_manifest
from mesh.models.partial import JOURNAL, RECORD, PartialRecord, journal_of, partial_directory
from mesh.models.partial_draft import create_sparse, refused_by_disk
from mesh.models.partial_writer import lock_directory
from mesh.transfers.fetching import WantedLayers
from mesh.transfers.hub import Hub, HubFile
from mesh.transfers.hub_download import READ_BYTES, TRIES, require_room
from mesh.transfers.hub_files import HubModel, safetensors_headers, write_small
from mesh.transfers.hub_gguf import gguf_headers
from mesh.transfers.meter import Meter
from mesh.transfers.pacing import Pace

logger = logging.getLogger(__name__)

_PASSED = "passed.json"
"""In the staging directory: the hashes of the tensors of each file that has passed."""


class HubPassing:
    """One model; `meter` counts what has passed of its weights."""

    def __init__(
        self, hub: Hub, model: HubModel, models_dir: Path, pace: Pace, meter: Meter
    ) -> None:
        self._hub = hub
        self._model = model
        self._models_dir = models_dir
        self._pace = pace
        self._meter = meter

    async def run(
        self,
        staging: Path,
        small: Mapping[str, bytes],
        weights: Sequence[HubFile],
        wanted: WantedLayers,
    ) -> Path:
        """The directory of the checkpoint, with what is `wanted` of it; `staging` becomes that.

        Where a part of it is here already that is left as it is. Raises as `HubPull.run`.
        """
        model = self._model
        headers = gguf_headers if model.gguf else safetensors_headers
        sparse = await headers(self._hub, model.repository, weights)
        first = weights[0].rfilename
        await asyncio.to_thread(create_sparse, staging, sparse, small, first)
        lock = await asyncio.to_thread(lock_directory, staging)
        try:
            manifest = await asyncio.to_thread(read_manifest, staging, is_hashed=False)
            kept = set(wanted.names(manifest))
            need = sum(manifest.tensors[name].nbytes for name in kept)
            await asyncio.to_thread(require_room, staging, need)
            passed = await asyncio.to_thread(_passed, staging)
            self._meter.total = sum(file.length for file in weights)
            for file in weights:
                if file.rfilename in passed:
                    self._meter.done += file.length
                    continue
                entries = [e for e in manifest.tensors.values() if e.file.name == file.rfilename]
                passed[file.rfilename] = await self._one(staging, file, entries, kept)
                await asyncio.to_thread(write_json_atomically, staging / _PASSED, passed)
            hashes = {name: sha256 for each in passed.values() for name, sha256 in each.items()}
            return await asyncio.to_thread(self._finish, staging, manifest.tensors, hashes, kept)
        finally:
            os.close(lock)

    # Private

    async def _one(
        self, staging: Path, file: HubFile, entries: Sequence[TensorEntry], kept: Collection[str]
    ) -> dict[str, str]:
        """The hashes of the tensors of a file, those that are `kept` written into `staging`."""
        for _ in range(TRIES):
            passing = _PassingFile(staging / file.rfilename, entries, kept)
            try:
                await self._stream(file, passing)
            finally:
                await asyncio.to_thread(passing.close)
            if file.lfs is not None and passing.sha256 == file.lfs.sha256:
                return passing.hashes
            self._meter.done -= file.length
            logger.warning("%s came with wrong bytes from the hub", file.rfilename)
        raise TransferFailed(
            f"{file.rfilename} of {self._model.repository.id} came with other bytes than the hub"
            f" says, {TRIES} times.",
            fix="Try again later; a proxy in between may change it.",
        )

    async def _stream(self, file: HubFile, passing: _PassingFile) -> None:
        loop, together = asyncio.get_running_loop(), bytearray()
        chunks = self._hub.stream(self._model.repository, file.rfilename, 0, file.length)
        before = self._meter.done
        try:
            async for chunk in chunks:
                await self._pace.take(len(chunk))
                together += chunk
                self._meter.done += len(chunk)
                self._meter.arrived("hub", "the hub", len(chunk), loop.time())
                if len(together) >= READ_BYTES:
                    await asyncio.to_thread(passing.take, bytes(together))
                    together.clear()
            await asyncio.to_thread(passing.take, bytes(together))
        except BaseException:
            self._meter.done = before
            raise
        finally:
            await chunks.aclose()

    def _finish(
        self,
        staging: Path,
        tensors: Mapping[str, TensorEntry],
        hashes: Mapping[str, str],
        kept: Collection[str],
    ) -> Path:
        model = self._model
        sha256 = weights_sha256(replace(e, sha256=hashes[name]) for name, e in tensors.items())
        directory = partial_directory(self._models_dir, model.model_id, sha256)
        if (directory / RECORD).exists():
            shutil.rmtree(staging)
            return directory
        record = PartialRecord(1, model.model_id, sha256, model.origin, dict(hashes))
        (staging / _PASSED).unlink()
        write_small(staging, {JOURNAL: journal_of(tensors, kept)})
        write_small(staging, {RECORD: json.dumps(asdict(record)).encode()})
        staging.rename(directory)
        return directory


class _PassingFile:
    """One file; everything blocks. Its `sha256` and the `hashes` of its tensors are those of the
    bytes that were taken, in their order; the tensors that are `kept` are written."""

    def __init__(self, path: Path, entries: Sequence[TensorEntry], kept: Collection[str]) -> None:
        self._path = path
        self._kept = kept
        self._ahead = sorted(entries, key=lambda entry: -entry.offset)  # the next one is the last
        self._at = 0
        self._whole = hashlib.sha256()
        self._hashes = {entry.name: hashlib.sha256() for entry in entries}
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            raise refused_by_disk(path, error) from error

    @property
    def sha256(self) -> str:
        """Of all bytes."""
        return self._whole.hexdigest()

    @property
    def hashes(self) -> dict[str, str]:
        """Of each tensor."""
        return {name: digest.hexdigest() for name, digest in self._hashes.items()}

    def take(self, data: bytes) -> None:
        """The next bytes. Raises DiskFull."""
        self._whole.update(data)
        view, stop = memoryview(data), self._at + len(data)
        while self._ahead and (entry := self._ahead[-1]).offset < stop:
            end = entry.offset + entry.nbytes
            first = max(entry.offset, self._at)
            piece = view[first - self._at : end - self._at]
            self._hashes[entry.name].update(piece)
            if entry.name in self._kept:
                self._write(piece, first)
            if end > stop:
                break
            self._ahead.pop()
        self._at = stop

    def close(self) -> None:
        """Have what was kept on the disk."""
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def _write(self, piece: memoryview, at: int) -> None:
        try:
            while piece:
                count = os.pwrite(self._fd, piece, at)
                piece, at = piece[count:], at + count
        except OSError as error:
            raise refused_by_disk(self._path, error) from error


def _passed(staging: Path) -> dict[str, dict[str, Sha256]]:
    return read_cached(staging / _PASSED, dict[str, dict[str, Sha256]]) or {}
