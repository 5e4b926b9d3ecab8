"""The loop that acts on wishes, over a node that is made up: what it loads, drops and tells."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh.deployments.actor import Reconciler, ReconcilerHooks
from mesh.deployments.formats import LoadedFormat
from mesh.deployments.phases import Phase, PhaseProgress
from mesh.deployments.reconcile import (
    MAX_PROVISIONED,
    LoadAction,
    OwnShard,
    ServedShard,
    ShardStage,
)
from mesh.deployments.weights import Checkpoint, LocalWeights, OnProgress
from mesh.deployments.wishes import Deployment, Plan, Quant, Replica, Span, Wish
from mesh.errors import MeshError, NotFound, TransferFailed, WeightsMismatch
from mesh.models.builtin import checkpoint_dir
from mesh.models.local import LocalModel
from mesh.types import LayerRange, ModelId, NodeId, ShardId, shard_id
from tests.checkpoints import make_checkpoint

HERE = NodeId("me")
MB = 10


class World:
    """A node of so much memory. Loading takes until `is_quick` is set, which it is."""

    def __init__(self, total_mb: int) -> None:
        self.node, self.own_quant = HERE, "none"
        self.total_mb = total_mb
        self.log: dict[str, Deployment] = {}
        self.has: dict[ShardId, OwnShard] = {}
        self.models: dict[ModelId, str] = {}
        self.loads: list[str] = []
        self.is_quick = asyncio.Event()
        self.is_quick.set()
        self.quants: dict[ModelId, str] = {}
        """How those are asked."""
        self.is_broken = False
        self.is_odd = False
        """Asked what it serves it breaks."""
        self.drops = 0
        self.looked_at: set[ModelId] = set()
        self.others: list[ServedShard] = []

    def deployments(self) -> dict[str, Deployment]:
        return self.log

    def held(self) -> list[OwnShard]:
        """Of what weights they are is known by the models."""
        return [
            replace(each, weights_sha256=self.models.get(each.model_id, ""))
            for each in self.has.values()
        ]

    def failed(self) -> Mapping[ShardId, MeshError]:
        return {}

    def served(self) -> list[ServedShard]:
        if self.is_odd:
            raise RuntimeError("a mistake of ours")
        return self.others

    def free_mb(self) -> dict[str, int | None]:
        return {"": self.total_mb - sum(held.mb for held in self.has.values())}

    def need_mb(self, deployment: Deployment, layers: LayerRange, device: str) -> int:
        return MB * len(layers)

    async def get_to_know(self, wishes: Iterable[Wish]) -> None:
        self.looked_at |= {wish.model_id for wish in wishes}

    def asking_mb(self, wish: Wish) -> int:
        return 0

    def refusal(self, deployment: Deployment, layers: LayerRange) -> MeshError | None:
        return None

    def asked(self) -> Collection[ModelId]:
        return self.quants.keys()

    def asks(self, wish: Wish) -> bool:
        asked = self.models.get(wish.model_id), self.quants.get(wish.model_id)
        return asked == (wish.weights_sha256, wish.quant)

    def known(self) -> dict[ModelId, str]:
        return self.models

    async def ask(self, model: LocalModel) -> None:
        if self.models.get(model.model_id, model.weights_sha256) != model.weights_sha256:
            raise WeightsMismatch("other weights are held by that name.", fix="Let them go.")
        self.models = {model.model_id: model.weights_sha256}
        self.quants = {model.model_id: model.quant}

    async def ask_no_more(self, model_id: ModelId, *, forget: bool) -> None:
        self.quants = {}
        if forget:
            self.models = {}

    async def serve(
        self, deployment: Deployment, load: LoadAction, device: str, on_progress: OnProgress
    ) -> None:
        if self.is_broken:
            self.loads.append("broken")
            raise RuntimeError("a mistake of ours")
        wish, layers = deployment.wish, load.layers
        name, quant = load.shard, wish.quant or self.own_quant
        loading = OwnShard(
            name, wish.model_id, wish.weights_sha256, layers, MB * len(layers), ShardStage.LOADING,
            loaded=LoadedFormat(quant=quant, own=self.own_quant),
        )  # fmt: skip
        assert all(each.state is not ShardStage.LOADING for each in self.held()), "one at a time"
        self.has[name] = loading
        assert self.total_mb >= sum(each.mb for each in self.held()), "never over memory"
        self.loads.append(quant)
        try:
            await self.is_quick.wait()
        except asyncio.CancelledError:
            del self.has[name]
            raise
        loaded = LoadedFormat(quant if quant != "none" else "fp32", quant, own=self.own_quant)
        self.has[name] = replace(loading, state=ShardStage.READY, loaded=loaded)

    async def unserve(self, shard: ShardId) -> int:
        self.drops += 1
        if self.is_broken:
            raise RuntimeError("a mistake of ours")
        del self.has[shard]
        return 0

    def dedicate(self, shards: Collection[ShardId]) -> None:
        """Nothing leaves its device here."""


class SlowDisk(LocalWeights):
    """Has a checkpoint's files once it is told so, which it is, but never those that are `far`.
    `asked` are those that it is asked for now; where it has an `error` it says that."""

    def __init__(self, cache: Path) -> None:
        super().__init__({}, [cache], cache)
        self.is_there = asyncio.Event()
        self.is_there.set()
        self.far: set[ModelId] = set()
        self.asked: list[ModelId] = []
        self.error: MeshError | None = None

    async def ensure(
        self,
        model_id: ModelId,
        weights_sha256: str,
        layers: Sequence[LayerRange],
        on_progress: OnProgress,
        *,
        runs_ends: bool = True,
    ) -> Path:
        self.asked.append(model_id)
        try:
            if self.error is not None:
                raise self.error
            await (asyncio.Event() if model_id in self.far else self.is_there).wait()
            return await super().ensure(model_id, weights_sha256, layers, on_progress)
        finally:
            self.asked.remove(model_id)


class Watched:
    """A reconciler of a world in which one deployment is wished, and what it tells."""

    def __init__(self, total_layers_mb: int, checkpoint: Checkpoint, cache: Path) -> None:
        self.world = World(total_layers_mb)
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.checkpoint = checkpoint
        self._events = 0
        hooks = ReconcilerHooks(self.tell, lambda: None)
        self.disk = SlowDisk(cache)
        self.loop = Reconciler(self.world, self.disk, hooks, cache)

    def tell(self, kind: str, **fields: Any) -> None:
        self.told.append((kind, fields))

    def wish(self, layers: Sequence[str], quant: Quant = "") -> Deployment:
        """Have these layers here."""
        here = self.checkpoint
        self._events += 1
        event = f"{self._events:064x}"
        wish = Wish("0" * 16, here.model_id, here.weights_sha256, here.total_layers, 40)
        spans = tuple(Span(HERE, LayerRange.parse(each)) for each in layers)
        plan = Plan(wish.deployment, event, 0, (Replica(0, spans),), 1, asked=True)
        made = Deployment(replace(wish, quant=quant), plan, event, HERE, 0)
        self.world.log = self.world.log | {made.id: made}
        self.loop.look()
        return made

    def wish_far(self, number: int, *layers: str, is_planned: bool = True) -> Deployment:
        """Have another model here as well, whose files never come."""
        model = ModelId(f"far{number}")
        self.disk.far.add(model)
        self._events += 1
        event, name = f"{self._events:064x}", f"{number:x}" * 16
        spans = tuple(Span(HERE, LayerRange.parse(each)) for each in layers)
        plan = Plan(name, event, 0, (Replica(0, spans),), 1, asked=True)
        wish = Wish(name, model, "ef" * 32, 9, 90)
        made = Deployment(wish, plan if is_planned else None, event, HERE, 0)
        self.world.log = self.world.log | {made.id: made}
        self.loop.look()
        return made

    async def until(self, *loaded: tuple[str, str]) -> None:
        """Until exactly these layers are held in these formats, and said to be ready."""
        wanted = {
            (shard_id(self.checkpoint.model_id, LayerRange.parse(each)), quant)
            for each, quant in loaded
        }
        await holds(lambda: self._is(wanted))

    async def until_phase(self, layers: str, phase: Phase) -> PhaseProgress:
        """Until they are so far."""
        return await self._until(
            shard_id(self.checkpoint.model_id, LayerRange.parse(layers)), phase
        )

    async def until_far(self, number: int, layers: str, phase: Phase) -> PhaseProgress:
        """The same of a model whose files never come."""
        shard = shard_id(ModelId(f"far{number}"), LayerRange.parse(layers))
        return await self._until(shard, phase)

    async def until_ends(self, deployment: Deployment, phase: Phase) -> PhaseProgress:
        """Until what this node asks it with is so far."""
        return await self._until(deployment.ends, phase)

    async def _until(self, shard: ShardId, phase: Phase) -> PhaseProgress:
        phases = self.loop.phases.all
        await holds(lambda: shard in phases() and phases()[shard].phase is phase)
        return phases()[shard]

    def _is(self, wanted: set[tuple[ShardId, str]]) -> bool:
        phases = self.loop.phases.all()
        ready = {shard for shard, now in phases.items() if now.phase is Phase.READY}
        held = {(each.shard, each.loaded.quant) for each in self.world.held()}
        return held == wanted and {shard for shard, _ in wanted} <= ready

    def gaps(self) -> list[str]:
        return [str(fields["shard_id"]) for kind, fields in self.told if kind == "deployment_gap"]


async def holds(what: Callable[[], bool]) -> None:
    """Wait until it does."""
    async with asyncio.timeout(20):
        while not what():  # noqa: ASYNC110 - nobody says so
            await asyncio.sleep(0.01)


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    found = await LocalWeights({}, [], tmp_path).find(f"{checkpoint_dir()}=builtin")
    watching = Watched(MB * 6, found, tmp_path)
    watching.loop.start()
    yield watching
    await watching.loop.stop()


async def test_a_gap_that_a_change_opens_is_told_and_no_other_one(watched: Watched) -> None:
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


async def test_what_moves_to_another_machine_stays_until_that_serves_it(watched: Watched) -> None:
    old, there = watched.wish(["0-1"]), NodeId("there")
    await watched.until(("0-1", "none"))
    assert old.plan is not None
    moved = replace(old.plan, replicas=(Replica(0, (Span(there, LayerRange(0, 2)),)),))
    watched.world.log = {old.id: replace(old, plan=moved, author=there)}
    watched.loop.look()
    await holds(lambda: not watched.world.quants)  # nobody asks it from here any more
    for _ in range(3):
        watched.loop.look()
        await asyncio.sleep(0.02)
    assert watched.world.drops == 0
    wish = old.wish
    served = ServedShard(there, wish.model_id, wish.weights_sha256, LayerRange(0, 2))
    watched.world.others = [served]
    watched.loop.look()
    await holds(lambda: watched.world.drops == 1 and not watched.world.models)


async def test_who_asks_does_it_in_the_format_that_is_wished_by_now(watched: Watched) -> None:
    watched.wish(["0-1"])
    await watched.until(("0-1", "none"))
    assert list(watched.world.quants.values()) == [""]
    watched.wish(["0-1"], "int8")
    await holds(lambda: list(watched.world.quants.values()) == ["int8"])
    watched.disk.is_there.clear()
    watched.wish(["2-3"], "int8")
    await watched.until_phase("2-3", Phase.PROVISIONING)
    watched.wish(["2-3"], "int4")
    watched.disk.is_there.set()
    await watched.until_phase("2-3", Phase.READY)
    assert list(watched.world.quants.values()) == ["int4"]


async def test_what_was_evicted_is_fetched_no_more_to_be_asked_either(watched: Watched) -> None:
    far = watched.wish_far(1, "0-1")
    watched.loop.call_for(far.id)
    await holds(lambda: watched.disk.asked.count(ModelId("far1")) == 2)
    evicted = replace(far, wish=replace(far.wish, evicted=True))
    watched.world.log = {**watched.world.log, far.id: evicted}
    watched.loop.look()
    await holds(lambda: ModelId("far1") not in watched.disk.asked)


async def test_other_weights_that_come_by_the_name_of_those_that_go_are_asked(
    watched: Watched, tmp_path: Path
) -> None:
    old = watched.wish(["0-1"])
    await watched.until(("0-1", "none"))
    there = await asyncio.to_thread(make_checkpoint, tmp_path / "builtin", "llama", layers=4)
    watched.checkpoint = await watched.disk.find(f"{there}=builtin")
    # Whoever was away hears of both at once.
    gone = replace(old.wish, deployment="f" * 16, evicted=True)
    watched.world.log = {gone.deployment: replace(old, wish=gone)}
    new = watched.wish(["0-1"])
    await holds(lambda: list(watched.world.models.values()) == [new.wish.weights_sha256])


async def test_what_has_no_plan_yet_is_not_fetched_to_be_asked(watched: Watched) -> None:
    """Its layers may be for this node, and come first then."""
    unplanned = watched.wish_far(1, is_planned=False)
    watched.wish_far(2, "0-1")
    await holds(lambda: ModelId("far2") in watched.disk.asked)
    assert ModelId("far1") not in watched.disk.asked
    watched.loop.call_for(unplanned.id)
    await holds(lambda: ModelId("far1") in watched.disk.asked)


async def test_why_this_node_cannot_ask_a_model_is_known_until_it_can(watched: Watched) -> None:
    watched.disk.is_there.clear()
    watched.disk.error = NotFound("Nobody has its ends.", fix="Wait.")
    wished = watched.wish([])
    assert (await watched.until_ends(wished, Phase.FAILED)).reason == "Nobody has its ends. Wait."
    watched.disk.error = None
    watched.loop.try_again()
    await watched.until_ends(wished, Phase.PROVISIONING)
    watched.disk.is_there.set()
    await watched.until_ends(wished, Phase.READY)


async def test_what_is_wished_otherwise_while_it_loads_is_loaded_as_it_is_wished_now(
    watched: Watched,
) -> None:
    watched.world.is_quick.clear()
    watched.wish(["0-3"])
    await watched.until_phase("0-3", Phase.DEPLOYING)
    watched.wish(["0-3"], "int8")
    await holds(lambda: watched.world.loads == ["none", "int8"])
    watched.world.is_quick.set()
    await watched.until(("0-3", "int8"))
    assert watched.gaps() == []


async def test_what_is_wished_otherwise_while_it_is_fetched_is_loaded_once(
    watched: Watched,
) -> None:
    watched.disk.is_there.clear()
    watched.wish(["0-3"])
    await watched.until_phase("0-3", Phase.PROVISIONING)
    watched.wish(["0-3"], "int8")
    await asyncio.sleep(0)
    watched.disk.is_there.set()
    await watched.until(("0-3", "int8"))
    assert watched.world.loads == ["int8"]


async def test_a_long_download_holds_up_no_other_load_and_keeps_its_room(watched: Watched) -> None:
    large = watched.wish_far(1, "0-1")
    await watched.until_far(1, "0-1", Phase.PROVISIONING)
    watched.wish(["0-3"])
    await watched.until(("0-3", "none"))
    watched.wish(["0-3", "4-4"])
    told = await watched.until_phase("4-4", Phase.QUEUED)
    assert told.reason == "needs 10 MiB, 0 MiB are free beside what is to come"
    assert told.lacks_memory
    # What nobody wants any more is not fetched any longer, and its room is others'.
    before = watched.disk.asked.count(large.wish.model_id)
    del watched.world.log[large.id]
    watched.loop.look()
    await watched.until(("0-3", "none"), ("4-4", "none"))
    assert watched.disk.asked.count(large.wish.model_id) < before


async def test_only_so_many_are_fetched_at_a_time(watched: Watched) -> None:
    watched.world.total_mb = 1000
    for number in range(1, MAX_PROVISIONED + 3):
        watched.wish_far(number, "0-1")
    await watched.until_far(MAX_PROVISIONED, "0-1", Phase.PROVISIONING)
    waiting = await watched.until_far(MAX_PROVISIONED + 2, "0-1", Phase.QUEUED)
    assert waiting.reason == "after far1:0-1 or one of 3 more whose weights are fetched"
    assert len(set(watched.disk.asked)) == MAX_PROVISIONED, "nor for asking"
    # Who wants to ask it now has that at once.
    watched.loop.call_for("6" * 16)
    await holds(lambda: ModelId("far6") in watched.disk.asked)
    assert ModelId("far5") not in watched.disk.asked


async def test_what_is_fetched_is_loaded_one_after_the_other(watched: Watched) -> None:
    watched.disk.is_there.clear()
    watched.world.is_quick.clear()
    watched.wish(["0-0", "1-1", "2-2"])
    for layers in ("0-0", "1-1", "2-2"):
        await watched.until_phase(layers, Phase.PROVISIONING)
    watched.disk.is_there.set()
    await holds(lambda: bool(watched.world.has))
    (loading,) = watched.world.has
    for layers in ("0-0", "1-1", "2-2"):
        if shard_id(watched.checkpoint.model_id, LayerRange.parse(layers)) != loading:
            told = await watched.until_phase(layers, Phase.QUEUED)
            assert told.reason == f"its weights are here; after {loading}"
    assert watched.world.loads == ["none"]
    watched.world.is_quick.set()
    await watched.until(("0-0", "none"), ("1-1", "none"), ("2-2", "none"))


async def test_what_cannot_be_fetched_fails_with_the_reason_and_is_tried_again(
    watched: Watched,
) -> None:
    watched.disk.error = TransferFailed("nobody has it.", fix="Start who has.")
    watched.wish(["0-1"])
    told = await watched.until_phase("0-1", Phase.FAILED)
    assert told.reason == "nobody has it. Start who has."
    assert not watched.world.loads
    watched.disk.error = None
    watched.loop.try_again()
    await watched.until(("0-1", "none"))


async def test_what_failed_for_one_wish_does_not_keep_another_waiting(watched: Watched) -> None:
    watched.disk.error = TransferFailed("nobody has it.", fix="Start who has.")
    watched.wish(["0-1"], "int8")
    await watched.until_phase("0-1", Phase.FAILED)
    shard = shard_id(watched.checkpoint.model_id, LayerRange(0, 2))
    for _ in range(8):  # it waits for minutes
        watched.loop.phases.failed(shard, watched.disk.error, asyncio.get_running_loop().time())
    watched.disk.error = None
    watched.wish(["0-1"])
    await watched.until(("0-1", "none"))


async def test_what_loads_takes_its_memory_bit_by_bit_and_is_promised_all_of_it(
    watched: Watched,
) -> None:
    watched.world.is_quick.clear()
    watched.wish(["0-3"])
    await watched.until_phase("0-3", Phase.DEPLOYING)
    await holds(lambda: bool(watched.world.has))
    (loading,) = watched.world.has.values()
    watched.world.has[loading.shard] = replace(loading, mb=0)  # none of it is taken yet
    watched.wish(["0-3", "0-2"])
    told = await watched.until_phase("0-2", Phase.QUEUED)
    assert told.reason == "needs 30 MiB, 20 MiB are free; after builtin:0-3"


async def test_what_nobody_foresaw_is_tried_again_later_and_not_at_once(watched: Watched) -> None:
    watched.world.is_broken = True
    watched.wish(["0-1"])
    await watched.until_phase("0-1", Phase.FAILED)
    for _ in range(20):
        watched.loop.look()
        await asyncio.sleep(0.01)
    assert watched.world.loads == ["broken"]
    watched.world.is_broken = False
    await watched.until(("0-1", "none"))


async def test_what_cannot_be_unloaded_is_tried_again_later_as_well(watched: Watched) -> None:
    watched.wish(["0-1"])
    await watched.until(("0-1", "none"))
    watched.world.is_broken = True
    watched.world.log = {}
    watched.loop.look()
    await holds(lambda: watched.world.drops == 1)
    for _ in range(20):
        watched.loop.look()
        await asyncio.sleep(0.01)
    assert watched.world.drops == 1
    watched.world.is_broken = False
    await watched.until()


async def test_a_look_that_fails_is_not_the_last_one(watched: Watched) -> None:
    watched.world.is_odd = True
    watched.wish(["0-1"])
    await asyncio.sleep(0.05)
    watched.world.is_odd = False
    watched.loop.try_again()
    await watched.until(("0-1", "none"))
