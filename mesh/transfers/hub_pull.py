"""Fetch a whole model from the hub, once: every byte of its weights is read and hashed.

Needed where nobody in the hearth knows the hashes of the tensors. The files lie in a staging
directory until all of them are there and match what the hub says; then it becomes a checkpoint like
any that was fetched (`mesh.models.partial`), with everything in it. Where the disk has no room for
that, only what is wanted stays (`hub_passing`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from mesh.errors import ModelInUse
from mesh.models.hashing import hash_tensors, weights_sha256
from mesh.models.header import TensorEntry
from mesh.models.manifest import read_manifest, read_tensors
from mesh.models.partial import RECORD, PartialRecord, partial_directory
from mesh.models.partial_draft import SparseFile, create_sparse
from mesh.models.partial_writer import PartialWriter, WriteOutcome, lock_directory, remove_partial
from mesh.processes.tasks import to_its_end
from mesh.transfers.fetching import WantedLayers
from mesh.transfers.hub import Hub
from mesh.transfers.hub_download import HubDownload, has_room_for, make_directory, require_room_for
from mesh.transfers.hub_files import (
    HubModel,
    become_checkpoint,
    note_read,
    read_small,
    weights_files,
    write_small,
)
from mesh.transfers.hub_gguf import gguf_headers
from mesh.transfers.hub_passing import HubPassing
from mesh.transfers.meter import Meter
from mesh.transfers.pacing import Pace
from mesh.transfers.staged import staging_of

T = TypeVar("T")


class HubPull:
    """One model; `meter` counts what came of its weights."""

    def __init__(
        self,
        hub: Hub,
        model: HubModel,
        models_dir: Path,
        pace: Pace,
        meter: Meter,
    ) -> None:
        self._hub = hub
        self._model = model
        self._models_dir = models_dir
        self._download = HubDownload(hub, model.repository, pace, meter)
        self._passing = HubPassing(hub, model, models_dir, self._download, meter)
        self.staging = staging_of(models_dir, model.model_id, model.repository.sha)

    async def run(self, wanted: WantedLayers, *, drop: bool, then: Callable[[Path], T]) -> T:
        """What `then`, which may block, gives for the directory of the checkpoint, once all of it
        is there; or what is `wanted`, where that is to be all or the disk has no room for more.

        Who is cancelled while it becomes one hears so after that, and after `then`: until it is one
        nobody else is let to its files, and what came is known to be here.

        Raises BadCheckpoint for a repository without safetensors, UnsupportedFamily for one whose
        weights are stored quantised, both for a GGUF model that is not read, DiskFull,
        TransferFailed for bytes that are wrong twice, Busy while another process of this user does
        it, and what the hub raises.
        """
        small, weights = dict[str, bytes](), self._model.gguf
        if not weights:
            small = await read_small(self._hub, self._model.repository)
            weights = weights_files(self._model.repository, small)
        await asyncio.to_thread(make_directory, self.staging)
        files = {self.staging / each.name: each for each in weights}
        is_part = wanted.layers is not None
        lock = await asyncio.to_thread(lock_directory, self.staging)
        try:
            if is_part and (drop or not await asyncio.to_thread(has_room_for, files)):
                return await self._passing.run(self.staging, small, weights, wanted, then)
            if self._model.gguf:
                await self._require_readable()
            await asyncio.to_thread(require_room_for, files)
            await asyncio.to_thread(write_small, self.staging, small)
            await self._download.fetch(files)
            return await to_its_end(lambda: then(self._finish()))
        finally:
            os.close(lock)

    async def _require_readable(self) -> None:
        """Raise what a GGUF model is refused with for its headers, before all of it comes."""
        files = self._model.gguf
        directory = self.staging.with_name(f".{self.staging.name}.headers")
        headers = await gguf_headers(self._hub, self._model.repository, files)
        await asyncio.to_thread(_require_manifest, directory, headers, files[0].name)

    def _finish(self) -> Path:
        """Hash the tensors, and make the staging directory a checkpoint."""
        tensors, _ = hash_tensors(read_tensors(self.staging), cache_dir=None)
        sha256 = weights_sha256(tensors.values())
        model = self._model
        names = {name: entry.sha256 for name, entry in tensors.items()}
        record = PartialRecord(1, model.model_id, sha256, model.origin, names, is_read=True)
        directory = partial_directory(self._models_dir, model.model_id, sha256)
        if (directory / RECORD).exists():  # a part of it came before
            try:
                remove_partial(directory)
            except ModelInUse:
                _fill(directory, tensors)
                note_read(directory, record)
                shutil.rmtree(self.staging)
                return directory
        become_checkpoint(self.staging, directory, record, names)
        return directory


def _require_manifest(directory: Path, headers: Mapping[str, SparseFile], first: str) -> None:
    shutil.rmtree(directory, ignore_errors=True)  # of one who was killed
    try:
        create_sparse(directory, headers, {}, first)
        read_manifest(directory / first, is_hashed=False)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _fill(directory: Path, tensors: Mapping[str, TensorEntry]) -> None:
    """Put these into the checkpoint that is there, from where they lie. Blocks. Raises Busy,
    DiskFull."""
    with PartialWriter(directory) as writer:
        writer.require_room(tensors)
        for name, entry in tensors.items():
            with entry.file.open("rb") as file:
                for _ in range(2):  # what of its pieces came before may be wrong
                    for start, stop in writer.missing(name):
                        file.seek(entry.offset + start)
                        writer.put(name, start, [file.read(stop - start)])
                    if writer.settle(name) is WriteOutcome.COMPLETE:
                        break
