"""The parts that follow and change deployments on this node, put together.

Part of the composition root, like `mesh.node.node`, which starts and stops it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mesh.config import Config
from mesh.deployments.actor import Reconciler, ReconcilerHooks
from mesh.deployments.control import Deploying
from mesh.deployments.laid import PAUSED
from mesh.deployments.listing import DeploymentRows
from mesh.deployments.phases import Phase, PhaseProgress
from mesh.deployments.replan import Replanner
from mesh.deployments.waking import Sleeper, Waker
from mesh.deployments.weights import LocalWeights
from mesh.deployments.wishes import live
from mesh.discovery.progress import (
    MAX_MODELS,
    MAX_SPANS,
    NodeProgress,
    SpanProgress,
    shortened,
)
from mesh.health.eventstream import EventFeed
from mesh.node.deployed_weights import DeployedWeights
from mesh.node.deploying import House
from mesh.node.fetched_weights import FetchedWeights
from mesh.node.holdings import Holdings
from mesh.node.weights import Weights
from mesh.paths import StatePaths, cache_dir
from mesh.types import ShardId


class DeploymentsHere:
    """The parts that follow and change deployments on this node. `start`, then `stop`."""

    def __init__(
        self,
        config: Config,
        house: House,
        held: Holdings,
        events: EventFeed,
        fetching: Weights,
        advertise: Callable[[], None],
    ) -> None:
        """`advertise` has neighbours told how far this node is."""
        self._held = held
        folders = [each for each in (config.models_dir, *_folders(config)) if each is not None]
        self.house = house
        named = StatePaths(config.state_dir).named_checkpoints
        local = LocalWeights(held.models, folders, cache_dir(), named)
        thin = config.distributed.thin == "always"
        weights = self.weights = FetchedWeights(local, fetching, cache_dir(), thin=thin)
        self._deployed = DeployedWeights(house.deployments, local, fetching.fetcher.offer)

        def changed() -> None:
            events.stir()
            advertise()

        self.reconciler = Reconciler(
            house, weights, ReconcilerHooks(events.emit, changed), cache_dir()
        )
        reconciler = self.reconciler
        rows = DeploymentRows(house, reconciler.phases)
        sleeper = self._sleeper = Sleeper(house, events.emit, rows.is_on_its_way)
        self.control = Deploying(
            house, weights, rows, reconciler.call_for, sleeper.up_s, sleeper.stay
        )
        self._replanner = Replanner(house, config.deployments.replan_seconds, events.emit)
        patience_s = config.deployments.patience_seconds
        self.waker = Waker(
            self.control, house.is_askable, reconciler.call_for, patience_s, house.loading,
            lambda model: model in held.askers,
        )  # fmt: skip

    def progress(self, *, is_paused: bool) -> NodeProgress:
        """What neighbours are told: the spans that this node works at, or keeps back while it is
        paused, what it asks, and whether it is paused."""
        spans = []
        devices = len(self._held.host.processes)
        for deployment in live(self.house.deployments()):
            for shard in deployment.shards_of(self.house.node, devices):
                now = self.reconciler.phases.get(shard)
                if is_paused and (now is None or now.phase is Phase.READY):
                    now = _PAUSED
                if now is not None and now.phase is not Phase.READY:
                    spans.append(told_of(shard, now))
        asks = [name for name, asker in self._held.askers.items() if asker.is_ready]
        return NodeProgress(tuple(spans[:MAX_SPANS]), tuple(asks[:MAX_MODELS]), is_paused)

    def start(self) -> None:
        """Follow the log."""
        self.reconciler.start()
        self._deployed.start()
        self._replanner.start()
        self._sleeper.start()

    async def stop(self) -> None:
        """Follow it no more."""
        await self.control.close()
        await self._deployed.stop()
        await self._replanner.stop()
        await self._sleeper.stop()
        await self.reconciler.stop()


_PAUSED = PhaseProgress(Phase.AWAY, reason=PAUSED)


def told_of(shard: ShardId, now: PhaseProgress) -> SpanProgress:
    """What neighbours are told of a span; `Layouts.told` reads it."""
    reason, error = shortened(now.reason or ""), now.error
    code, fix = ("", "") if error is None else (error.code, shortened(error.fix))
    return SpanProgress(
        shard, now.phase.value, now.done, now.total, reason, now.lacks_memory, code, fix
    )


def _folders(config: Config) -> list[Path]:
    from huggingface_hub.constants import HF_HUB_CACHE

    return [StatePaths(config.state_dir).models_dir, cache_dir() / "models", Path(HF_HUB_CACHE)]
