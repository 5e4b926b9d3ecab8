"""The loop that acts on wishes, over a node that is made up: what it loads, drops and tells."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mesh.deployments.actor import Reconciler, ReconcilerHooks
from mesh.deployments.formats import LoadedFormat
from mesh.deployments.phases import Phase
from mesh.deployments.reconcile import OwnShard, ServedShard
from mesh.deployments.weights import Checkpoint, LocalWeights, OnProgress
from mesh.deployments.wishes import Deployment, Plan, Quant, Replica, Span, Wish
from mesh.errors import MeshError
from mesh.models.builtin import checkpoint_dir
from mesh.models.local import LocalModel
from mesh.types import LayerRange, ModelId, NodeId, ShardId, shard_id

HERE = NodeId("me")
MB = 10


class World:
    """A node that has whatever it serves at once. `free_mb` is its memory beside that."""

    def __init__(self, total_mb: int) -> None:
        self.node, self.own_quant = HERE, "none"
        self.total_mb = total_mb
        self.log: dict[str, Deployment] = {}
        self.has: dict[ShardId, OwnShard] = {}
        self.models: list[ModelId] = []

    def deployments(self) -> dict[str, Deployment]:
        return self.log

    def held(self) -> list[OwnShard]:
        return list(self.has.values())

    def failed(self) -> Mapping[ShardId, MeshError]:
        return {}

    def served(self) -> list[ServedShard]:
        return []

    def free_mb(self) -> int | None:
        return self.total_mb - sum(held.mb for held in self.has.values())

    def need_mb(self, deployment: Deployment, layers: LayerRange) -> int:
        return MB * len(layers)

    def refusal(self, deployment: Deployment, layers: LayerRange) -> MeshError | None:
        return None

    def asked(self) -> list[ModelId]:
        return self.models

    def known(self) -> list[ModelId]:
        return self.models

    async def ask(self, model: LocalModel) -> None:
        self.models = [model.model_id]

    async def ask_no_more(self, model_id: ModelId, *, forget: bool) -> None:
        self.models = []

    async def serve(
        self, deployment: Deployment, layers: LayerRange, on_progress: OnProgress
    ) -> None:
        wish = deployment.wish
        name, quant = shard_id(wish.model_id, layers), wish.quant or self.own_quant
        self.has[name] = OwnShard(
            name, wish.model_id, wish.weights_sha256, layers, MB * len(layers),
            loaded=LoadedFormat(quant if quant != "none" else "fp32", quant),
        )  # fmt: skip

    async def unserve(self, shard: ShardId) -> int:
        del self.has[shard]
        return 0

    def dedicate(self, shards: Collection[ShardId]) -> None:
        """Nothing leaves its device here."""


class Watched:
    """A reconciler of a world in which one deployment is wished, and what it tells."""

    def __init__(self, total_layers_mb: int, checkpoint: Checkpoint, cache: Path) -> None:
        self.world = World(total_layers_mb)
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.checkpoint = checkpoint
        hooks = ReconcilerHooks(self.tell, lambda: None)
        self.loop = Reconciler(self.world, LocalWeights({}, [], cache), hooks, cache)

    def tell(self, kind: str, **fields: Any) -> None:
        self.told.append((kind, fields))

    def wish(self, layers: Sequence[str], quant: Quant = "") -> Deployment:
        """Have these layers here."""
        here = self.checkpoint
        event = f"{len(self.told):064x}"
        wish = Wish("0" * 16, here.model_id, here.weights_sha256, here.total_layers, 40)
        spans = tuple(Span(HERE, LayerRange.parse(each)) for each in layers)
        plan = Plan(wish.deployment, event, 0, (Replica(0, spans),), 1, asked=True)
        made = Deployment(replace(wish, quant=quant), plan, event, HERE, 0)
        self.world.log = {made.id: made}
        self.loop.look()
        return made

    async def until(self, *loaded: tuple[str, str]) -> None:
        """Until exactly these layers are held in these formats, and said to be ready."""
        wanted = {
            (shard_id(self.checkpoint.model_id, LayerRange.parse(each)), quant)
            for each, quant in loaded
        }
        async with asyncio.timeout(20):
            while not self._is(wanted):  # noqa: ASYNC110 - it says so to nobody
                await asyncio.sleep(0.01)

    def _is(self, wanted: set[tuple[ShardId, str]]) -> bool:
        phases = self.loop.phases.all()
        ready = {shard for shard, now in phases.items() if now.phase is Phase.READY}
        held = {(each.shard, each.loaded.quant) for each in self.world.held()}
        return held == wanted and {shard for shard, _ in wanted} <= ready

    def gaps(self) -> list[str]:
        return [str(fields["shard_id"]) for kind, fields in self.told if kind == "deployment_gap"]


async def test_a_gap_that_a_change_opens_is_told_and_no_other_one(tmp_path: Path) -> None:
    found = await LocalWeights({}, [], tmp_path).find(f"{checkpoint_dir()}=builtin")
    watched = Watched(MB * 6, found, tmp_path)
    watched.loop.start()
    try:
        watched.wish(["0-1"])
        await watched.until(("0-1", "none"))
        watched.wish(["0-3"])
        await watched.until(("0-3", "none"))
        assert watched.gaps() == [], "there was room for both"
        watched.wish(["0-2"])
        await watched.until(("0-2", "none"))
        assert watched.gaps() == ["builtin:0-3"], "four layers and three are more than six"
        watched.wish(["0-2"], "int8")
        await watched.until(("0-2", "int8"))
        assert watched.gaps() == ["builtin:0-3", "builtin:0-2"], "both have one name"
    finally:
        await watched.loop.stop()
