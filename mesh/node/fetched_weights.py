"""Weights for deployments: from this disk, or fetched from neighbours or the hub.

Part of the composition root: `mesh.deployments` asks for weights, `mesh.transfers` moves them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from mesh.deployments.weights import Checkpoint, LocalWeights, OnProgress, checkpoint
from mesh.errors import ModelNotFound
from mesh.models.gguf.container import SUFFIX
from mesh.models.hub_cache import checkpoint_name, plain_name, split_name
from mesh.models.manifest import Manifest, read_manifest
from mesh.node.weights import Weights
from mesh.processes.tasks import end, spawn
from mesh.transfers.commands import LocalCheckpoint
from mesh.transfers.documents import wanted_tensors
from mesh.transfers.hub import REPOSITORY
from mesh.types import LayerRange, ModelId

_LOOK_S = 0.5


class FetchedWeights:
    """A `WeightsSource`: what is on this disk, else what can be fetched."""

    def __init__(
        self, local: LocalWeights, weights: Weights, cache_dir: Path | None, *, thin: bool
    ) -> None:
        """`thin`: this node leaves the ends of what it asks to the first and the last hop."""
        self._thin = thin
        self._local = local
        self._weights = weights
        self._cache_dir = cache_dir

    async def find(self, model: str) -> Checkpoint:
        """See `WeightsSource`. What is on this disk is offered to the others from now on."""
        try:
            manifest = await self._local.manifest(model)
        except ModelNotFound:
            return checkpoint(await self.manifest(model))
        self._weights.fetcher.offer(LocalCheckpoint(manifest.model_id, manifest.path))
        return checkpoint(manifest)

    async def manifest(self, model: str) -> Manifest:
        """Of what somebody means by a name or a directory.

        Of a repository of the hub that nobody has read only the headers are fetched: its manifest
        is not hashed. Raises as `find`.
        """
        try:
            return await self._local.manifest(model)
        except ModelNotFound:
            fetcher = self._weights.fetcher
            await fetcher.has_looked()
            model = plain_name(model)
            known = self._weights.known(model)
            repository, file = split_name(model)
            if known is None and "/" in model and REPOSITORY.fullmatch(repository) is not None:
                headers = await fetcher.headers(model)
                name = _gguf_name(headers, file) if headers.suffix == SUFFIX else None
                return await asyncio.to_thread(
                    read_manifest, headers, model_id=name, is_hashed=False
                )
            if known is None:
                raise
            directory = await fetcher.ensure(*known, (), ends=False)
        return await asyncio.to_thread(read_manifest, directory, cache_dir=self._cache_dir)

    async def read(
        self, model: str, layers: Sequence[LayerRange], on_progress: OnProgress
    ) -> Checkpoint:
        found = await self.find(model)
        if found.weights_sha256:
            return found
        model = plain_name(model)
        telling = spawn(self._tell(model, "", on_progress), f"progress of {model}")
        try:
            ends = bool(layers) or not self._thin
            path = await self._weights.fetcher.pull(model, layers, ends=ends)
        finally:
            await end([telling])
        # As it was asked for: the same weights may lie there under another name.
        manifest = await asyncio.to_thread(
            read_manifest, path, model_id=ModelId(model), cache_dir=self._cache_dir
        )
        return checkpoint(manifest)

    async def ensure(
        self,
        model_id: ModelId,
        weights_sha256: str,
        layers: Sequence[LayerRange],
        on_progress: OnProgress,
        *,
        runs_ends: bool,
    ) -> Path:
        ends = runs_ends or not self._thin
        try:
            directory = await self._local.ensure(model_id, weights_sha256, layers, on_progress)
            if await asyncio.to_thread(self._has, directory, model_id, tuple(layers), ends):
                self._weights.fetcher.offer(LocalCheckpoint(model_id, directory))
                return directory
        except ModelNotFound:
            pass
        telling = spawn(
            self._tell(model_id, weights_sha256, on_progress), f"progress of {model_id}"
        )
        try:
            return await self._weights.fetcher.ensure(model_id, weights_sha256, layers, ends=ends)
        finally:
            await end([telling])

    def _has(
        self, directory: Path, model_id: ModelId, layers: tuple[LayerRange, ...], ends: bool
    ) -> bool:
        manifest = read_manifest(directory, model_id=model_id, cache_dir=self._cache_dir)
        names = wanted_tensors(manifest, layers, ends=ends)
        return all(manifest.tensors[name].present for name in names)

    async def _tell(self, model: str, weights_sha256: str, on_progress: OnProgress) -> None:
        """`weights_sha256` is '' of what is read for its hash."""
        while True:
            for transfer in self._weights.fetcher.transfers:
                which = (transfer.model_id, transfer.weights_sha256)
                if which == (model, weights_sha256) and (transfer.total_bytes or transfer.note):
                    far = transfer.done_bytes, transfer.total_bytes, transfer.bytes_per_s
                    on_progress(*far, transfer.note)
            await asyncio.sleep(_LOOK_S)


def _gguf_name(headers: Path, file: str) -> ModelId:
    """What a GGUF model of the hub is called, also where its repository was asked for by a name
    that it had before. `headers`: see `hub_gguf.fetch_gguf_headers`."""
    repository = checkpoint_name(headers.parent.parent)
    return ModelId(f"{repository}/{file}") if file else repository
