"""What a plan makes of machines without room: refused spans, even parts, never over memory."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from mesh.capacity import Device, Speed
from mesh.deployments.laid import AvailableNode, Laid
from mesh.deployments.laying import RoomAdjustments, lay, rooms, with_more
from mesh.deployments.placement import gaps, make_plan, without
from mesh.deployments.refusals import MAX_REFUSALS, RESPECTED_S, Refusals
from mesh.deployments.wishes import Plan, Replica, Span, Wish
from mesh.errors import NotEnoughMemory
from mesh.models.cuts import Cuts
from mesh.routing.fitting import asking_bytes, shard_bytes
from mesh.routing.machines import Demand, HeldLayers, Machine
from mesh.types import LayerRange, NodeId
from tests.routing.shapes import model_of, with_layers

ATTIC, KITCHEN, STUDY = NODES = [NodeId(name) for name in ("attic", "kitchen", "study")]
LAYERS, MB, CONTEXT = 12, 1 << 20, 1024
MODEL = model_of(
    "toy", (40 * MB,) * LAYERS, "fp32", ends_bytes=20 * MB, head_bytes=10 * MB, hidden_size=64,
    scratch_bytes=10 * MB, weights_sha256="ab" * 32,
)  # fmt: skip
WISH = Wish("0" * 16, MODEL.model_id, MODEL.weights_sha256, LAYERS, 480)
ALONE = Demand(asker=ATTIC, quant="none", context=CONTEXT)


def machine(node: NodeId, free_mb: int, *, is_measured: bool = True) -> Machine:
    speeds = (Speed("fp32", 10.0, 50.0),) if is_measured else ()
    return Machine(node, node, (Device("cpu", free_mb * MB, 4096 * MB, speeds),))


def available(*machines: Machine) -> list[AvailableNode]:
    return [AvailableNode(m.node_id, m.name, m.devices[0].free_bytes >> 20) for m in machines]


def needs(parts: list[LayerRange], *, thin: bool = False) -> int:
    """What these shards and asking take of a machine, as they say themselves."""
    device = Device("cpu", 0, 0)
    own = sum(shard_bytes(MODEL, layers, "fp32", None, CONTEXT) for layers in parts)
    return own + asking_bytes(MODEL, device, thin=thin)


def test_a_refused_span_is_made_smaller_and_the_rest_goes_elsewhere() -> None:
    house = [machine(node, 900) for node in NODES]
    fast = (Speed("fp32", 100.0, 500.0),)  # by what it says of itself it would get all again
    house[2] = replace(house[2], devices=(replace(house[2].devices[0], speeds=fast),))
    spans = (Span(ATTIC, LayerRange(0, 4)), Span(STUDY, LayerRange(4, LAYERS)))
    plan = Plan(WISH.deployment, "ab" * 32, 0, (Replica(0, spans),), 1, asked=True)
    refused = [spans[1]]
    before = without(plan, refused)
    assert before is not None
    for _ in range(8):
        told = RoomAdjustments({ATTIC: -300}, refused)  # its part is not loaded yet
        laid = lay(MODEL, house, WISH, before, gaps(WISH, before, NODES), ALONE, told)
        new = make_plan(WISH, "cd" * 32, available(*house), before, asked=True, laid=laid)
        assert spans[0] in new.spans
        assert not set(refused) & new.spans
        refused += [span for span in new.spans if span.node == STUDY]
    # Whatever it is asked for it refuses: less and less of it, until nothing.
    sizes = [len(span.layers) for span in refused]
    assert sizes == sorted(set(sizes), reverse=True)
    assert STUDY not in new.nodes


def test_copies_of_layers_lie_apart_however_they_come_to_lie_there() -> None:
    """Gaps that are filled count as what is kept does, though one machine were the fastest."""
    first, second = WISH.whole.parts(2)
    house = [machine(node, 3000) for node in NODES]
    fast = (Speed("fp32", 100.0, 500.0),)
    house[1] = replace(house[1], devices=(replace(house[1].devices[0], speeds=fast),))
    replicas = tuple(
        Replica(number, (Span(ATTIC, first), Span(NodeId("lost"), second))) for number in range(2)
    )
    wish = replace(WISH, replicas=2)
    for there in (replicas, replicas[:1]):
        before = Plan(WISH.deployment, "ab" * 32, 0, there, 2, asked=True)
        laid = lay(MODEL, house, wish, before, gaps(wish, before, NODES), ALONE)
        new = [*laid.gaps.values(), *laid.replicas]
        assert new[0] == (Span(KITCHEN, second),)
        assert len(new) == 2
        assert KITCHEN not in {span.node for span in new[1]}
    # As does what is pinned there, which it has not yet.
    before = Plan(WISH.deployment, "ab" * 32, 0, replicas[:1], 2, asked=True)
    pinned = replace(wish, pins=(Span(KITCHEN, second),))
    laid = lay(MODEL, house, pinned, before, gaps(pinned, before, NODES), ALONE)
    assert not laid.gaps
    assert laid.replicas == ((Span(STUDY, WISH.whole),),)


def test_a_gap_without_room_on_disks_is_refused_whatever_else_lies_there() -> None:
    first, second = WISH.whole.parts(2)
    full = replace(machine(KITCHEN, 3000), held=(HeldLayers(first),), disk_bytes=39 * MB)
    spans = (Span(KITCHEN, first), Span(NodeId("lost"), second))
    before = Plan(WISH.deployment, "ab" * 32, 0, (Replica(0, spans),), 1, asked=True)
    open_gaps = gaps(WISH, before, [KITCHEN])
    refusal = lay(MODEL, [full], WISH, before, open_gaps, replace(ALONE, asker=None)).refusal
    assert refusal is not None
    assert "have room for 0 of 6 layers; 240 MiB are missing there" in refusal.message


def test_refusals_are_respected_for_a_while() -> None:
    refusals, span = Refusals(), Span(STUDY, LayerRange(0, 4))
    refusals.put("one", [span], 0.0)
    assert refusals.of("one", RESPECTED_S - 1) == [span]
    assert refusals.of("other", 1.0) == []
    assert refusals.of("one", RESPECTED_S) == []


def test_the_oldest_refusals_go_for_newer_ones() -> None:
    refusals = Refusals()
    spans = [Span(STUDY, LayerRange(number, number + 1)) for number in range(MAX_REFUSALS)]
    refusals.put("one", spans, 0.0)
    refusals.put("one", spans[:1], 1.0)
    assert len(refusals.of("one", 2.0)) == MAX_REFUSALS
    refusals.put("other", spans[:1], 1.0)
    assert refusals.of("one", 2.0) == [*spans[2:], spans[0]], "the first was said again"


def test_even_parts_are_as_large_as_there_is_room() -> None:
    house = [machine(ATTIC, 900, is_measured=False), machine(KITCHEN, 320, is_measured=False)]
    laid = rooms(MODEL, house, ALONE)
    small = laid.rooms[KITCHEN]
    assert 0 < small < LAYERS // 2 < laid.rooms[ATTIC]
    plan = make_plan(WISH, "ab" * 32, available(*house), None, asked=True, laid=laid)
    assert {s.node: len(s.layers) for s in plan.spans} == {ATTIC: LAYERS - small, KITCHEN: small}
    even = make_plan(WISH, "ab" * 32, available(*house), None, asked=True)
    assert {len(span.layers) for span in even.spans} == {LAYERS // 2}  # where nobody knows

    with pytest.raises(NotEnoughMemory, match=f"12 layers.*attic has room for.*{small} .320 MiB"):
        make_plan(
            replace(WISH, replicas=2), "ab" * 32, available(*house), plan, asked=True,
            laid=Laid(rooms={ATTIC: 2, KITCHEN: small}),
        )  # fmt: skip


def test_even_parts_go_where_they_lie_on_disks() -> None:
    order = (STUDY, ATTIC, KITCHEN)  # of their memory, the layers lie otherwise
    house = [machine(node, 900 - at, is_measured=False) for at, node in enumerate(order)]
    third = LAYERS // 3
    lies = {KITCHEN: 0, ATTIC: third, STUDY: 2 * third}
    held = {node: LayerRange(at, at + third) for node, at in lies.items()}
    house = [replace(each, held=(HeldLayers(held[each.node_id]),)) for each in house]
    laid = rooms(MODEL, house, ALONE)
    plan = make_plan(WISH, "ab" * 32, available(*house), None, asked=True, laid=laid)
    assert {span.node: span.layers for span in plan.spans} == held


def test_replicas_of_a_small_model_share_no_machine_for_a_layer() -> None:
    small = with_layers(MODEL, (MB // 16,) * LAYERS)
    house = [machine(node, 2000, is_measured=False) for node in NODES]
    laid = rooms(small, house, ALONE)
    assert 2 * laid.extra > LAYERS  # three shards cost more than the model has layers
    wish = replace(WISH, replicas=3)
    plan = make_plan(wish, "ab" * 32, available(*house), None, asked=True, laid=laid)
    for node in NODES:
        here = [layer for part in plan.spans_of(node) for layer in range(part.start, part.stop)]
        assert sorted(here) == list(range(LAYERS))


def test_a_gap_goes_to_several_where_nobody_has_room_for_all_of_it() -> None:
    spans = (Span(ATTIC, LayerRange(0, 4)), Span(NodeId("lost"), LayerRange(4, LAYERS)))
    before = Plan(WISH.deployment, "ab" * 32, 0, (Replica(0, spans),), 1, asked=True)
    house = available(*(machine(node, 900) for node in NODES))
    laid = Laid(rooms={ATTIC: 1, KITCHEN: 4, STUDY: 5})
    plan = make_plan(WISH, "ab" * 32, house, before, asked=False, laid=laid)
    more = {span.node: len(span.layers) for span in plan.spans - before.spans}
    assert more == {ATTIC: 1, KITCHEN: 3, STUDY: 4}
    with pytest.raises(NotEnoughMemory):
        make_plan(
            WISH, "ab" * 32, house, before, asked=False,
            laid=Laid(rooms={ATTIC: 1, KITCHEN: 4, STUDY: 2}),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("more", "free"),
    [
        (0, (100, 500)), (50, (150, 500)), (950, (1000, 550)), (2000, (1000, 600)),
        # What is spoken for is all on one device, the first that has it.
        (-50, (50, 500)), (-300, (100, 200)), (-500, (100, 0)), (-550, (0, 50)), (-700, (0, 0)),
    ],
)  # fmt: skip
def test_what_gets_free_or_is_spoken_for_is_counted_on_the_devices_in_turn(
    more: int, free: tuple[int, int]
) -> None:
    devices = (Device("cuda:0", 100, 1000), Device("cuda:1", 500, 600))
    found = with_more(Machine(ATTIC, ATTIC, devices), more)
    assert tuple(each.free_bytes for each in found.devices) == free


@pytest.mark.parametrize("is_measured", [True, False])
def test_what_is_pinned_anew_leaves_the_rest_no_more_than_there_is(is_measured: bool) -> None:
    half = LAYERS // 2
    house = [machine(ATTIC, 700, is_measured=is_measured)]
    house += [machine(KITCHEN, 650, is_measured=is_measured)]
    before = Plan(
        WISH.deployment, "ab" * 32, 0, (Replica(0, (Span(STUDY, WISH.whole),)),), 1, asked=True
    )
    pinned = replace(WISH, pins=(Span(ATTIC, LayerRange(0, half)),))
    open_gaps = gaps(pinned, before, [ATTIC, KITCHEN])
    if is_measured:
        laid = lay(MODEL, house, pinned, before, open_gaps, ALONE)
    else:
        laid = rooms(MODEL, house, ALONE)
    plan = make_plan(pinned, "cd" * 32, available(*house), before, asked=True, laid=laid)
    for each in house:
        free = each.devices[0].free_bytes
        assert needs(plan.spans_of(each.node_id)) <= free < needs([WISH.whole])


@pytest.mark.parametrize("lacks", ["memory of one device", "disk"])
def test_what_is_pinned_anew_where_it_does_not_fit_is_refused(lacks: str) -> None:
    """As at first, also where all of the machine's devices together had the memory."""
    kitchen = machine(KITCHEN, 450)
    if lacks == "disk":
        kitchen = replace(machine(KITCHEN, 900), disk_bytes=100 * MB)
    else:
        other = replace(kitchen.devices[0], name="cpu:1")
        kitchen = replace(kitchen, devices=(*kitchen.devices, other))
    spans = (Span(ATTIC, LayerRange(0, 6)), Span(STUDY, LayerRange(6, LAYERS)))
    before = Plan(WISH.deployment, "ab" * 32, 0, (Replica(0, spans),), 1, asked=True)
    house = [machine(ATTIC, 900), kitchen, machine(STUDY, 900)]
    for before_that in (before, None):
        pinned = replace(WISH, pins=(Span(KITCHEN, LayerRange(2, LAYERS)),))
        open_gaps = gaps(pinned, before_that, NODES)
        laid = lay(MODEL, house, pinned, before_that, open_gaps, ALONE)
        assert laid.refusal is not None
        assert KITCHEN in laid.refusal.message


def test_what_is_pinned_where_some_of_it_lies_has_the_room_of_that() -> None:
    spans = (Span(ATTIC, LayerRange(0, 6)), Span(STUDY, LayerRange(6, LAYERS)))
    before = Plan(WISH.deployment, "ab" * 32, 0, (Replica(0, spans),), 1, asked=True)
    house = [machine(ATTIC, 200), machine(STUDY, 900)]
    for layers, fits in ((LayerRange(0, 7), True), (LayerRange(0, LAYERS), False)):
        pinned = replace(WISH, pins=(Span(ATTIC, layers),))
        open_gaps = gaps(pinned, before, NODES)
        laid = lay(MODEL, house, pinned, before, open_gaps, ALONE)
        assert (laid.refusal is None) is fits


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_is_ever_over_memory_asking_included(seed: int) -> None:
    chance = random.Random(seed)
    thin, is_measured = chance.random() < 0.3, chance.random() < 0.6
    house = [machine(n, chance.randrange(60, 1400), is_measured=is_measured) for n in NODES]
    demand = replace(ALONE, thin=thin, asker=chance.choice(NODES))
    spoken = {node: -chance.choice((0, 0, 150)) for node in NODES}
    wish, told = replace(WISH, replicas=chance.choice((1, 1, 2))), RoomAdjustments(spoken)
    plan, refusal = None, ""
    if is_measured:
        laid = lay(MODEL, house, wish, None, [], demand, told)
    else:
        laid = rooms(MODEL, house, demand, told)
    try:
        plan = make_plan(wish, "ab" * 32, available(*house), None, asked=True, laid=laid)
    except NotEnoughMemory as error:
        refusal = error.message
    if plan is None:
        assert all(node in refusal for node in NODES), refusal
        return
    for each in house:
        parts = plan.spans_of(each.node_id)
        free = each.devices[0].free_bytes + (spoken[each.node_id] << 20)
        assert not parts or needs(parts, thin=thin) <= free, (each.name, parts)


@pytest.mark.parametrize("seed", range(200))
def test_whatever_is_changed_no_machine_is_given_more_than_it_has_room_for(seed: int) -> None:
    """Replicas, pins and lost machines, where nobody has measured them: all layers of each copy,
    what can stay does, and what is new fits beside it."""
    chance = random.Random(seed)
    total = chance.randrange(2, 13)
    tail = range(chance.randrange(total) + 1, total)
    cuts = Cuts(frozenset(chance.choice(((), (), tail, chance.sample(range(total), total // 2)))))
    cuts = Cuts(cuts.followers - {0})
    wish = replace(WISH, total_layers=total, replicas=chance.randrange(1, 4))
    nodes = [NodeId(name) for name in "abcd"]
    lost = set(chance.sample(nodes, chance.randrange(4)))
    here = [AvailableNode(n, n, chance.choice((None, 100, 200))) for n in nodes if n not in lost]
    everywhere = [AvailableNode(node, node) for node in nodes]
    roomy = Laid(rooms=dict.fromkeys(nodes, chance.randrange(total, 3 * total)), cuts=cuts)
    before = None
    if chance.random() < 0.6:
        was = replace(wish, replicas=chance.randrange(1, 4))
        before = make_plan(was, "ab" * 32, everywhere, None, asked=True, laid=roomy)
    pins = []
    for at in sorted(chance.sample(range(total), min(total, chance.randrange(4)))):
        part = LayerRange(at, chance.randrange(at, total) + 1)
        if all(not part.overlaps(pin.layers) for pin in pins) and cuts.allow(part):
            pins.append(Span(chance.choice(here).node, part))
    wish = replace(wish, pins=tuple(pins))
    room = {node.node: chance.randrange(2 * total) for node in here}
    laid = Laid(rooms=room, cuts=cuts, extra=chance.randrange(3))
    try:
        plan = make_plan(wish, "cd" * 32, here, before, asked=True, laid=laid)
    except NotEnoughMemory:
        return

    there = set() if before is None else before.spans
    for number, replica in enumerate(plan.replicas):
        layers = [span.layers for span in replica.spans]
        assert layers[0].start == 0
        assert layers[-1].stop == total
        assert all(one.stop == other.start for one, other in pairwise(layers))
        assert all(map(cuts.allow, layers))
        if number == 0:
            assert set(pins) <= set(replica.spans)
    for old, new in zip(() if before is None else before.replicas, plan.replicas, strict=False):
        own = pins if new is plan.replicas[0] else []
        apart = {s for s in old.spans if not any(s.layers.overlaps(pin.layers) for pin in own)}
        assert {span for span in apart if span.node not in lost} <= set(new.spans)
    for node, most in room.items():
        more = [span for span in plan.spans - there if span.node == node]
        taken = sum(len(span.layers) + laid.extra for span in more) - laid.extra
        assert taken <= most or set(more) <= set(pins), (node, more, most)
