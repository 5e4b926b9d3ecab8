"""Read a model of the hub of which only a part is to stay: bytes are hashed as they pass.

For a disk that has no room for all of it. What is wanted later comes by ranges, as the hashes are
known then. A file that has passed is not asked for again; one that was cut off is, from its
beginning, as a hash cannot be put away half done.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from mesh.codec import Sha256
from mesh.models.disk_room import require_room
from mesh.models.hashing import read_cached, weights_sha256, write_json_atomically
from mesh.models.header import TensorEntry
from mesh.models.manifest import Manifest, read_manifest
from mesh.models.partial import RECORD, PartialRecord, partial_directory
from mesh.models.partial_draft import create_sparse, refused_by_disk
from mesh.models.partial_writer import lock_directory
from mesh.processes.tasks import to_its_end
from mesh.transfers.fetching import WantedLayers
from mesh.transfers.hub import Hub, HubFile
from mesh.transfers.hub_download import TRIES, HubDownload
from mesh.transfers.hub_files import HubModel, become_checkpoint, note_read, safetensors_headers
from mesh.transfers.hub_gguf import gguf_headers
from mesh.transfers.meter import Meter

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PASSED = "passed.json"
"""In the staging directory: what is known of each file that has passed."""


class HubPassing:
    """One model; `meter` counts what has passed of its weights."""

    def __init__(
        self, hub: Hub, model: HubModel, models_dir: Path, download: HubDownload, meter: Meter
    ) -> None:
        self._hub = hub
        self._model = model
        self._models_dir = models_dir
        self._download = download
        self._meter = meter

    async def run(
        self,
        whole: Path,
        small: Mapping[str, bytes],
        weights: Sequence[HubFile],
        wanted: WantedLayers,
        then: Callable[[Path], T],
    ) -> T:
        """What `then` gives for the directory of the checkpoint, with what is `wanted` of it. What
        was staged in `whole`, to have all of it, goes once it is sure that there is room without
        that.

        Less of it is there where the wish was another one as a file passed, or where a part of the
        checkpoint was here already, which is left as it is. Raises as `HubPull.run`.
        """
        model = self._model
        logger.info(
            "model=%s is read for its hashes; only what is wanted of it is kept", model.model_id
        )
        staging = whole.with_name(f"{whole.name}.passing")
        headers = gguf_headers if model.gguf else safetensors_headers
        sparse = await headers(self._hub, model.repository, weights)
        first = weights[0].name
        await asyncio.to_thread(create_sparse, staging, sparse, small, first)
        lock = await asyncio.to_thread(lock_directory, staging)
        try:
            manifest = await asyncio.to_thread(read_manifest, staging, is_hashed=False)
            kept = set(wanted.names(manifest))
            passed = await asyncio.to_thread(_read_passed, staging)
            ahead = [e for name, e in manifest.tensors.items() if name in kept]
            need = sum(each.nbytes for each in ahead if each.file.name not in passed)
            await to_its_end(_make_room, whole, need)
            self._meter.total = sum(file.length for file in weights)
            for file in weights:
                name = file.name
                if name in passed:
                    self._meter.done += file.length
                    continue
                entries = [each for each in manifest.tensors.values() if each.file.name == name]
                passed[name] = await self._one(staging / name, file, entries, kept)
                await asyncio.to_thread(_write_passed, staging, passed)
            return await to_its_end(lambda: then(self._finish(staging, manifest, passed.values())))
        finally:
            os.close(lock)

    # Private

    async def _one(
        self, path: Path, file: HubFile, entries: Sequence[TensorEntry], kept: Collection[str]
    ) -> _Passed:
        for _ in range(TRIES):
            passing = _PassingFile(path, entries, kept)
            before = self._meter.done
            try:
                await self._download.pour(file, 0, passing.take)
            except BaseException:
                self._meter.done = before
                raise
            finally:
                await asyncio.to_thread(passing.close)
            if file.lfs is not None and passing.sha256 == file.lfs.sha256:
                return passing.found
            self._meter.done = before
            logger.warning("%s came with wrong bytes from the hub", file.rfilename)
        raise self._download.wrong(file)

    def _finish(self, staging: Path, manifest: Manifest, passed: Collection[_Passed]) -> Path:
        hashes = {name: sha256 for each in passed for name, sha256 in each.hashes.items()}
        complete = {name for each in passed for name in each.kept}
        entries = [replace(e, sha256=hashes[name]) for name, e in manifest.tensors.items()]
        sha256, model = weights_sha256(entries), self._model
        directory = partial_directory(self._models_dir, model.model_id, sha256)
        record = PartialRecord(1, model.model_id, sha256, model.origin, hashes, is_read=True)
        if (directory / RECORD).exists():
            shutil.rmtree(staging)
            note_read(directory, record)
            return directory
        (staging / _PASSED).unlink()
        become_checkpoint(staging, directory, record, complete)
        return directory


@dataclass(frozen=True, slots=True)
class _Passed:
    """A file: the hashes of its tensors, and which of them were written."""

    hashes: dict[str, Sha256]
    kept: list[str]


class _PassingFile:
    """One file; everything blocks. Its `sha256`, and what is `found` of its tensors, are of the
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
    def found(self) -> _Passed:
        """Of each tensor."""
        hashes = {name: digest.hexdigest() for name, digest in self._hashes.items()}
        return _Passed(hashes, [name for name in hashes if name in self._kept])

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


def _make_room(whole: Path, need: int) -> None:
    """Remove what is staged there; raises DiskFull, with all of it left, where that is not enough
    for so many bytes."""
    staged = sum(file.stat().st_size for file in whole.rglob("*"))
    require_room(whole.parent, need - staged)
    shutil.rmtree(whole)


def _read_passed(staging: Path) -> dict[str, _Passed]:
    return read_cached(staging / _PASSED, dict[str, _Passed]) or {}


def _write_passed(staging: Path, passed: Mapping[str, _Passed]) -> None:
    write_json_atomically(staging / _PASSED, {name: asdict(each) for name, each in passed.items()})
