"""Takes one batch of a harvest from the HTTP API to the model's asker.

The HTTP API's `mesh.api.services.HarvestControl`. Computes nothing and keeps nothing: which batches
are done is known by whoever asked for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from mesh.errors import BadRequest, Busy, NoRoute
from mesh.models.harvest import HarvestBatch
from mesh.models.local import LocalModel, local_manifest
from mesh.paths import cache_dir
from mesh.pipeline.commands import HarvestOrder
from mesh.pipeline.supervisor import AskerSupervisor
from mesh.types import ModelId

MAX_RUNNING = 8


class Harvests:
    """Runs harvests for the API: one batch of prompts through an asker, files left on the hops."""

    def __init__(
        self, models: Mapping[ModelId, LocalModel], askers: Mapping[ModelId, AskerSupervisor]
    ) -> None:
        self._models = models
        self._askers = askers
        self._running = 0

    async def run(self, model: str, order: Mapping[str, Any]) -> dict[str, Any]:
        """Run one batch.

        Raises ModelNotFound, BadRequest for a pattern that fits no module, Busy, and what
        `mesh.pipeline.harvest.harvest` raises.
        """
        model_id = ModelId(model)
        manifest = await asyncio.to_thread(local_manifest, self._models, model_id, cache_dir())
        of_model = {"pattern": order["module"], "layer_prefix": manifest.layer_prefix, "rows": 1}
        batch = HarvestBatch.from_fields({**order, **of_model})
        asked = HarvestOrder(batch, tuple(order["texts"]), order["max_tokens"])
        if not batch.fits_any(manifest.weights):
            raise BadRequest(
                f"module: {batch.pattern!r} fits no module of a layer of {model}.",
                fix=f"Use a pattern like {manifest.layer_prefix}* or {manifest.layer_prefix}*.mlp.",
                param="module",
            )
        asker = self._askers.get(model_id)
        if asker is None:
            raise NoRoute(f"{model} is at rest.", fix="Ask it something first, which wakes it.")
        if self._running >= MAX_RUNNING:
            raise Busy(f"{self._running} batches are being harvested here.", fix="Wait for one.")
        self._running += 1
        try:
            result = await asker.harvest(asked)
        finally:
            self._running -= 1
        return {"batch": batch.batch, "weights_sha256": manifest.weights_sha256, **result}
