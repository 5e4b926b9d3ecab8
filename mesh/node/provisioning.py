"""Weights for deployments: from this disk, else from neighbours, else from the hub.

What `mesh.deployments` asks for as a `WeightsSource`, over what `mesh.transfers` does. Whatever is
found on this disk is given to the neighbours too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mesh.deployments.weights import Checkpoint, LocalWeights, OnProgress, checkpoint
from mesh.errors import BadRequest, ModelNotFound
from mesh.models.manifest import Manifest, read_manifest
from mesh.transfers.commands import Model, PeerHolding
from mesh.transfers.supervisor import FetcherSupervisor
from mesh.types import LayerRange, ModelId

LOOK_S = 0.25
"""How often the bytes of a fetch are looked at."""


class Provisioning:
    """See `mesh.deployments.weights.WeightsSource`."""

    def __init__(
        self, local: LocalWeights, fetcher: FetcherSupervisor, cache_dir: Path | None
    ) -> None:
        self._local = local
        self._fetcher = fetcher
        self._cache_dir = cache_dir

    async def find(self, model: str) -> Checkpoint:
        """What somebody means by a name or a directory.

        Where it is not on this disk, its small files and its ends are fetched for that. Raises
        ModelNotFound, BadRequest where neighbours mean different weights by it, and what fetching
        raises.
        """
        try:
            return await self._local.find(model)
        except ModelNotFound as nowhere:
            found = _one_of(self._fetcher.peers, model)
            if found is not None:
                directory = await self._fetcher.ensure(found.model_id, found.weights_sha256, ())
            elif model.count("/") == 1 and not model.startswith(("/", ".", "~")):
                directory = await self._fetcher.pull(model, ())
            else:
                raise ModelNotFound(
                    f"{nowhere.message} No neighbour has it.",
                    fix="Name a directory, a model that a neighbour has, or one of the hub as"
                    " ORG/NAME.",
                    param="model",
                ) from None
        return checkpoint(await asyncio.to_thread(self._manifest, directory))

    async def ensure(
        self,
        model_id: ModelId,
        weights_sha256: str,
        layers: Sequence[LayerRange],
        on_progress: OnProgress,
    ) -> Path:
        """See `WeightsSource`."""
        with suppress(ModelNotFound):
            here = await self._local.ensure(model_id, weights_sha256, layers, lambda *_: None)
            if (size := await asyncio.to_thread(self._size, here, layers)) is not None:
                on_progress(size, size)
                self._fetcher.offer(Model(model_id, here))
                return here
        fetching = asyncio.ensure_future(self._fetcher.ensure(model_id, weights_sha256, layers))
        try:
            while not fetching.done():
                await asyncio.wait([fetching], timeout=LOOK_S)
                for each in self._fetcher.transfers:
                    if each.weights_sha256 == weights_sha256 and each.total_bytes:
                        on_progress(each.done_bytes, each.total_bytes)
        finally:
            fetching.cancel()
        directory = await fetching
        if (size := await asyncio.to_thread(self._size, directory, layers)) is not None:
            on_progress(size, size)
        return directory

    # Private: these block.

    def _manifest(self, directory: Path) -> Manifest:
        return read_manifest(directory, cache_dir=self._cache_dir)

    def _size(self, directory: Path, layers: Sequence[LayerRange]) -> int | None:
        """Bytes of the ends and of these layers; None where some of that is not here."""
        manifest = self._manifest(directory)
        wanted = [*manifest.ends_tensors()]
        for span in layers:
            wanted += manifest.layer_tensors(span)
        return sum(e.nbytes for e in wanted) if all(e.present for e in wanted) else None


def _one_of(peers: Sequence[PeerHolding], model: str) -> PeerHolding | None:
    """A neighbour that has some of the model's weights; None where none has.

    Raises BadRequest where they mean different ones by its name.
    """
    named = [
        peer
        for peer in peers
        if peer.weights_sha256 and model in (peer.model_id, peer.origin.partition("@")[0])
    ]
    weights = {peer.weights_sha256: peer.node_name for peer in named}
    if len(weights) > 1:
        said = ", ".join(f"{sha[:12]} at {node}" for sha, node in sorted(weights.items()))
        raise BadRequest(
            f"{model!r} has different weights on different nodes: {said}.",
            fix="Give one of them its own id (`--model PATH=ID`), or name a directory.",
            param="model",
        )
    return named[0] if named else None
