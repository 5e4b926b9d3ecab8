"""What a node gathers for a plan, and what it answers: with its real directory and a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from mesh import codec
from mesh.capacity import Capacity, Device, Speed
from mesh.cli.estimate import print_plan
from mesh.clock import SystemClock
from mesh.config import Config
from mesh.config.sections import HostSection
from mesh.deployments.laid import AvailableNode, Gap, Laid
from mesh.deployments.laying import NOTHING, RoomAdjustments
from mesh.deployments.phases import Phases
from mesh.deployments.placement import gaps, make_plan
from mesh.deployments.reconcile import ServedShard
from mesh.deployments.shape import shape_of
from mesh.deployments.weights import LocalWeights
from mesh.deployments.wishes import Deployment, Plan, Replica, Span, Wish
from mesh.discovery.directory import NodeInfo, Offering, ShardStore
from mesh.discovery.progress import NodeProgress
from mesh.discovery.weights import HeldWeights
from mesh.errors import (
    BadRequest,
    DiskFull,
    MeshError,
    ModelNotFound,
    TransferFailed,
    UnsupportedFamily,
    WeightsMismatch,
)
from mesh.health.detector import Verdict
from mesh.models.builtin import checkpoint_dir
from mesh.models.manifest import read_manifest
from mesh.models.standard import other_formats
from mesh.node.deployments_here import told_of
from mesh.node.estimates import EstimateContext, Estimates
from mesh.node.layouts import Layouts
from mesh.node.served_speed import AskedTimes
from mesh.routing.fitting import benches, shard_bytes
from mesh.routing.machines import Demand, Machine
from mesh.shard.commands import ShardRequest
from mesh.shard.compiled.formats import bytes_per_weight
from mesh.shard.footprint import ends_mb, estimate
from mesh.shard.load_plan import HostedOn, plan_shard
from mesh.shard.loading import load_shard
from mesh.shard.settings import ShardSettings
from mesh.types import (
    Done,
    Endpoint,
    HopTiming,
    LayerRange,
    ModelId,
    NodeId,
    RouteHop,
    shard_id,
)
from tests.checkpoints import make_checkpoint
from tests.coded_files import Form, awq, fp8, packed, write_coded
from tests.discovery.network import advertised
from tests.gguf_files import write_gguf

OWN, NEAR, FAR, DOUBTED, AWAY = map(NodeId, ("own", "near", "far", "doubted", "away"))
ASK: dict[str, Any] = {
    "model": "builtin", "replicas": 1, "dedicated": False, "quant": "none", "context": 256,
    "streams": 1, "nodes": [], "with": [], "without": [], "layers": [],
}  # fmt: skip
MB = 1 << 20


def cpu(free_mb: int, gb_s: float = 10.0) -> Capacity:
    speeds = tuple(Speed(name, gb_s, 50.0, 0.1) for name in ("fp32", "int8", "int4"))
    return Capacity((Device("cpu", free_mb * MB, 8192 * MB, speeds),))


@pytest.fixture
def store() -> ShardStore:
    return ShardStore(SystemClock(), expiry_s=60.0)


@pytest.fixture
def estimates(store: ShardStore) -> Estimates:
    return made(store)


def made(
    store: ShardStore,
    verdict: Callable[[NodeId], Verdict] | None = None,
    asked: AskedTimes | None = None,
    others: Mapping[NodeId, int] = {},
    spoken_for: Mapping[NodeId, int] = {},
) -> Estimates:
    for node, free_mb in ((OWN, 1000), (NEAR, 1000), (FAR, 2000), (DOUBTED, 3000)):
        store.update(NodeInfo(node, node.title(), "", "test"), Offering(capacity=cpu(free_mb)))
    rtts = {NEAR: 0.4, FAR: 25.0, DOUBTED: 0.4}
    around = EstimateContext(
        OWN, Config(), store, rtts.get, lambda node: node != DOUBTED,
        verdict or (lambda node: Verdict.HEALTHY), lambda model: True, tuple,
        lambda: 2.5, asked or AskedTimes(), lambda: {AWAY: "Away"},
        lambda model_id, weights_sha256, dedicated: {} if dedicated else others,
        lambda model_id, weights_sha256: spoken_for,
    )  # fmt: skip
    return Estimates(around, LocalWeights({}, (), None))


async def test_a_machine_whose_disk_is_full_is_left_out_and_says_so(
    store: ShardStore, estimates: Estimates
) -> None:
    for node in (OWN, NEAR):
        full = replace(cpu(1000), disk_free_bytes=1 << 10)
        store.update(NodeInfo(node, node.title(), "", "test"), Offering(capacity=full))
    answer = await estimates.plan({**ASK, "without": ["Own"]})
    assert used(answer) == {"Far"}
    why = {row["node"]: row["why"] for row in answer["machines"]}
    assert why["Near"].startswith("no room on its disk")
    answer = await estimates.plan(ASK)
    assert used(answer) == {"Own"}, "the files lie here"
    assert answer["replicas"][0]["shards"][0]["fetch_bytes"] == 0
    manifest = await asyncio.to_thread(read_manifest, checkpoint_dir())
    shape = shape_of(manifest, 256)
    held = HeldWeights(
        ModelId("builtin"), shape.weights_sha256, shape.total_layers,
        (LayerRange(0, shape.total_layers),), ends=True, endpoint=Endpoint(""),
    )  # fmt: skip
    store.update(NodeInfo(NEAR, "Near", "", "test"), Offering(capacity=full, weights=(held,)))
    assert used(await estimates.plan({**ASK, "without": ["Own"]})) == {"Near"}


def told(host: NodeId, asker_ms: float, *, mb_s: float = 0.0) -> AskedTimes:
    """What two answers over a hop of 3 ms told: what a token cost here, and the rate of the way."""
    shard = replace(advertised(host, "0-1").descriptor, model_id=ModelId("builtin"))
    hop = HopTiming(shard.shard_id, host, "0-1", 32, 3.0, 3.0, 2.0, mb_s)
    done = Done(
        "length", 4, 0, 32, tuple(range(32)), (RouteHop(shard, LayerRange(0, 2)),), 0, False, 10.0,
        1000 / (asker_ms + hop.p50_ms), (hop,),
    )  # fmt: skip
    asked = AskedTimes()
    for _ in range(2):
        asked.take(done)
    return asked


def used(answer: dict[str, Any]) -> set[str]:
    assert answer["refusal"] is None, answer["refusal"]
    return {shard["node"] for replica in answer["replicas"] for shard in replica["shards"]}


async def test_a_plan_over_the_house(
    estimates: Estimates, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = await estimates.plan(ASK)
    assert used(answer) == {"Own"}
    why = {row["node"]: row["why"] for row in answer["machines"]}
    assert "not trusted" in why["Doubted"]
    assert "faster without it" in why["Far"]
    (shard,) = answer["replicas"][0]["shards"]
    assert shard["layers"] == f"0-{answer['total_layers'] - 1}"
    assert shard["need"]["total"] <= shard["have"]
    print_plan(answer)
    shown = capsys.readouterr().out
    assert "tokens/s" in shown
    assert "not trusted" in shown


async def test_nodes_come_and_go_in_thought(estimates: Estimates) -> None:
    without = {**ASK, "without": ["Own"]}
    assert used(await estimates.plan(without)) == {"Near"}
    assert used(await estimates.plan({**ASK, "nodes": ["Far"]})) == {"Far"}
    with_doubted = {**without, "with": ["Doubted"], "nodes": ["Doubted"]}
    assert used(await estimates.plan(with_doubted)) == {"Doubted"}
    assert used(await estimates.plan({**ASK, "with": ["tower=64:900"]})) == {"tower"}
    for nothing in ("tower=0", "tower=64:0", "tower=64:0.0"):
        with pytest.raises(BadRequest, match="is no machine"):
            await estimates.plan({**ASK, "with": [nothing]})


async def test_a_way_that_was_measured_counts_instead_of_a_common_one(store: ShardStore) -> None:
    plans = []
    for mb_s in (0.0, 100.0, 4.0):
        house = await asyncio.to_thread(made, store, asked=told(FAR, 4.0, mb_s=mb_s))
        plans.append(await house.plan({**ASK, "nodes": ["Far"]}))
    unknown, common, slow = (plan["replicas"][0]["first_token_ms"] for plan in plans)
    assert common == unknown
    assert slow > common + 20


async def test_pins_are_read_as_everywhere(estimates: Estimates) -> None:
    answer = await estimates.plan({**ASK, "layers": ["Far=0-1"]})
    first = answer["replicas"][0]["shards"][0]
    assert (first["node"], first["layers"]) == ("Far", "0-1")


async def test_what_does_not_fit_is_an_answer(
    store: ShardStore, estimates: Estimates, capsys: pytest.CaptureFixture[str]
) -> None:
    for node in (OWN, NEAR, FAR):
        store.update(NodeInfo(node, node.title(), "", "test"), Offering(capacity=cpu(200)))
    answer = await estimates.plan({**ASK, "context": 4096, "streams": 16})
    assert answer["refusal"]["code"] == "not_enough_memory"
    assert "--context" in answer["refusal"]["fix"]
    print_plan(answer)
    assert "It does not fit" in capsys.readouterr().out


async def test_what_fits_once_others_rest_is_estimated_so(
    store: ShardStore, capsys: pytest.CaptureFixture[str]
) -> None:
    house = await asyncio.to_thread(made, store, others={NEAR: 900})
    for node in (OWN, NEAR, FAR):
        store.update(NodeInfo(node, node.title(), "", "test"), Offering(capacity=cpu(10)))
    answer = await house.plan(ASK)
    assert (used(answer), answer["others_rest"]) == ({"Near"}, True)
    print_plan(answer)
    assert "once other deployments rest" in capsys.readouterr().out
    full = await house.plan({**ASK, "dedicated": True})
    assert (full["refusal"]["code"], full["others_rest"]) == ("not_enough_memory", False)


async def test_what_is_planned_and_not_yet_loaded_leaves_no_room(store: ShardStore) -> None:
    taken = {OWN: 1000, NEAR: 990, FAR: 10}
    house = await asyncio.to_thread(made, store, spoken_for=taken)
    assert used(await house.plan(ASK)) == {"Far"}
    house = await asyncio.to_thread(made, store, others={OWN: 1000}, spoken_for=taken | {FAR: 2000})
    answer = await house.plan(ASK)
    assert (used(answer), answer["others_rest"]) == ({"Own"}, True)


async def test_of_what_is_planned_for_others_that_counts_which_is_not_loaded(
    store: ShardStore,
) -> None:
    spans = Span(NEAR, LayerRange(0, 2)), Span(FAR, LayerRange(2, 4))
    wish = Wish("0" * 16, ModelId("other"), "ab" * 32, 4, 400)
    plan = Plan(wish.deployment, "cd" * 32, 0, (Replica(0, spans),), 1, asked=True)
    known = {wish.deployment: Deployment(wish, plan, "cd" * 32, OWN, 0)}
    layouts = Layouts(await asyncio.to_thread(Config), OWN, store, lambda: known)
    there = [ServedShard(NEAR, wish.model_id, wish.weights_sha256, LayerRange(0, 2))]
    need = layouts.need_mb(wish, LayerRange(2, 4))
    assert layouts.spoken_for("", there) == {FAR: need}
    assert layouts.spoken_for(wish.deployment, there) == {}
    assert layouts.spoken_for(wish.deployment, there, [(wish, plan)]) == {FAR: need}


async def test_what_is_planned_is_counted_once_for_all_that_is_planned_beside_it(
    store: ShardStore,
) -> None:
    asked: list[ModelId] = []

    class Planner:
        def need_mb(self, wish: Wish, layers: LayerRange, device: str) -> int:
            asked.append(wish.model_id)
            return len(layers)

    known = {}
    for number in range(20):
        wish = Wish(f"{number:016x}", ModelId(f"m{number}"), "ab" * 32, 4, 400)
        plan = Plan(
            wish.deployment, "cd" * 32, 0, (Replica(0, (Span(NEAR, wish.whole),)),), 1, asked=True
        )
        known[wish.deployment] = Deployment(wish, plan, "cd" * 32, OWN, 0)
    layouts = Layouts(await asyncio.to_thread(Config), OWN, store, lambda: known)
    layouts.planner = cast("Estimates", Planner())
    there = {ServedShard(NEAR, ModelId("m7"), "ab" * 32, LayerRange(0, 4))}
    taken = [layouts.spoken_for(each, there)[NEAR] for each in known]
    assert taken == [4 * (18 if number != 7 else 19) for number in range(20)]
    assert sorted(asked) == sorted(
        each.wish.model_id for each in known.values() if each.wish.model_id != "m7"
    )


async def test_a_member_that_is_off_is_known_by_its_name(estimates: Estimates) -> None:
    answer = await estimates.plan({**ASK, "without": ["Away"]})
    assert not answer["others_rest"]
    assert {row["node"]: row["why"] for row in answer["machines"]}["Away"] == "it does not answer"
    refused = await estimates.plan({**ASK, "layers": ["Away=0-1"]})
    assert refused["refusal"]["code"] == "not_enough_memory"
    refused = await estimates.plan({**ASK, "nodes": ["Away"], "with": ["Away"]})
    assert "has measured itself" in refused["refusal"]["message"]


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"nodes": ["nobody"]}, BadRequest),
        ({"layers": ["Own=9"]}, BadRequest),
        ({"layers": ["nobody=0-1"]}, BadRequest),
        ({"model": "none/such"}, ModelNotFound),
    ],
)
async def test_what_nobody_knows_is_refused(
    estimates: Estimates, more: dict[str, Any], error: type[MeshError]
) -> None:
    with pytest.raises(error):
        await estimates.plan({**ASK, **more})


async def test_each_machine_sets_aside_caches_as_its_own_settings_say(
    store: ShardStore, estimates: Estimates, capsys: pytest.CaptureFixture[str]
) -> None:
    own = HostSection().kv_tokens
    for node, kv_tokens in ((OWN, own), (NEAR, own // 4), (FAR, None)):  # that one is older
        capacity = replace(cpu(1000), kv_tokens=kv_tokens)
        store.update(NodeInfo(node, node.title(), "", "test"), Offering(capacity=capacity))
    plans = [await estimates.plan({**ASK, "nodes": [name]}) for name in ("Own", "Near", "Far")]
    shards = [plan["replicas"][0]["shards"][0] for plan in plans]
    assert [shard["positions"] for shard in shards] == [own, own // 4, own]
    mine, less, older = (shard["need"]["caches"] for shard in shards)
    assert mine == older == 4 * less
    both = await estimates.plan({**ASK, "nodes": ["Own", "Near"], "layers": ["Near=0-2"]})
    print_plan(both)
    assert f"a shard sets {own // 4} to {own} aside" in capsys.readouterr().out
    assert both["positions"] == own
    long = await estimates.plan({**ASK, "nodes": ["Near"], "context": own // 2})
    assert long["replicas"][0]["shards"][0]["positions"] == own // 2
    # A deployment sets aside what its context says, for however many.
    many = await estimates.plan({**ASK, "nodes": ["Near"], "context": own // 2, "streams": 4})
    print_plan(many)
    assert f"deployed with --context {2 * own}" in capsys.readouterr().out
    one = await estimates.plan({**ASK, "nodes": ["Near"], "context": 2 * own})
    needs = [plan["replicas"][0]["shards"][0]["need"] for plan in (many, one)]
    assert needs[0] == needs[1]


async def test_what_lies_on_disks_need_not_be_fetched(
    store: ShardStore, estimates: Estimates
) -> None:
    shape = shape_of(await LocalWeights({}, (), None).manifest("builtin"), 256)
    said = HeldWeights(
        shape.model_id, shape.weights_sha256, shape.total_layers, (LayerRange(0, 3),), True,
        Endpoint("wss://127.0.0.1:1"),
    )  # fmt: skip
    store.update(NodeInfo(NEAR, "Near", "", "test"), Offering(weights=(said,), capacity=cpu(1000)))
    near = await estimates.plan({**ASK, "nodes": ["Near"]})
    far = await estimates.plan({**ASK, "nodes": ["Far"]})
    layer = shape.layer_bytes[0]
    fetched = [each["replicas"][0]["shards"][0]["fetch_bytes"] for each in (near, far)]
    assert fetched == [layer * (shape.total_layers - 3), layer * shape.total_layers]


async def test_what_a_shard_took_is_what_it_will_take(
    store: ShardStore, estimates: Estimates
) -> None:
    manifest = await LocalWeights({}, (), None).manifest("builtin")
    shape = shape_of(manifest, 256)
    shard = advertised(NEAR, "0-1")
    said = replace(
        shard.descriptor, model_id=shape.model_id, weights_sha256=shape.weights_sha256, dtype="fp32"
    )
    slow = replace(shard, descriptor=said, health=replace(shard.health, p50_latency_ms=90.0))
    store.update(NodeInfo(NEAR, "Near", "", "test"), Offering((slow,), capacity=cpu(1000)))
    (near,) = (each for each in estimates.machines(shape) if each.node_id == NEAR)
    assert [(t.format, t.decode_ms) for t in near.timed] == [("fp32", 45.0)]
    assert [held.layers for held in near.held] == [LayerRange(0, 2)]
    # Whoever serves a part asks as well, and has loaded the ends for that.
    asks = {each.node_id: each.has_ends for each in estimates.machines(shape)}
    assert asks == {OWN: True, NEAR: True, FAR: False, DOUBTED: False}


async def test_what_asking_takes_is_part_of_a_token(
    store: ShardStore, estimates: Estimates
) -> None:
    (calibrated,) = (await estimates.plan(ASK))["replicas"]
    assert calibrated["asker_ms"] == 2.5
    hops = sum(shard["decode_ms"] + shard["hop_ms"] for shard in calibrated["shards"])
    assert calibrated["token_ms"] == pytest.approx(hops + calibrated["head_ms"] + 2.5)
    # What tokens of this very model took counts first, and the head is within it.
    known = await asyncio.to_thread(made, store, asked=told(NodeId("elsewhere"), 4.0))
    (seen,) = (await known.plan(ASK))["replicas"]
    assert seen["head_ms"] + seen["asker_ms"] == pytest.approx(4.0)
    assert seen["token_ms"] == pytest.approx(hops + 4.0)


async def test_what_a_lost_machine_held_goes_where_it_is_fastest_with_room(
    store: ShardStore, estimates: Estimates
) -> None:
    shape = shape_of(await LocalWeights({}, (), None).manifest("builtin"), 256)
    layers = shape.total_layers
    wish = Wish("0" * 16, shape.model_id, shape.weights_sha256, layers, 8, quant="none")
    kept, lost = Span(NEAR, LayerRange(0, 3)), Span(NodeId("lost"), LayerRange(3, layers))
    before = Plan(wish.deployment, "ab" * 32, 0, (Replica(0, (kept, lost)),), 1, asked=True)
    alive = [OWN, NEAR, FAR]
    (gap,) = gaps(wish, before, alive)
    assert gap == Gap(0, lost.layers, kept=1)

    async def goes_to(freed_mb: dict[NodeId, int] | None = None) -> tuple[Laid, list[Span]]:
        laid = await estimates.layout(wish, before, alive, RoomAdjustments(freed_mb or {}))
        if laid.refusal is not None:
            return laid, []
        plan = make_plan(
            wish, "cd" * 32, [AvailableNode(node, node) for node in alive], before,
            asked=False, laid=laid,
        )  # fmt: skip
        (replica,) = plan.replicas
        assert kept in replica.spans
        return laid, [span for span in replica.spans if span != kept]

    # This machine holds least, but so do others; it is the nearest to itself.
    assert await goes_to() == (Laid((), {gap: (Span(OWN, lost.layers),)}), [Span(OWN, lost.layers)])
    for node in (OWN, NEAR):
        store.update(NodeInfo(node, node.title(), "", "test"), Offering(capacity=cpu(1)))
    assert (await goes_to())[1] == [Span(FAR, lost.layers)]
    store.update(NodeInfo(FAR, "Far", "", "test"), Offering(capacity=cpu(1)))
    laid, _ = await goes_to()
    assert laid.refusal is not None
    for name in ("Own", "Near", "Far"):
        assert f"{name}: no memory: one layer needs" in laid.refusal.message
    # What would be free if others rested.
    laid, spans = await goes_to({NEAR: 1000})
    assert (laid.refusal, spans) == (None, [Span(NEAR, lost.layers)])


async def test_who_may_take_nothing_is_refused_with_its_reason_not_with_what_it_has_free(
    store: ShardStore, estimates: Estimates
) -> None:
    said = Offering(capacity=cpu(1000), progress=NodeProgress(paused=True))
    store.update(NodeInfo(NEAR, "Near", "", "test"), said)
    shape = shape_of(await LocalWeights({}, (), None).manifest("builtin"), 256)
    wish = Wish("0" * 16, shape.model_id, shape.weights_sha256, shape.total_layers, 8)
    laid = await estimates.layout(replace(wish, nodes=(NEAR,)), None, {OWN, NEAR, FAR}, NOTHING)
    assert laid.refusal is not None
    assert "no machine may be used now" in laid.refusal.message
    assert "Near: it is paused, until `hearthnet resume` there" in laid.refusal.message


@pytest.mark.parametrize("counted", [100, 1])
async def test_a_wish_that_counts_other_layers_than_its_weights_have_is_refused(
    store: ShardStore, estimates: Estimates, counted: int
) -> None:
    shape = shape_of(await LocalWeights({}, (), None).manifest("builtin"), 256)
    wish = Wish("0" * 16, shape.model_id, shape.weights_sha256, counted, 8, quant="none")
    spans = (Span(NEAR, LayerRange(0, 1)), Span(FAR, LayerRange(1, shape.total_layers)))
    before = Plan(wish.deployment, "ab" * 32, 0, (Replica(0, spans),), 1, asked=True)
    layouts = Layouts(await asyncio.to_thread(Config), OWN, store, dict)
    layouts.planner = estimates
    for plan in (None, before):
        alive = {OWN, NEAR, FAR}
        with pytest.raises(WeightsMismatch, match=f"counts {counted} .* have {shape.total_layers}"):
            await estimates.layout(replace(wish, replicas=2), plan, alive, NOTHING)
        # Nor is it split evenly, as what nobody can lay out.
        with pytest.raises(WeightsMismatch):
            await layouts.laid_out(replace(wish, replicas=2), plan, {}, (), alive)


async def test_a_format_that_no_machine_serves_the_model_in_is_refused_before_it_is_fetched(
    store: ShardStore, estimates: Estimates, tmp_path: Path
) -> None:
    stored = await asyncio.to_thread(
        make_checkpoint, tmp_path / "states", "falcon_h1", layers=2, dtype="float16"
    )
    ask = {**ASK, "model": str(stored)}
    refusal = (await estimates.plan({**ask, "quant": "int8"}))["refusal"]
    assert (refusal["code"], refusal["fix"]) == ("bad_request", other_formats(["none", "int4"]))
    plain = await estimates.plan(ask)
    assert await estimates.plan({**ask, "quant": "auto"}) == plain, "what a shard makes of auto"
    assert plain["replicas"][0]["shards"][0]["format"] == "fp32"
    assert "int8" not in plain["replicas"][0]["bottleneck"]["help"]
    wish = Wish("0" * 16, ModelId(plain["model_id"]), plain["weights_sha256"], 2, 8, quant="int8")
    layouts = Layouts(await asyncio.to_thread(Config), OWN, store, dict)
    layouts.planner = estimates
    held = Replica(0, (Span(OWN, LayerRange(0, 2)),))
    for before in (None, Plan(wish.deployment, "ab" * 32, 0, (held,), 1, asked=True)):
        with pytest.raises(UnsupportedFamily, match="cannot be served in int8"):
            await layouts.laid_out(wish, before, {}, (), {OWN})


async def test_what_may_rest_makes_the_room_that_it_says_it_takes(store: ShardStore) -> None:
    """Also where this node was never asked about that model."""
    shard = advertised(NEAR, "0-3")
    said = replace(shard.descriptor, vram_required_mb=400)
    store.update(NodeInfo(NEAR, "Near", "", "test"), Offering((replace(shard, descriptor=said),)))
    layouts = Layouts(await asyncio.to_thread(Config), OWN, store, dict)
    wish = Wish("0" * 16, said.model_id, said.weights_sha256, 16, 320)
    other = LayerRange(0, 3)
    assert layouts.taken_mb(wish, said.layers) == 400
    assert layouts.taken_mb(wish, other) == layouts.need_mb(wish, other) == 30
    assert layouts.taken_mb(replace(wish, quant="int8"), said.layers) < 400


async def test_why_a_span_failed_elsewhere_is_said_here_as_there(store: ShardStore) -> None:
    shard = shard_id(ModelId("toy"), LayerRange(0, 4))
    phases = Phases(lambda shard, now: None)
    layouts = Layouts(await asyncio.to_thread(Config), OWN, store, dict)
    for error in (
        DiskFull("The disk of /models is full.", fix="Free some room."),
        UnsupportedFamily("It cannot be cut.", fix=""),
        TransferFailed(f"{'Nobody has it. ' * 40}", fix="Start the node that has it."),
    ):
        phases.failed(shard, error, 0.0)
        now = phases.get(shard)
        assert now is not None
        said = decoded_progress(NodeProgress((told_of(shard, now),)))
        store.update(NodeInfo(NEAR, "Near", "", "test"), Offering(progress=said))
        told = layouts.told(NEAR, shard)
        assert told is not None
        assert told.error is not None
        assert (told.error.code, told.error.fix) == (error.code, error.fix)
        assert told.error.message[:200] == error.message[:200]


def decoded_progress(progress: NodeProgress) -> NodeProgress:
    """As it arrives."""
    return codec.convert(codec.plain(progress), NodeProgress)


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_a_plan_never_asks_for_less_than_a_shard_does_when_it_loads(quant: Any) -> None:
    manifest = read_manifest(checkpoint_dir(), model_id=ModelId("builtin"))
    machine = Machine(OWN, "own", cpu(1000).devices)
    (bench,) = benches(shape_of(manifest, 512), machine, Demand(context=512), quant)
    for stop in range(1, manifest.total_layers + 1):
        layers = LayerRange(0, stop)
        said = estimate(
            manifest, layers, 4, kv_tokens=512, rows=256,
            weight_size=None if quant == "none" else bytes_per_weight(quant),
        )  # fmt: skip
        assert bench.need(layers).total >> 20 >= said.total_mb


@pytest.mark.parametrize(
    ("family", "quant"), [("gpt_oss", "int4"), ("gpt_oss", "int8"), ("granitemoe", "int8")]
)
def test_of_a_mixture_all_experts_are_held_and_few_are_read(
    family: str, quant: Any, tmp_path: Path
) -> None:
    stored = make_checkpoint(tmp_path / "mixed", family, layers=2, hidden=256, dtype="bfloat16")
    model = shape_of(read_manifest(stored), 512)
    whole = LayerRange(0, 2)
    for read, held in zip(model.layer_read, model.layer_weights, strict=True):
        assert 0.5 < read / held < 0.7, "two of four experts, and attention"
    machine = Machine(OWN, "own", cpu(1000).devices)
    (bench,) = benches(model, machine, Demand(context=512), quant)
    (dense,) = benches(replace(model, layer_read=()), machine, Demand(context=512), quant)
    assert bench.cost(whole) < dense.cost(whole)
    settings = replace(ShardSettings(), kv_tokens=512)
    request = ShardRequest(stored, ModelId("m"), whole, quant=quant, settings=settings)
    here = HostedOn(OWN, "own", Endpoint("wss://127.0.0.1:1"), torch.device("cpu"), 1)
    loaded = load_shard(plan_shard(request, here))
    assert loaded.descriptor.vram_required_mb <= bench.need(whole).total >> 20
    assert bench.need(whole).weights > dense.need(whole).weights * 1.2


def _in_blocks(stored: Path, target: Path) -> Path:
    return write_gguf(stored, target.with_suffix(".gguf"), "Q4_0")


def _in_codes(form: Form) -> Callable[[Path, Path], Path]:
    def write(stored: Path, target: Path) -> Path:
        write_coded(stored, target, form)
        return target

    return write


@pytest.mark.parametrize(
    ("quant", "itemsize", "weight_size"), [("none", 2, None), ("int8", 4, 1.125)]
)
@pytest.mark.parametrize(
    "write",
    [
        _in_blocks,
        _in_codes(fp8((128, 128))),
        _in_codes(awq(64)),
        _in_codes(packed(8, None, symmetric=True)),
    ],
    ids=["Q4_0", "fp8", "awq", "packed"],
)
def test_weights_that_are_decoded_count_as_what_they_are_computed_as(
    tmp_path: Path,
    write: Callable[[Path, Path], Path],
    quant: Any,
    itemsize: int,
    weight_size: float | None,
) -> None:
    stored = make_checkpoint(tmp_path / "stored", "llama", layers=2, hidden=256)
    manifest = read_manifest(write(stored, tmp_path / "model"))
    whole, model = LayerRange(0, 2), shape_of(manifest, 512)
    said = estimate(manifest, whole, itemsize, kv_tokens=512, rows=256, weight_size=weight_size)
    speeds = tuple(Speed(name, 10.0, 50.0) for name in ("fp32", "bf16", "int8"))
    machine = Machine(OWN, "own", (Device("cpu", 1000 * MB, 1000 * MB, speeds),))
    (bench,) = benches(model, machine, Demand(context=512), quant)
    need = bench.need(whole)
    assert said.weights_mb - 1 < need.weights / MB <= said.weights_mb
    assert said.caches_mb - 1 < need.caches / MB <= said.caches_mb
    assert 0 <= shard_bytes(model, whole, bench.format, bench.device, 512) / MB - said.total_mb < 4
    assert bench.fetch_bytes == manifest.layer_bytes, "as stored"
    assert sum(bench.fetch_bytes) < need.weights


async def test_replicas_are_laid_out_with_the_whole_cache_that_a_shard_sets_aside(
    store: ShardStore, estimates: Estimates
) -> None:
    manifest = await LocalWeights({}, (), None).manifest("builtin")
    kv_tokens = HostSection().kv_tokens
    whole = LayerRange(0, manifest.total_layers)
    need = estimate(manifest, whole, 4, kv_tokens=kv_tokens, rows=512)
    for node in (OWN, NEAR, FAR, DOUBTED):  # enough for the weights, and for a shorter cache
        asking_mb = 0 if node == OWN else ends_mb(manifest, 4)  # this node asks already
        room = cpu(need.total_mb - need.caches_mb // 3 + asking_mb)
        store.update(NodeInfo(node, node.title(), "", "test"), Offering(capacity=room))
    wish = Wish(
        "0" * 16,
        manifest.model_id,
        manifest.weights_sha256,
        manifest.total_layers,
        13,
        quant="none",
    )
    laid = await estimates.layout(wish, None, {OWN, NEAR, FAR}, NOTHING)
    (spans,) = laid.replicas
    assert len(spans) > 1
    for span in spans:
        took = estimate(manifest, span.layers, 4, kv_tokens=kv_tokens, rows=512)
        assert took.total_mb <= room.devices[0].free_bytes // MB
    # An estimate says the same beforehand, also that a shorter context makes no room.
    unsaid = {**ASK, "quant": None, "context": 4096}
    foretold = await estimates.plan(unsaid)
    shards = foretold["replicas"][0]["shards"]
    assert (foretold["quant"], foretold["positions"]) == ("none", kv_tokens)
    assert [(s["node_id"], s["layers"]) for s in shards] == [(s.node, str(s.layers)) for s in spans]
    for node in (OWN, NEAR, FAR):
        room = cpu(need.total_mb - need.caches_mb + ends_mb(manifest, 4))
        store.update(NodeInfo(node, node.title(), "", "test"), Offering(capacity=room))
    one = {**unsaid, "nodes": ["Far"]}
    refused = (await estimates.plan(one))["refusal"]
    laid = await estimates.layout(replace(wish, nodes=(FAR,)), None, {OWN, NEAR, FAR}, NOTHING)
    assert laid.refusal is not None
    assert refused["message"].rstrip(".") in laid.refusal.message
    assert "--context" not in refused["fix"] + laid.refusal.fix
