"""Models that somebody wants deployed and that are read first, because nobody knows their hash.

A wish names the hash of the weights, which for a repository of the hub is known once all of it was
read. That takes as long as it takes; meanwhile it is in the list of deployments, under the id that
the deployment will have, as one span on the machine that reads. In memory only: after a restart it
is asked for again, and goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mesh.deployments.listing import DeploymentRows, SeenDeployment
from mesh.deployments.phases import Phase, PhaseProgress
from mesh.deployments.weights import Checkpoint, WeightsSource
from mesh.deployments.wishes import Deployment, Wish
from mesh.errors import Busy, MeshError, as_mesh_error
from mesh.processes.tasks import end, spawn
from mesh.types import LayerRange, NodeId

MAX_READINGS = 16
"""Models that are read, or could not be, at a time."""
_WHY = "all of it comes from the hub once, as nobody here knows its hashes"

Then = Callable[[Checkpoint], Awaitable[None]]


@dataclass(slots=True)
class _Reading:
    wish: Wish
    layers: Sequence[LayerRange]
    then: Then
    wall_ms: int
    far: PhaseProgress
    task: asyncio.Task[None] | None = None
    error: MeshError | None = None
    is_read: bool = False
    """What is wished for it may be signed by now."""


class ReadingModels:
    """`begin` reading for a wish without a hash; `close` at the end."""

    def __init__(self, weights: WeightsSource, rows: DeploymentRows, node: NodeId) -> None:
        self._weights = weights
        self._rows = rows
        self._node = node
        self._readings: dict[str, _Reading] = {}

    def begin(self, wish: Wish, layers: Sequence[LayerRange], then: Then) -> str:
        """Read the model of a wish, then have `then` wish for what was found; the wish's id.
        `layers` are those that stay here where the disk has no room for all.

        A model that is being read is so for the latest wish, under the id of the first. Raises
        Busy when too many are.
        """
        for known in [
            each for each in self._readings.values() if each.wish.model_id == wish.model_id
        ]:
            if known.error is None:
                known.wish, known.then = replace(wish, deployment=known.wish.deployment), then
                return known.wish.deployment
            del self._readings[known.wish.deployment]
        self._forget_failed()
        far = PhaseProgress(Phase.PROVISIONING, reason=_WHY)
        reading = _Reading(wish, layers, then, round(time.time() * 1000), far)
        self._readings[wish.deployment] = reading
        reading.task = spawn(self._read(reading), f"read {wish.model_id}")
        return wish.deployment

    def view(self) -> list[dict[str, Any]]:
        """Their rows among those of deployments."""
        return [self._row(each) for each in self._readings.values()]

    def seen(self, model: str) -> list[SeenDeployment]:
        """What is seen of those of a model."""
        found = [each for each in self._readings.values() if each.wish.model_id == model]
        return [self._seen(each) for each in found]

    def end(self, model: str) -> list[tuple[Wish, bool]]:
        """Read those of a model, or that of an id, no further; what was wished for, and whether it
        may be signed by now."""
        found = [
            each
            for each in self._readings.values()
            if model in (each.wish.deployment, each.wish.model_id)
        ]
        for each in found:
            del self._readings[each.wish.deployment]
            if each.task is not None:
                each.task.cancel()
        return [(each.wish, each.is_read) for each in found]

    async def close(self) -> None:
        """Read no more."""
        await end(each.task for each in self._readings.values())

    # Private

    async def _read(self, reading: _Reading) -> None:
        def heard(done: int, total: int, bytes_per_s: float, note: str) -> None:
            reading.far = replace(
                reading.far, done=min(done, total), total=total, bytes_per_s=bytes_per_s,
                reason=note or _WHY,
            )  # fmt: skip

        model = reading.wish.model_id
        try:
            found = await as_mesh_error(
                self._weights.read(model, reading.layers, heard), "reading a model"
            )
            reading.is_read = True
            then: Then | None = None
            while reading.then is not then:  # somebody may wish for it otherwise meanwhile
                then = reading.then
                await as_mesh_error(then(found), "deploying what was read")
        except MeshError as error:
            reading.error = error
            reason = f"{error.message} {error.fix}".strip()
            reading.far = replace(reading.far, phase=Phase.FAILED, reason=reason, bytes_per_s=0.0)
        else:
            self._readings.pop(reading.wish.deployment, None)

    def _forget_failed(self) -> None:
        failed = [name for name, each in self._readings.items() if each.error is not None]
        while len(self._readings) >= MAX_READINGS:
            if not failed:
                raise Busy(f"{MAX_READINGS} models are being read.", fix="Wait for some of them.")
            del self._readings[failed.pop(0)]

    def _row(self, reading: _Reading) -> dict[str, Any]:
        error = None if reading.error is None else reading.error.to_dict()
        row = self._rows.row(self._seen(reading))
        return row | {"state": reading.far.phase.value, "error": error}

    def _seen(self, reading: _Reading) -> SeenDeployment:
        deployment = Deployment(reading.wish, None, "", self._node, reading.wall_ms)
        return self._rows.read_here(deployment, reading.far)
