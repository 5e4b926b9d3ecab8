"""The fetches for shards that this node is to load, and the models whose files have come.

One owner of their tasks. Which are let in, and when they are loaded, `mesh.deployments.reconcile`
decides; how weights are fetched whoever begins a fetch says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace

from mesh.deployments.phases import Phase, Phases
from mesh.deployments.reconcile import OwnShard, ShardStage
from mesh.errors import MeshError, as_mesh_error
from mesh.models.local import LocalModel
from mesh.processes.tasks import end, spawn
from mesh.types import ShardId

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Fetch:
    shard: OwnShard
    task: asyncio.Task[None] | None = None
    model: LocalModel | None = None


class Provisioning:
    """`begin` fetches and `take` what has come. `on_end` is called when a fetch has ended."""

    def __init__(self, phases: Phases, on_end: Callable[[], None]) -> None:
        self._phases = phases
        self._on_end = on_end
        self._fetches: dict[ShardId, _Fetch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Those that were given up as well, until they have ended."""

    def begin(self, shard: OwnShard, work: Callable[[], Awaitable[LocalModel]]) -> None:
        """Have the weights of a shard fetched, which is not here yet in any way."""
        fetch = self._fetches[shard.shard] = _Fetch(replace(shard, state=ShardStage.PROVISIONING))
        task = fetch.task = spawn(self._run(fetch, work), f"fetch: {shard.shard}")
        self._tasks.add(task)

        def ended(_: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if fetch.model is None and self._fetches.get(shard.shard) is fetch:
                del self._fetches[shard.shard]
            self._on_end()

        task.add_done_callback(ended)

    def to_come(self) -> list[OwnShard]:
        """What is being fetched or has come, in the order in which it was begun."""
        return [fetch.shard for fetch in self._fetches.values()]

    def take(self, shard: ShardId) -> LocalModel:
        """The model of a shard whose weights have come, which is now somebody else's to load."""
        model = self._fetches.pop(shard).model
        assert model is not None  # noqa: S101 - it is PROVISIONED
        return model

    def keep_only(self, shards: Collection[ShardId]) -> None:
        """Give up all others; what has come of them stays on the disk."""
        for shard in [each for each in self._fetches if each not in shards]:
            task = self._fetches.pop(shard).task
            if task is not None:
                task.cancel()

    async def stop(self) -> None:
        """Give up all."""
        self._fetches.clear()
        await end(self._tasks)

    async def _run(self, fetch: _Fetch, work: Callable[[], Awaitable[LocalModel]]) -> None:
        shard = fetch.shard.shard
        self._phases.put(shard, Phase.PROVISIONING)
        try:
            model = await as_mesh_error(work(), f"fetching {shard}")
        except MeshError as error:
            logger.warning("shard=%s cannot be brought up: %s", shard, error)
            if self._fetches.get(shard) is fetch:
                self._phases.failed(shard, error, asyncio.get_running_loop().time())
        else:
            fetch.model, fetch.shard = model, replace(fetch.shard, state=ShardStage.PROVISIONED)
