"""The verbs over a household in memory: who rests for whom, what is refused, what is signed."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mesh.cli.deploying import pins
from mesh.deployments.control import HOLD_LOOK_S, Deploying
from mesh.deployments.laid import UNKNOWN, AvailableNode, Laid
from mesh.deployments.listing import DeploymentRows
from mesh.deployments.phases import PhaseProgress, Phases
from mesh.deployments.reconcile import ServedShard
from mesh.deployments.weights import Checkpoint, OnProgress
from mesh.deployments.wishes import Deployment, Plan, Wish, live
from mesh.discovery.weights import HeldWeights
from mesh.errors import BadRequest, Forbidden, NotEnoughMemory, NotFound, UntrustedPeer
from mesh.identity.keys import short_id
from mesh.types import LayerRange, ModelId, NodeId, ShardId
from tests.deployments.house import LAYER_MB, WEIGHTS, SimulatedHouse, mb_of
from tests.waiting import until

HOUR = 3600.0


class Here:
    """A household as one of its nodes sees it; what it signs, everybody has at once."""

    def __init__(self, house: SimulatedHouse) -> None:
        self.house = house
        self.node = house.nodes[0].node
        self.signed: list[Wish | Plan] = []
        self._events = 0
        self.out: set[NodeId] = set()
        self.is_operator = True
        self.called = {node.node: f"machine {node.node}" for node in house.nodes}

    def deployments(self) -> dict[str, Deployment]:
        return dict(self.house.deployments)

    def names(self) -> Mapping[NodeId, str]:
        return self.called

    def trusted(self) -> Collection[NodeId]:
        return [node.node for node in self.house.nodes if node.node not in self.out]

    def served(self) -> list[ServedShard]:
        return [shard for node in self.house.up[1:] for shard in _served(self.house, node.node)]

    def serves(self) -> Collection[ServedShard]:
        return _served(self.house, self.node)

    def alive(self) -> Collection[NodeId]:
        return {node.node for node in self.house.up}

    def is_resident(self, model_id: ModelId, weights_sha256: str) -> bool:
        return True

    def told(self, node: NodeId, shard: ShardId) -> PhaseProgress | None:
        return None

    def on_disk(self, node: NodeId, weights_sha256: str) -> HeldWeights | None:
        return None

    def machines(self) -> Sequence[AvailableNode]:
        return self.house.machines()

    def need_of(self, wish: Wish, layers: LayerRange) -> int:
        return mb_of(wish, layers)

    async def laid_out(
        self, wish: Wish, before: Plan | None, freed_mb: Mapping[NodeId, int]
    ) -> Laid:
        return UNKNOWN

    def require_operator(self) -> None:
        if not self.is_operator:
            raise UntrustedPeer("This node is not trusted.", fix="Ask an anchor.")

    async def publish_wish(self, wish: Wish) -> Deployment:
        self.signed.append(wish)
        self._events += 1
        known = self.house.deployments.get(wish.deployment)
        plan = known.plan if known is not None else None
        made = Deployment(wish, plan, f"{self._events:064x}", self.node, 0)
        self.house.deployments[wish.deployment] = made
        return made

    async def publish_plan(self, plan: Plan) -> None:
        self.signed.append(plan)
        known = self.house.deployments[plan.deployment]
        self.house.deployments[plan.deployment] = replace(known, plan=plan)


def _served(house: SimulatedHouse, node: NodeId) -> list[ServedShard]:
    (found,) = [each for each in house.up if each.node == node]
    return [
        ServedShard(node, held.model_id, held.weights_sha256, held.layers, held.loaded)
        for held in found.ready
    ]


class Models:
    """Checkpoints that are called after how many layers they have."""

    async def find(self, model: str) -> Checkpoint:
        layers = int(model.rpartition("-")[2])
        return Checkpoint(ModelId(model), WEIGHTS, layers, layers * LAYER_MB)

    async def ensure(
        self,
        model_id: ModelId,
        weights_sha256: str,
        layers: Sequence[LayerRange],
        on_progress: OnProgress,
        *,
        runs_ends: bool,
    ) -> Path:
        raise AssertionError("nothing is loaded here")


class Verbs:
    """The verbs of a household of such memories, all of whose deployments have been `up_s` up."""

    def __init__(self, *memories_mb: int, up_s: float = HOUR) -> None:
        self.house = SimulatedHouse(memories_mb)
        self.here = Here(self.house)
        rows = DeploymentRows(self.here, Phases(lambda shard, now: None))
        self.verbs = Deploying(self.here, Models(), rows, lambda name: None, lambda name: up_s)

    def signed(self) -> list[str]:
        """What was signed since this was asked last."""
        words = [_in_words(each, self.here.deployments()) for each in self.here.signed]
        self.here.signed.clear()
        return words

    def held(self) -> set[ModelId]:
        """What is loaded when everybody has done what there is to do, within memory."""
        assert self.house.settle()
        return {held.model_id for node in self.house.nodes for held in node.held.values()}


def _in_words(signed: Wish | Plan, known: Mapping[str, Deployment]) -> str:
    model = known[signed.deployment].wish.model_id
    if isinstance(signed, Plan):
        return f"plan {model}"
    return f"{'rest' if signed.resting else 'wish'} {model}"


async def test_who_makes_room_rests_before_the_new_is_wished_and_comes_back_in_its_turn() -> None:
    home = Verbs(100, 100)
    await home.verbs.deploy({"model": "small-4"})
    await home.verbs.deploy({"model": "middle-10"})
    assert home.held() == {"small-4", "middle-10"}
    assert home.signed() == ["wish small-4", "plan small-4", "wish middle-10", "plan middle-10"]

    # The smaller one alone would not be enough, on either machine.
    row = await home.verbs.deploy({"model": "large-16"})
    assert home.signed() == [
        "rest small-4", "rest middle-10", "wish large-16", "plan large-16",
    ]  # fmt: skip
    assert row["gaps"] == [], "who rests leaves no gap in what comes"
    assert home.held() == {"large-16"}
    states = {each["model_id"]: each["state"] for each in home.verbs.view()}
    assert states == {"large-16": "READY", "small-4": "RESTING", "middle-10": "RESTING"}

    assert await home.verbs.wake("small-4", may_wake=True)
    assert home.signed() == ["wish small-4", "plan small-4"]
    assert home.held() == {"large-16", "small-4"}


class SlowPlans(Here):
    """A node on which planning takes a moment, as it does for those that look weights up."""

    async def laid_out(
        self, wish: Wish, before: Plan | None, freed_mb: Mapping[NodeId, int]
    ) -> Laid:
        await asyncio.sleep(0)
        return UNKNOWN


async def test_what_operators_order_while_each_other_plans_all_holds() -> None:
    here = SlowPlans(SimulatedHouse([1000, 1000]))
    rows = DeploymentRows(here, Phases(lambda shard, now: None))
    one, other = (
        Deploying(here, Models(), rows, lambda name: None, lambda name: HOUR) for _ in range(2)
    )
    await asyncio.gather(
        one.deploy({"model": "m-4", "quant": "int8"}),
        other.deploy({"model": "m-4", "keep_alive_s": 9.0}),
    )
    await asyncio.gather(one.deploy({"model": "m-4", "dedicated": True}), other.scale("m-4", 2))
    (wish,) = [each.wish for each in here.deployments().values()]
    found = (wish.quant, wish.keep_alive_s, wish.dedicated, wish.replicas)
    assert found == ("int8", 9.0, True, 2)


async def test_the_same_order_again_signs_only_a_plan_that_is_another() -> None:
    home = Verbs(100, 100)
    await home.verbs.deploy({"model": "small-4", "replicas": 2})
    home.signed()
    await home.verbs.deploy({"model": "small-4"})
    assert home.signed() == []
    home.house.nodes[1].is_up = False
    await home.verbs.deploy({"model": "small-4"})
    assert home.signed() == ["plan small-4"]


@pytest.mark.parametrize("layers", [["n0=0-2", "n1=2-3"], ["n0=0-4"], ["n0=2-1"]])
async def test_layers_that_cannot_be_pinned_are_refused(layers: list[str]) -> None:
    home = Verbs(100, 100)
    with pytest.raises(BadRequest) as refused:
        await home.verbs.deploy({"model": "small-4", "layers": layers})
    assert refused.value.param == "layers"
    assert home.signed() == []


async def test_who_is_no_operator_changes_nothing() -> None:
    home = Verbs(100)
    await home.verbs.deploy({"model": "small-4"})
    home.signed()
    home.here.is_operator = False
    for model in ("small-4", "large-8"):
        with pytest.raises(UntrustedPeer):
            await home.verbs.deploy({"model": model, "dedicated": True})
    with pytest.raises(UntrustedPeer):
        await home.verbs.scale("small-4", 0)
    with pytest.raises(UntrustedPeer):
        await home.verbs.evict("small-4")
    assert home.signed() == []


async def test_an_order_that_another_of_the_same_moment_takes_back_is_given_again() -> None:
    home = Verbs(1000, 1000)
    row = await home.verbs.deploy({"model": "m-4"})
    before = home.here.deployments()[row["deployment"]]
    await home.verbs.deploy({"model": "m-4", "quant": "int8"})
    other = replace(before.wish, replicas=2)
    unheard = replace(before, wish=other, event="f" * 64, lamport=before.lamport)
    home.house.deployments[before.id] = unheard

    def wished() -> tuple[str, int]:
        (now,) = home.here.deployments().values()
        return now.wish.quant, now.wish.replicas

    await until(lambda: wished() == ("int8", 2))
    heard = replace(unheard, event="e" * 64, lamport=before.lamport + 1)
    home.house.deployments[before.id] = heard
    await asyncio.sleep(2 * HOLD_LOOK_S)
    assert wished() == ("", 2), "it was meant so"
    await home.verbs.close()


async def test_a_member_that_claims_any_time_has_its_wishes_listed() -> None:
    home = Verbs(100)
    name = (await home.verbs.deploy({"model": "small-4"}))["deployment"]
    known = home.house.deployments[name]
    home.house.deployments[name] = replace(known, wall_ms=(1 << 63) - 1)
    assert home.verbs.require("small-4")["wished_at"].startswith("9999-12-31")


async def test_machines_of_one_name_are_told_apart_wherever_they_are_named() -> None:
    home = Verbs(100, 100)
    first, second = (node.node for node in home.house.nodes)
    home.here.called = {first: "attic", second: "attic"}
    row = await home.verbs.deploy({"model": "middle-10", "replicas": 2})
    names = {span["node_id"]: span["node"] for span in row["spans"]}
    assert names == {first: f"{short_id(first)} (attic)", second: f"{short_id(second)} (attic)"}
    with pytest.raises(BadRequest, match="more than one member"):
        await home.verbs.deploy({"model": "small-4", "nodes": ["attic"]})


async def test_a_replica_that_no_machine_is_left_for_says_that_it_is_one_with_another() -> None:
    home = Verbs(100)
    await home.verbs.deploy({"model": "small-4", "replicas": 2})
    assert home.house.settle()
    (row,) = home.verbs.view()
    assert [span["phase"] for span in row["spans"]] == ["READY", "READY"]
    first, second = (span["reason"] for span in row["spans"])
    assert (first, second.partition(",")[0]) == (None, "one copy with a replica above")


async def test_what_is_pinned_to_who_was_put_out_says_that_nobody_need_wait() -> None:
    home = Verbs(100, 100)
    first, second = (node.node for node in home.house.nodes)
    home.here.called = {first: "attic", second: "sofa"}
    await home.verbs.deploy({"model": "middle-10", "layers": ["attic=0-4", "sofa=5-9"]})
    assert home.house.settle()
    home.house.nodes[1].is_up = False
    (row,) = home.verbs.view()
    assert [span["reason"] for span in row["spans"]] == [None, None], "it may come back"

    home.here.out, home.here.called[second] = {second}, "sofa (out)"
    (row,) = home.verbs.view()
    assert [(each["node"], each["phase"]) for each in row["spans"]] == [
        ("attic", "READY"), ("sofa (out)", "AWAY"),
    ]  # fmt: skip
    assert "pinned elsewhere" in row["spans"][1]["reason"]
    for who in ("sofa", second):
        with pytest.raises(BadRequest, match=f"no member that may hold layers is called '{who}'"):
            await home.verbs.deploy({"model": "middle-10", "nodes": [who]})


async def test_layers_that_are_pinned_to_a_machine_that_is_left_out_are_refused_for_that() -> None:
    home = Verbs(100, 100)
    first, second = (node.node for node in home.house.nodes)
    home.here.called = {first: "attic", second: "sofa"}
    await home.verbs.deploy({"model": "middle-10", "nodes": ["sofa"]})
    pinned = {"model": "middle-10", "layers": ["attic=0-4", "sofa=5-9"]}
    with pytest.raises(BadRequest, match=r"pinned to attic, and .* other machines only: sofa"):
        await home.verbs.deploy(pinned)
    await home.verbs.deploy(pinned | {"nodes": ["attic", "sofa"]})
    assert home.held() == {"middle-10"}


async def test_each_part_of_a_wish_can_be_taken_back() -> None:
    home = Verbs(100, 100)
    home.here.called = {node.node: f"n{place}" for place, node in enumerate(home.house.nodes)}
    await home.verbs.deploy({"model": "middle-10"})
    await home.verbs.deploy(
        {"model": "middle-10", "nodes": ["n0"], "layers": pins(["n0=0-9"]), "context": 512}
    )
    await home.verbs.deploy(
        {"model": "middle-10", "nodes": [], "layers": pins(["none"]), "context": 0}
    )
    first, narrowed, last = (each for each in home.here.signed if isinstance(each, Wish))
    assert narrowed.context == 512
    assert len(narrowed.pins) == len(narrowed.nodes) == 1
    assert last == first


async def test_what_has_no_replica_any_more_is_woken_with_one() -> None:
    home = Verbs(100)
    await home.verbs.deploy({"model": "small-4"})
    await home.verbs.scale("small-4", 0)
    assert home.held() == set()
    with pytest.raises(Forbidden):
        await home.verbs.wake("small-4", may_wake=False)
    assert home.held() == set()
    assert await home.verbs.wake("small-4", may_wake=True)
    assert home.held() == {"small-4"}
    assert not await home.verbs.wake("small-4", may_wake=True), "it is up"
    await home.verbs.scale("small-4", 0)
    await home.verbs.deploy({"model": "small-4", "quant": "none"})
    assert home.held() == {"small-4"}


async def test_where_nobody_may_rest_it_is_refused_and_nothing_is_signed() -> None:
    home = Verbs(100, up_s=HOUR - 1)
    await home.verbs.deploy({"model": "small-6"})
    assert home.held() == {"small-6"}
    home.signed()
    with pytest.raises(NotEnoughMemory, match="n0 needs 80 MiB, 40 MiB are free, 60 MiB are held"):
        await home.verbs.deploy({"model": "large-8"})
    assert home.signed() == []
    assert [each["model_id"] for each in home.verbs.view()] == ["small-6"]
    # For a dedicated one the minimum time is waived, and for that nobody rests.
    await home.verbs.deploy({"model": "large-8", "dedicated": True})
    assert home.signed() == ["rest small-6", "wish large-8", "plan large-8"]
    assert home.held() == {"large-8"}
    with pytest.raises(NotEnoughMemory):
        await home.verbs.deploy({"model": "small-6"})
    with pytest.raises(NotEnoughMemory):  # what rests already makes no room
        await home.verbs.deploy({"model": "small-4", "dedicated": True})
    assert home.held() == {"large-8"}


async def test_a_pin_to_a_machine_that_is_off_is_refused_by_its_name() -> None:
    home = Verbs(100, 100)
    home.house.nodes[1].is_up = False
    with pytest.raises(BadRequest, match="pinned to machine n1, which may not be used"):
        await home.verbs.deploy({"model": "small-6", "layers": ["machine n1=0-2"]})
    assert home.signed() == []


async def test_the_room_of_others_is_that_of_those_who_may_rest() -> None:
    home = Verbs(100, 100, up_s=HOUR - 1)
    await home.verbs.deploy({"model": "small-6"})
    assert home.held() == {"small-6"}

    def room(model: str, *, dedicated: bool) -> Mapping[NodeId, int]:
        return home.verbs.room_of_others(ModelId(model), WEIGHTS, dedicated=dedicated)

    held = {each.node: 100 - each.free_mb for each in home.house.nodes}
    assert room("large-8", dedicated=True) == held
    assert room("large-8", dedicated=False) == room("small-6", dedicated=True) == {}


async def test_a_change_that_opens_a_gap_says_so_and_opens_it() -> None:
    home = Verbs(100)
    await home.verbs.deploy({"model": "large-8"})
    assert home.held() == {"large-8"}
    gaps = (await home.verbs.deploy({"model": "large-8", "quant": "int8"}))["gaps"]
    assert gaps == [{"node": "n0", "drops": "0-7", "loads": "0-7"}]
    assert home.verbs.view()[0]["state"] != "READY", "it is not yet as it is wished"
    assert home.held() == {"large-8"}
    assert [drop.shard for _, drop in home.house.replaced] == ["large-8:0-7"]
    assert home.verbs.view()[0]["state"] == "READY"
    again = await home.verbs.deploy({"model": "large-8", "context": 8})
    assert again["gaps"] == [], "the caches are long enough"


async def test_what_was_merged_is_called_by_its_own_id_still_and_ends_with_the_other() -> None:
    home = Verbs(100)
    row = await home.verbs.deploy({"model": "m-4"})
    known = home.house.deployments[row["deployment"]]
    twin = replace(known, wish=replace(known.wish, deployment="f" * 16), merged_into=known.id)
    home.house.deployments[twin.id] = twin
    assert [each["merged"] for each in home.verbs.view()] == [[twin.id]]
    assert (await home.verbs.scale(twin.id, 2))["deployment"] == known.id
    ended = await home.verbs.evict("m-4")
    assert [each["deployment"] for each in ended] == [known.id, twin.id]
    assert home.verbs.view() == []
    with pytest.raises(NotFound):
        await home.verbs.scale(twin.id, 1)


class UnreadModels(Models):
    """Those whose hash nobody knows before they were read."""

    async def find(self, model: str) -> Checkpoint:
        return replace(await super().find(model), weights_sha256="")

    async def read(
        self, model: str, layers: Sequence[LayerRange], on_progress: OnProgress
    ) -> Checkpoint:
        return await super().find(model)


class SlowLog(Here):
    """What it is to write is written one after the other, whoever waits for that no longer."""

    def __init__(self, house: SimulatedHouse) -> None:
        super().__init__(house)
        self.is_asked, self.goes_on, self._turn = asyncio.Event(), asyncio.Event(), asyncio.Lock()

    async def publish_wish(self, wish: Wish) -> Deployment:
        return await asyncio.shield(asyncio.ensure_future(self._write(wish)))

    async def _write(self, wish: Wish) -> Deployment:
        async with self._turn:
            self.is_asked.set()
            await self.goes_on.wait()
            return await super().publish_wish(wish)


async def test_what_is_evicted_just_as_it_is_wished_for_once_it_was_read_stays_away() -> None:
    here = SlowLog(SimulatedHouse([100]))
    rows = DeploymentRows(here, Phases(lambda shard, now: None))
    verbs = Deploying(here, UnreadModels(), rows, lambda name: None, lambda name: HOUR)
    await verbs.deploy({"model": "m-4"})
    await here.is_asked.wait()
    evicting = asyncio.create_task(verbs.evict("m-4"))
    await asyncio.sleep(0)
    here.goes_on.set()
    assert [each["model_id"] for each in await evicting] == ["m-4"]
    await asyncio.sleep(0.1)
    assert live(here.deployments()) == []
    await verbs.close()
