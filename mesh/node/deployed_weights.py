"""Offers the others what lies on this disk of what is deployed.

Whoever deploys a checkpoint offers it, and so does whoever serves it. After a restart a node that
does neither would not, and others may lack it: a machine that takes layers over, or has a new disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from mesh.deployments.weights import LocalWeights
from mesh.deployments.wishes import Deployment, live
from mesh.processes.tasks import end, spawn
from mesh.transfers.commands import LocalCheckpoint
from mesh.types import ModelId

_LOOK_S = 5.0


class DeployedWeights:
    """`start`, then `stop`. `offer` is called with what is here, once for each deployed model."""

    def __init__(
        self,
        deployments: Callable[[], Mapping[str, Deployment]],
        local: LocalWeights,
        offer: Callable[[LocalCheckpoint], None],
    ) -> None:
        self._deployments = deployments
        self._local = local
        self._offer = offer
        self._looked: set[tuple[ModelId, str]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look for what is deployed now, and for what will be."""
        self._task = spawn(self._run(), "deployed weights")

    async def stop(self) -> None:
        """Look for nothing any more; what is offered stays so."""
        await end([self._task])

    async def _run(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(_LOOK_S)

    async def _look(self) -> None:
        wanted = {
            (each.wish.model_id, each.wish.weights_sha256)
            for each in live(self._deployments())
            if each.is_wanted
        }
        self._looked &= wanted
        for what in sorted(wanted - self._looked):
            self._looked.add(what)
            if (place := await self._local.kept(*what)) is not None:
                self._offer(LocalCheckpoint(what[0], place))
