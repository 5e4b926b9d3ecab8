"""What a node does about wishes: whatever happens, it ends as wished, within memory, without a gap
that nobody asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from mesh.deployments.formats import LoadedFormat, is_as_wished
from mesh.deployments.reconcile import (
    MAX_PROVISIONED,
    LoadAction,
    OwnShard,
    ServedShard,
    ShardStage,
    View,
    reconcile,
    wishes_of,
)
from mesh.deployments.spreading import crowded
from mesh.deployments.wishes import Deployment, Plan, Quant, Replica, Span, Wish, live
from mesh.types import LayerRange, ModelId, NodeId, ShardId, shard_id
from tests.deployments.house import (
    LAYER_MB,
    WEIGHTS,
    SimulatedHouse,
    SimulatedNode,
    need_mb,
)

AMPLE_MB = 100 * LAYER_MB
LIMIT_S = 10.0

WISHES = ("deploy", "scale", "change", "pin", "rest", "evict")
HAPPENINGS = (
    "kill", "back", "join", "short", "recover", "wait", "await", "come", "step", "step", "step",
    "step",
)  # fmt: skip
OPERATIONS = st.builds(
    lambda which, replicas, others: [("deploy", which, replicas), *others],
    st.integers(0, 2),
    st.integers(1, 3),
    st.lists(
        st.tuples(st.sampled_from(WISHES + HAPPENINGS), st.integers(0, 7), st.integers(0, 3)),
        min_size=8,
        max_size=40,
    ),
)
"""Nothing happens before something was wished for, and short lists find little."""
MAX_NODES = 6


def run(house: SimulatedHouse, operations: list[tuple[str, int, int]]) -> None:
    """Do these things to a house, with turns of single nodes in between."""
    for what, which, count in operations:
        deployed = live(house.deployments)
        if what == "deploy" and len(deployed) < 3:
            house.deploy(f"m{which % 3}", 4 + which % 3, max(1, count))
        elif deployed:
            wish_otherwise(house, what, deployed[which % len(deployed)], which, count)
        happen(house, what, which, count)
        give(house.nodes[which % len(house.nodes)], what, count)
        house.replan(LIMIT_S)


def wish_otherwise(
    house: SimulatedHouse, what: str, chosen: Deployment, which: int, count: int
) -> None:
    """What somebody may wish of a deployment."""
    match what:
        case "scale":
            house.scale(chosen, count)
        case "change":
            quant: Quant = ("none", "int8", "auto", "none")[count]
            house.change(chosen, quant, 100 * (which % 3))
        case "pin":
            node = house.nodes[which % len(house.nodes)].node
            house.pin(chosen, Span(node, LayerRange(count % 3, count % 3 + 1)))
        case "rest":
            house.rest(chosen)
        case "evict":
            house.evict(chosen)


def happen(house: SimulatedHouse, what: str, which: int, count: int) -> None:
    """What may happen to machines."""
    node = house.nodes[which % len(house.nodes)]
    match what:
        case "kill" if node.is_up and len(house.up) > 1:
            house.kill(node)
        case "back" if not node.is_up:
            house.bring_back(node)
        case "join" if len(house.nodes) < MAX_NODES:
            house.join(node.total_mb)
        case "short":
            house.runs_short(node)
        case "recover":
            house.recovers(node)
        case "wait":
            for away in house.nodes:
                away.gone_s += 0.0 if away.is_up else LIMIT_S
        case "step" if not count:
            house.together()
        case "step" if node.is_up:
            house.step(node)


def give(node: SimulatedNode, what: str, count: int) -> None:
    """What may happen to what a machine fetches."""
    match what:
        case "await":
            node.awaited.add(ModelId(f"m{count % 3}"))
        case "come":
            node.awaited.clear()


def as_wished(house: SimulatedHouse, node: SimulatedNode) -> set[ShardId]:
    """What a node holds of what it is to hold, in the format of the first deployment that wants
    it."""
    wishes = {
        shard: each.wish
        for each in live(house.deployments)[::-1]
        for shard in each.shards_of(node.node)
    }
    return {
        held.shard
        for held in node.held.values()
        if held.shard in wishes and is_as_wished(held.loaded, wishes[held.shard])
        if not held.is_to_come
    }


@settings(max_examples=150)
@given(st.integers(1, 4), st.booleans(), OPERATIONS)
@example(
    2,
    False,
    [
        *[("deploy", 0, 1)] * 2,
        ("deploy", 0, 2),
        ("change", 0, 1),
        *[("step", 0, 0)] * 2,
        ("evict", 0, 0),
        ("deploy", 0, 0),  # from a format to what each machine has by itself
    ],
)
def test_with_room_everybody_ends_with_exactly_what_is_wished(
    nodes: int, is_measured: bool, operations: list[tuple[str, int, int]]
) -> None:
    house = SimulatedHouse([AMPLE_MB] * nodes, is_measured=is_measured)
    run(house, operations)
    pinned = {pin.node for each in live(house.deployments) for pin in each.wish.pins}
    for node in house.nodes:
        house.recovers(node)
        node.awaited.clear()
        node.gone_s += 0.0 if node.is_up else 2 * LIMIT_S
        if node.node in pinned and not node.is_up:
            house.bring_back(node)
    for _ in house.nodes:  # a copy that lies beside another moves at a time
        house.replan(LIMIT_S)
        assert house.settle()
    assert not house.gaps
    if is_measured:
        assert not any(crowded(each, house.machines()) for each in live(house.deployments))
    for node in house.up:
        wanted = {s for d in live(house.deployments) for s in d.shards_of(node.node)}
        assert set(node.held) == wanted
        assert as_wished(house, node) == wanted
    for deployment in live(house.deployments):
        first = [r for r in deployment.plan.replicas if r.number == 0] if deployment.plan else []
        if deployment.is_wanted and first:
            assert set(deployment.wish.pins) <= set(first[0].spans)
        if deployment.is_wanted:
            assert house.served(deployment.wish.model_id) >= set(
                range(deployment.wish.total_layers)
            )


@settings(max_examples=300)
@given(
    st.lists(st.integers(1, 12).map(lambda layers: layers * LAYER_MB), min_size=1, max_size=4),
    st.booleans(),
    OPERATIONS,
)
@example(
    [2 * LAYER_MB] * 2,
    False,
    [
        *[("deploy", 0, 2), ("change", 0, 0), ("step", 0, 0), ("step", 0, 0)],
        *[("deploy", 0, 0)] * 4,
        ("change", 0, 2),  # from what is served to another format, and `auto` may be either
    ],
)
def test_without_room_it_comes_to_rest_and_says_what_waits(
    memories: list[int], is_measured: bool, operations: list[tuple[str, int, int]]
) -> None:
    house = SimulatedHouse(memories, is_measured=is_measured)
    run(house, operations)
    assert house.settle()  # `SimulatedHouse` has checked memory and gaps at every step
    for node in house.up:
        decision = house.decide(node)
        wanted = {s for d in live(house.deployments) for s in d.shards_of(node.node)}
        fetched = {held.shard for held in node.fetching}
        assert set(decision.waiting or {}) == wanted - as_wished(house, node) - fetched
        node.awaited.clear()
    assert house.settle()
    for node in house.up:
        wanted = {s for d in live(house.deployments) for s in d.shards_of(node.node)}
        assert set(house.decide(node).waiting or {}) == wanted - as_wished(house, node)


@settings(max_examples=150)
@given(st.integers(1, 4), st.booleans(), OPERATIONS, st.integers(0, 2))
def test_what_does_not_come_holds_up_nothing_else(
    nodes: int, is_measured: bool, operations: list[tuple[str, int, int]], which: int
) -> None:
    house = SimulatedHouse([AMPLE_MB] * nodes, is_measured=is_measured)
    late = ModelId(f"m{which}")
    for node in house.nodes:
        node.awaited = {late}
    run(house, [each for each in operations if each[0] not in ("await", "come", "join", "kill")])
    for node in house.nodes:
        house.recovers(node)
    house.replan(LIMIT_S)
    assert house.settle()
    for node in house.nodes:
        wanted = {
            shard
            for each in live(house.deployments)
            for shard in each.shards_of(node.node)
            if each.wish.model_id != late
        }
        assert len(node.fetching) <= MAX_PROVISIONED
        if len(node.fetching) < MAX_PROVISIONED:
            assert wanted <= as_wished(house, node)


@settings(max_examples=200)
@given(
    st.lists(st.integers(2, 14).map(lambda layers: layers * LAYER_MB), min_size=1, max_size=3),
    st.integers(1, 2),
    st.integers(1, 2),
    st.lists(st.integers(0, 2), max_size=2),
    st.sampled_from(["none", "int8"]),
)
def test_the_gaps_of_a_change_are_known_beforehand(
    memories: list[int], before: int, after: int, nodes: list[int], quant: Quant
) -> None:
    house = SimulatedHouse(memories)
    assume(house.deploy("m", 6, before))
    assert house.settle()
    (deployed,) = live(house.deployments)
    assume(not any(house.decide(node).waiting for node in house.nodes))
    assert not house.gaps
    only = tuple({house.nodes[which % len(memories)].node for which in nodes})
    wish = replace(deployed.wish, replicas=after, quant=quant, nodes=only)
    assume(house.wish(wish, deployed.plan))
    assert house.settle()
    assume(not any(house.decide(node).waiting for node in house.nodes))
    opened = {
        (node, str(drop.shard).rpartition(":")[2]) for node, drop in [*house.gaps, *house.replaced]
    }
    assert opened <= house.foretold, "nobody is surprised"
    assert bool(opened) == bool(house.foretold), "nobody is warned for nothing"


def test_a_gap_goes_to_the_fastest_machines_with_room_and_not_to_who_holds_least() -> None:
    house = SimulatedHouse([layers * LAYER_MB for layers in (8, 9, 3, 3)])
    assert house.deploy("m", 6)
    assert house.settle()
    house.is_measured = True
    fastest, least, *_, lost = house.nodes
    held = [sum(len(each.layers) for each in node.held.values()) for node in (fastest, least)]
    assert held == [2, 1]
    gone = [each.layers for each in lost.held.values()]
    house.kill(lost)
    lost.gone_s = 2 * LIMIT_S
    house.replan(LIMIT_S)
    (planned,) = live(house.deployments)
    assert planned.plan is not None
    assert all(layers in planned.plan.spans_of(fastest.node) for layers in gone)
    assert house.filled == 1
    assert house.settle()
    house.replan(LIMIT_S)
    assert house.filled == 1, "it is planned once"


def deployment(*spans: tuple[str, str], asked: bool = True, layers: int = 4) -> Deployment:
    """One replica over these spans, for a model of 10 MB a layer."""
    wish = Wish("ab" * 8, ModelId("m"), WEIGHTS, layers, layers * LAYER_MB)
    placed = tuple(Span(NodeId(node), LayerRange.parse(text)) for node, text in spans)
    plan = Plan(wish.deployment, "cd" * 32, 1, (Replica(0, placed),), 1, asked)
    return Deployment(wish, plan, "cd" * 32, NodeId("op"), 0)


def holding(
    layers: str, state: ShardStage = ShardStage.READY, *, by_hand: bool = False
) -> OwnShard:
    span = LayerRange.parse(layers)
    shard = shard_id(ModelId("m"), span)
    mb = len(span) * LAYER_MB
    return OwnShard(shard, ModelId("m"), WEIGHTS, span, mb, state, by_hand=by_hand)


def view(deployed: Deployment, *held: OwnShard, free_mb: int) -> View:
    return View(NodeId("me"), {deployed.id: deployed}, held, (), free_mb, need_mb)


def test_the_new_is_loaded_before_the_old_is_dropped_where_memory_allows() -> None:
    moved = deployment(("me", "0-3"))
    first = reconcile(view(moved, holding("0-1"), free_mb=40))
    new = LoadAction(moved.id, shard_id(ModelId("m"), LayerRange(0, 4)), LayerRange(0, 4), 40)
    assert (first.fetches, first.load, first.drops) == ((new,), None, ())
    assert reconcile(replace(view(moved, free_mb=0), free_mb=None)).fetches == (new,), "who knows"
    fetched = holding("0-3", ShardStage.PROVISIONED)
    second = reconcile(view(moved, holding("0-1"), fetched, free_mb=40))
    assert (second.fetches, second.load, second.drops) == ((), new, ())
    still = reconcile(view(moved, holding("0-1"), holding("0-3", ShardStage.LOADING), free_mb=0))
    assert still.is_idle
    then = reconcile(view(moved, holding("0-1"), holding("0-3"), free_mb=0))
    assert [(drop.shard, drop.gap) for drop in then.drops] == [("m:0-1", False)]


def test_without_room_the_old_goes_first_and_the_gap_is_told_if_an_operator_asked() -> None:
    asked = reconcile(view(deployment(("me", "0-3")), holding("0-1"), free_mb=25))
    assert [(drop.shard, drop.gap) for drop in asked.drops] == [("m:0-1", True)]
    assert asked.load is None
    by_itself = deployment(("me", "0-3"), asked=False)
    waits = reconcile(view(by_itself, holding("0-1"), free_mb=25))
    assert waits.is_idle
    assert waits.waiting == {"m:0-3": "needs 40 MiB, 25 MiB are free"}


def test_while_enough_is_going_nothing_else_goes_and_no_room_is_lacking() -> None:
    wished, old, leaving = deployment(("me", "0-3")), holding("0-1"), holding("4-5")
    nobodys = replace(leaving, shard=ShardId("n:4-5"), model_id=ModelId("n"))
    for other in (replace(leaving, state=ShardStage.LEAVING), nobodys):
        decision = reconcile(view(wished, old, other, free_mb=20))
        assert {drop.shard for drop in decision.drops} <= {nobodys.shard}
        assert decision.waiting == {"m:0-3": "needs 40 MiB, 20 MiB are free; room is being made"}
        assert not decision.lacking


def test_what_is_fetched_keeps_its_room_and_holds_up_nothing_that_fits_beside_it() -> None:
    wished = deployment(("me", "0-5"), ("me", "6-8"), ("me", "9-9"), layers=10)
    large = holding("0-5", ShardStage.PROVISIONING)
    first = reconcile(view(wished, large, free_mb=80))
    assert [each.shard for each in first.fetches] == ["m:9-9"]
    needs = "needs 30 MiB, 20 MiB are free beside what is to come"
    assert (first.waiting, first.lacking) == ({"m:6-8": needs}, {"m:6-8"})
    small = holding("9-9", ShardStage.PROVISIONED)
    second = reconcile(view(wished, large, small, free_mb=80))
    assert second.load is not None
    assert (second.load.shard, second.fetches) == (small.shard, ())
    loading = replace(small, state=ShardStage.LOADING)
    come = replace(large, state=ShardStage.PROVISIONED)
    third = reconcile(view(wished, come, loading, free_mb=70))
    assert third.is_idle
    assert third.waiting is not None
    assert third.waiting[large.shard] == "its weights are here; after m:9-9"
    ready = replace(small, state=ShardStage.READY)
    fourth = reconcile(view(wished, come, ready, free_mb=70))
    assert fourth.load is not None
    assert fourth.load.shard == large.shard


def test_two_that_do_not_fit_together_are_not_both_fetched() -> None:
    both = deployment(("me", "0-2"), ("me", "3-5"), layers=6)
    decision = reconcile(view(both, free_mb=50))
    assert [each.shard for each in decision.fetches] == ["m:0-2"]
    assert decision.waiting == {"m:3-5": "needs 30 MiB, 20 MiB are free beside what is to come"}


def test_what_has_no_room_any_more_once_it_is_fetched_is_not_loaded_and_keeps_none() -> None:
    wished = deployment(("me", "0-5"), ("me", "6-8"), layers=9)
    come = holding("0-5", ShardStage.PROVISIONED)
    decision = reconcile(view(wished, come, free_mb=50))
    assert decision.load is None
    assert [each.shard for each in decision.fetches] == ["m:6-8"]
    assert decision.waiting == {"m:0-5": "needs 60 MiB, 50 MiB are free"}
    assert decision.lacking == {"m:0-5"}
    # What was held in its place goes first, as an operator asked for this.
    old = holding("7-8")
    other = reconcile(view(deployment(("me", "0-5"), layers=9), come, old, free_mb=50))
    assert [(drop.shard, drop.gap) for drop in other.drops] == [("m:7-8", True)]


def test_so_many_are_fetched_at_a_time_and_the_others_say_what_they_wait_for() -> None:
    spans = [("me", f"{layer}-{layer}") for layer in range(MAX_PROVISIONED + 1)]
    wished = deployment(*spans, layers=len(spans))
    first = reconcile(view(wished, free_mb=AMPLE_MB))
    assert len(first.fetches) == MAX_PROVISIONED
    last = f"m:{MAX_PROVISIONED}-{MAX_PROVISIONED}"
    more = MAX_PROVISIONED - 1
    assert first.waiting == {last: f"after m:0-0 or one of {more} more whose weights are fetched"}
    assert first.unfetched == {last}
    assert not first.lacking
    coming = [holding(text, ShardStage.PROVISIONING) for _, text in spans[:-1]]
    assert reconcile(view(wished, *coming, free_mb=AMPLE_MB)).unfetched == {last}
    coming[0] = replace(coming[0], state=ShardStage.PROVISIONED)
    then = reconcile(view(wished, *coming, free_mb=AMPLE_MB))
    assert [each.shard for each in then.fetches] == [last]


def test_what_is_fetched_and_not_wished_for_any_more_is_given_up() -> None:
    come, other = holding("0-1", ShardStage.PROVISIONED), holding("2-3", ShardStage.PROVISIONING)
    other = replace(other, weights_sha256="cd" * 32)
    decision = reconcile(view(deployment(("me", "2-3")), come, other, free_mb=20))
    assert {drop.shard for drop in decision.drops} == {come.shard, other.shard}
    assert not any(drop.gap for drop in decision.drops)
    after = reconcile(view(deployment(("me", "2-3")), free_mb=20))
    assert [each.shard for each in after.fetches] == [other.shard]


def test_what_is_loaded_anew_waits_for_its_own_model_and_for_no_download_of_another() -> None:
    deployed = wished_as(deployment(("me", "0-1"), ("me", "2-3")), "int8")
    here = loaded_as(holding("0-1"), "bf16", "none")
    back = holding("2-3", ShardStage.PROVISIONED)
    waits = reconcile(view(deployed, here, back, free_mb=40))
    assert waits.waiting == {"m:0-1": "it is loaded anew after m:2-3"}
    assert not waits.drops
    full = reconcile(view(deployed, here, back, free_mb=0))  # else each would wait for the other
    assert [drop.shard for drop in full.drops] == [here.shard]
    another = replace(deployed.wish, deployment="f" * 16, model_id=ModelId("n"))
    plan = replace(deployed.plan, deployment=another.deployment) if deployed.plan else None
    others = replace(deployed, wish=another, plan=plan)
    far = replace(back, shard=ShardId("n:2-3"), model_id=another.model_id)
    far = replace(far, state=ShardStage.PROVISIONING)
    seen = view(deployed, here, loaded_as(holding("2-3"), "int8", "int8"), far, free_mb=40)
    both = replace(seen, deployments={deployed.id: deployed, others.id: others})
    assert [drop.shard for drop in reconcile(both).drops] == [here.shard]


def test_two_that_hold_the_same_do_not_both_go_for_each_other_s_sake() -> None:
    moved = deployment(("third", "0-3"))
    mine = holding("0-3")
    other = ServedShard(NodeId("you"), mine.model_id, WEIGHTS, mine.layers)
    third = replace(other, node=NodeId("third"))
    before = View(NodeId("me"), {moved.id: moved}, [mine], [other], 0, need_mb)
    assert reconcile(before).is_idle
    for odd in ({"weights_sha256": "cd" * 32}, {"model_id": ModelId("n")}):
        assert reconcile(replace(before, served=[other, replace(third, **odd)])).is_idle
    loading = replace(before, held=[replace(mine, state=ShardStage.LOADING)])
    assert [drop.shard for drop in reconcile(loading).drops] == ["m:0-3"]
    after = replace(before, served=[other, third])
    assert [(drop.shard, drop.gap) for drop in reconcile(after).drops] == [("m:0-3", False)]


def test_nothing_goes_for_room_that_would_not_be_enough() -> None:
    asked = reconcile(view(deployment(("me", "0-3")), holding("0-1"), free_mb=15))
    assert asked.is_idle
    assert asked.waiting == {"m:0-3": "needs 40 MiB, 15 MiB are free"}
    enough = reconcile(view(deployment(("me", "0-3")), holding("0-1"), free_mb=20))
    assert [(drop.shard, drop.gap) for drop in enough.drops] == [("m:0-1", True)]
    other = holding("0-1")
    other = replace(other, shard=ShardId("n:0-1"), model_id=ModelId("n"))
    wished = deployment(("me", "0-3"))
    unplanned = Deployment(
        replace(wished.wish, deployment="f" * 16, model_id=other.model_id),
        None,
        "cd" * 32,
        NodeId("op"),
        0,
    )
    both = replace(
        view(wished, other, free_mb=20), deployments={wished.id: wished, unplanned.id: unplanned}
    )
    assert reconcile(both).is_idle, "what is another model's makes no room"


def test_what_is_held_by_hand_is_never_dropped() -> None:
    house = view(deployment(("you", "0-3")), holding("0-3", by_hand=True), free_mb=0)
    assert reconcile(house).is_idle
    wanted = view(deployment(("me", "0-3")), holding("0-3", by_hand=True), free_mb=0)
    assert reconcile(wanted).is_idle
    assert set(wishes_of(wanted)) == {"m:0-3"}


def test_other_weights_by_a_wished_name_go_unless_they_are_held_by_hand() -> None:
    before = replace(holding("0-3"), weights_sha256="cd" * 32)
    anew = deployment(("me", "0-3"))
    leaves = reconcile(view(anew, before, free_mb=80))
    assert [(drop.shard, drop.why) for drop in leaves.drops] == [
        ("m:0-3", "no deployment wants it")
    ]
    by_hand = reconcile(view(anew, replace(before, by_hand=True), free_mb=80))
    assert by_hand.is_idle
    assert by_hand.waiting == {"m:0-3": "other weights are held here by that name"}


def loaded_as(held: OwnShard, dtype: str, quant: str, kv_tokens: int = 4096) -> OwnShard:
    return replace(held, loaded=LoadedFormat(dtype, quant, kv_tokens))


def wished_as(deployed: Deployment, quant: Quant, context: int = 0) -> Deployment:
    return replace(deployed, wish=replace(deployed.wish, quant=quant, context=context))


@pytest.mark.parametrize(
    ("dtype", "quant", "wished", "context", "fulfils"),
    [
        ("bf16", "none", "int8", 0, False), ("int8", "int8", "none", 0, False),
        ("int8", "int8", "int4", 0, False), ("int8", "auto", "int8", 0, True),
        ("int8", "auto", "auto", 0, True), ("bf16", "auto", "auto", 0, True),
        ("bf16", "none", "auto", 0, False), ("fp32", "auto", "none", 0, True),
        ("bf16", "none", "", 0, True), ("int8", "int8", "", 0, False),
        ("bf16", "none", "none", 4096, True), ("bf16", "none", "none", 4097, False),
    ],
)  # fmt: skip
def test_what_is_loaded_otherwise_than_is_wished_is_loaded_anew(
    dtype: str, quant: str, wished: Quant, context: int, fulfils: bool
) -> None:
    deployed = wished_as(deployment(("me", "0-3")), wished, context)
    held = holding("0-3")
    held = replace(held, loaded=LoadedFormat(dtype, quant, 4096, own="none"))
    seen = view(deployed, held, free_mb=0)
    first = reconcile(seen)
    assert [(drop.shard, drop.gap) for drop in first.drops] == [("m:0-3", True)] * (not fulfils)
    assert first.load is None
    if not fulfils:
        leaving = replace(seen, held=[replace(held, state=ShardStage.LEAVING)])
        assert reconcile(leaving).is_idle
        then = reconcile(replace(seen, held=[], free_mb=40))
        assert [each.shard for each in then.fetches] == [held.shard]


def test_what_would_not_fit_in_its_own_place_stays_and_says_so() -> None:
    deployed = wished_as(deployment(("me", "0-3")), "none")
    held = replace(loaded_as(holding("0-3"), "int8", "int8"), mb=20)
    decision = reconcile(view(deployed, held, free_mb=15))
    assert decision.is_idle
    assert decision.waiting == {"m:0-3": "needs 40 MiB instead of 20 MiB, 15 MiB are free"}
    assert decision.lacking == {"m:0-3"}
    assert reconcile(view(deployed, held, free_mb=20)).drops


def test_parts_are_loaded_anew_one_after_the_other_and_what_is_held_by_hand_is_not() -> None:
    both = deployment(("me", "0-1"), ("me", "2-3"))
    deployed = wished_as(both, "int8")
    parts = [loaded_as(holding(layers), "bf16", "none") for layers in ("0-1", "2-3")]
    assert [drop.shard for drop in reconcile(view(deployed, *parts, free_mb=40)).drops] == ["m:0-1"]
    by_hand = replace(parts[0], by_hand=True)
    decision = reconcile(view(deployed, by_hand, free_mb=40))
    assert not decision.drops
    assert "by hand" in (decision.waiting or {})[by_hand.shard]


def test_layers_in_another_format_do_not_stand_in_for_what_is_wished() -> None:
    deployed = wished_as(deployment(("you", "0-3")), "int8")
    mine = loaded_as(holding("0-1"), "bf16", "none")
    old = ServedShard(NodeId("you"), mine.model_id, WEIGHTS, LayerRange(0, 4), LoadedFormat("bf16"))
    before = View(NodeId("me"), {deployed.id: deployed}, [mine], [old], 0, need_mb)
    assert reconcile(before).is_idle
    new = replace(old, loaded=LoadedFormat("int8"))
    assert [drop.shard for drop in reconcile(replace(before, served=[new])).drops] == ["m:0-1"]
    # Nor does what goes to be loaded anew here.
    both = wished_as(deployment(("me", "0-3")), "int8")
    anew = loaded_as(holding("0-3"), "bf16", "none")
    decision = reconcile(view(both, mine, anew, free_mb=0))
    assert [drop.shard for drop in decision.drops] == [anew.shard]
