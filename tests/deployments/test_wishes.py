"""Wishes and plans as the log has them: two operators at once, strict forms, who plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mesh.deployments.laid import AvailableNode, Gap, Laid
from mesh.deployments.placement import gaps, leaving, make_plan, planner, stale
from mesh.deployments.wishes import (
    MAX_OF_AUTHOR,
    Deployment,
    Known,
    Plan,
    Replica,
    Span,
    Wish,
    live,
    read,
    read_plan,
    read_wish,
)
from mesh.errors import BadRequest, NoRoute, NotEnoughMemory
from mesh.events.state import Fact
from mesh.events.types import EventId, Order
from mesh.models.cuts import Cuts
from mesh.types import MAX_LAYERS, LayerRange, ModelId, NodeId

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
MACHINES = [AvailableNode(A, "attic"), AvailableNode(B, "kitchen"), AvailableNode(C, "study")]
WISH = Wish("0" * 16, ModelId("m"), "ab" * 32, 6, 60)


def fact(number: int, payload: dict[str, Any], author: NodeId = A) -> Fact:
    order: Order = (number, author, number)
    return Fact(order, EventId(number.to_bytes(32)), 0, payload)


def named(number: int) -> str:
    return number.to_bytes(32).hex()


def planned(wish: Wish, number: int, before: Plan | None = None) -> Plan:
    return make_plan(wish, named(number), MACHINES, before, asked=True)


def test_what_is_written_is_what_is_read() -> None:
    wish = replace(
        WISH, replicas=3, dedicated=True, quant="int8", context=4096, nodes=(A, B),
        pins=(Span(A, LayerRange(0, 2)),),
    )  # fmt: skip
    assert read_wish(wish.payload()) == wish
    plan = planned(wish, 1)
    assert read_plan(plan.payload(), wish) == plan
    assert read_wish({**wish.payload(), "of a newer version": 1}) == wish


@pytest.mark.parametrize(
    "change",
    [
        {"deployment": "d1"}, {"replicas": -1}, {"replicas": 17}, {"replicas": "1"},
        {"total_layers": 0}, {"total_layers": MAX_LAYERS + 1}, {"quant": "int2"},
        {"pins": [["a", "0-6"]]}, {"pins": [["a", "2-1"]]},
        {"pins": [["a", " 0-1"]]},
        {"nodes": ["A node"]}, {"minimum_s": float("nan")}, {"evicted": 0},
        {"model_id": "m\nnote: all is well"}, {"model_id": "m\x1b[2J"},
        {"weights_sha256": "../" * 9}, {"model_id": "m" * 250},
    ],
)  # fmt: skip
def test_a_wish_of_another_form_is_left_out(change: dict[str, Any]) -> None:
    assert read_wish({**WISH.payload(), **change}) is None
    assert read({WISH.deployment: fact(1, {**WISH.payload(), **change})}, {}) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"deployment": "1" * 16}, {"wish": "w"}, {"epoch": -1}, {"replicas": [[0, [["a", "0-6"]]]]},
        {"replicas": [[0, [["a", "4-3"]]]]}, {"replicas": [[0, [["a"]]]]}, {"asked": "yes"},
        {"why": "it was lost\nnote: all is well"},
    ],
)  # fmt: skip
def test_a_plan_of_another_form_is_left_out(change: dict[str, Any]) -> None:
    assert read_plan({**planned(WISH, 1).payload(), **change}, WISH) is None


def test_the_plan_of_the_newest_wish_counts_whenever_another_was_made() -> None:
    first, second = planned(WISH, 1), replace(planned(WISH, 2), epoch=1)
    late = replace(planned(WISH, 1), epoch=9)
    wishes = {WISH.deployment: fact(2, WISH.payload())}
    plans = [fact(9, late.payload()), fact(3, second.payload(), B), fact(1, first.payload(), C)]
    (found,) = live(read(wishes, {WISH.deployment: plans}))
    assert found.plan == second
    assert found.is_planned
    # Until there is one for the wish, the newest for the one before is followed.
    (found,) = live(read(wishes, {WISH.deployment: [plans[0], plans[2]]}))
    assert found.plan == late
    assert not found.is_planned


def test_of_two_plans_for_one_wish_the_same_one_counts_everywhere() -> None:
    one, two = planned(WISH, 1), make_plan(WISH, named(1), MACHINES[:2], None, asked=False)
    rows = [fact(5, one.payload(), A), fact(5, two.payload(), B)]
    for order in (rows, rows[::-1]):
        (found,) = live(read({WISH.deployment: fact(1, WISH.payload())}, {WISH.deployment: order}))
        assert found.plan == two  # the same moment: the higher author


def test_an_evicted_deployment_wants_nothing() -> None:
    gone = replace(WISH, evicted=True)
    plans = {WISH.deployment: [fact(1, planned(WISH, 1).payload())]}
    found = read({WISH.deployment: fact(2, gone.payload())}, plans)[WISH.deployment]
    assert found.shards_of(A) == {}
    assert live({WISH.deployment: found}) == []


def test_of_what_one_author_wishes_for_the_newest_count_and_what_others_do_is_as_before() -> None:
    wishes = {WISH.deployment: fact(1, WISH.payload(), B)}
    for number in range(2, 2 * MAX_OF_AUTHOR):
        wish = replace(WISH, deployment=f"{number:016x}", model_id=ModelId(f"m{number}"))
        wishes[wish.deployment] = fact(number, wish.payload())
    gone = replace(WISH, deployment="f" * 16, evicted=True)
    wishes[gone.deployment] = fact(1, gone.payload())
    found = read(wishes, {})
    first = MAX_OF_AUTHOR  # of A's, of which there are as many before it, less two
    assert [each.id for each in live(found)] == [WISH.deployment, *list(wishes)[first - 1 : -1]]
    assert found[gone.deployment].wish.evicted


def test_what_was_read_of_an_event_is_not_read_again_and_what_counts_no_longer_is_forgotten() -> (
    None
):
    wishes = {WISH.deployment: fact(1, WISH.payload())}
    plans = {WISH.deployment: [fact(2, planned(WISH, 1).payload()), fact(3, {"deployment": "?"})]}
    known = Known()
    first = read(wishes, plans, known)[WISH.deployment]
    assert len(known) == 3
    other = replace(WISH, deployment="f" * 16, model_id=ModelId("another"))
    more = wishes | {other.deployment: fact(4, other.payload())}
    again = read(more, plans, known)[WISH.deployment]
    assert again == first == read(more, plans)[WISH.deployment]
    assert again.wish is first.wish
    assert again.plan is first.plan
    read({other.deployment: more[other.deployment]}, {}, known)
    assert len(known) == 1


def covers(replica: Replica, layers: int) -> bool:
    spans = sorted(span.layers for span in replica.spans)
    return [x for span in spans for x in range(span.start, span.stop)] == list(range(layers))


def test_replicas_go_up_and_down_and_their_numbers_are_not_used_again() -> None:
    one = planned(WISH, 1)
    three = planned(replace(WISH, replicas=3), 2, one)
    assert [r.number for r in three.replicas] == [0, 1, 2]
    assert three.replicas[0] == one.replicas[0], "what runs stays"
    assert all(covers(replica, 6) for replica in three.replicas)
    for node in (A, B, C):
        assert len(three.spans_of(node)) == 3, "no two replicas on one machine are one"
    back = planned(WISH, 3, three)
    assert back.replicas == one.replicas
    again = planned(replace(WISH, replicas=2), 4, back)
    assert [r.number for r in again.replicas] == [0, 3]
    assert again.epoch == 3


def test_a_second_replica_lies_elsewhere_whatever_memory_says_by_then() -> None:
    one = planned(WISH, 1)
    now = [
        AvailableNode(A, "attic", 9),
        AvailableNode(B, "kitchen", 7),
        AvailableNode(C, "study", 8),
    ]
    two = make_plan(replace(WISH, replicas=2), named(2), now, one, asked=True)
    assert all(len(two.spans_of(node)) == 2 for node in (A, B, C))


def test_who_is_paused_keeps_what_it_has_and_is_given_no_more() -> None:
    one = planned(WISH, 1)
    now = [*MACHINES[:2], replace(MACHINES[2], is_paused=True)]
    two = make_plan(replace(WISH, replicas=2), named(2), now, one, asked=True)
    assert two.replicas[0] == one.replicas[0]
    assert {span.node for span in two.replicas[1].spans} == {A, B}
    alone = replace(WISH, nodes=(C,))
    with pytest.raises(NotEnoughMemory, match="study: it is paused, until `hearthnet resume`"):
        make_plan(alone, named(1), now, None, asked=True)


def test_a_machine_that_is_gone_is_replaced_and_nothing_else_moves() -> None:
    before = planned(WISH, 1)
    after = make_plan(WISH, named(1), MACHINES[:2], before, asked=False, why="c is away")
    assert covers(after.replicas[0], 6)
    kept = [span for span in before.replicas[0].spans if span.node != C]
    assert set(kept) < set(after.replicas[0].spans)


@pytest.mark.parametrize("count", [3, 4, 6])
def test_what_a_lost_machine_had_goes_where_no_other_copy_of_it_lies(count: int) -> None:
    machines = [AvailableNode(NodeId(name), name) for name in "abcdef"[:count]]
    wish = replace(WISH, replicas=count - 1)
    before = make_plan(wish, named(1), machines, None, asked=True)
    for lost in machines:
        left = [each for each in machines if each != lost]
        plan = make_plan(wish, named(1), left, before, asked=False)
        for layer in range(6):
            spans = [span for span in plan.spans if layer in span.layers]
            assert {span.node for span in spans} == {each.node for each in left}


def test_what_a_lost_machine_had_goes_where_its_layers_are_not_pinned() -> None:
    two = replace(WISH, replicas=2)
    halves = tuple(Replica(n, (Span(A, LayerRange(0, 3)), Span(C, WISH.whole))) for n in (0, 1))
    before = Plan(WISH.deployment, named(1), 0, halves, 2, asked=True)
    pinned = replace(two, pins=(Span(B, LayerRange(3, 6)),))
    first, second = make_plan(pinned, named(1), MACHINES[:2], before, asked=False).replicas
    assert (first.spans[1].node, second.spans[1].node) == (B, A)


def test_pins_and_nodes_are_kept() -> None:
    pinned = replace(WISH, pins=(Span(C, LayerRange(0, 2)),), nodes=(A, C))
    plan = planned(pinned, 1)
    assert plan.replicas[0].spans == (Span(C, LayerRange(0, 2)), Span(A, LayerRange(2, 6)))
    moved = planned(replace(WISH, pins=(Span(B, LayerRange(1, 3)),)), 2, plan)
    assert Span(B, LayerRange(1, 3)) in moved.replicas[0].spans
    assert covers(moved.replicas[0], 6)
    with pytest.raises(BadRequest, match="pinned to c"):
        make_plan(pinned, named(1), MACHINES[:2], None, asked=True)
    with pytest.raises(NoRoute):
        make_plan(WISH, named(1), [], None, asked=True)


def test_pins_are_the_first_replica_s_whichever_it_is() -> None:
    scaled_to_none = planned(replace(WISH, replicas=0), 2, planned(WISH, 1))
    back = planned(replace(WISH, replicas=2), 3, scaled_to_none)
    pins = (Span(A, LayerRange(0, 3)), Span(B, LayerRange(3, 6)))
    moved = planned(replace(WISH, replicas=2, pins=pins), 4, back)
    assert moved.replicas[0].spans == pins
    assert moved.replicas[1] == back.replicas[1]
    more = planned(replace(WISH, replicas=3, pins=pins), 5, moved)
    assert more.replicas[:2] == moved.replicas
    assert more.replicas[2].spans != pins
    new = planned(replace(WISH, replicas=2, pins=pins), 6, scaled_to_none)
    assert new.replicas[0].spans == pins != new.replicas[1].spans


def test_what_a_narrower_wish_lacks_and_leaves() -> None:
    plan = planned(replace(WISH, replicas=2), 1)
    narrower = replace(WISH, nodes=(A, C))
    (lost,) = [span for span in plan.replicas[0].spans if span.node == B]
    assert gaps(narrower, plan, {A, B, C}) == [Gap(0, lost.layers, 2)]
    assert leaving(narrower, plan, {A, B, C}) == plan.spans - {*plan.replicas[0].spans} | {lost}
    assert leaving(WISH, plan, {A, C}) == leaving(narrower, plan, {A, B, C})
    assert gaps(WISH, None, {A, B, C}) == []
    assert leaving(WISH, None, {A, B, C}) == set()


def test_copies_that_share_a_machine_take_its_room_once() -> None:
    laid = Laid(rooms={A: 6})
    plan = make_plan(replace(WISH, replicas=3), named(1), MACHINES[:1], None, asked=True, laid=laid)
    assert [replica.spans for replica in plan.replicas] == [(Span(A, WISH.whole),)] * 3


def test_a_plan_that_no_event_could_carry_is_refused() -> None:
    house = [AvailableNode(NodeId(f"n{number}"), "attic") for number in range(17)]
    wish = replace(WISH, total_layers=17, replicas=15)
    assert len(make_plan(wish, named(1), house, None, asked=True).replicas) == 15
    with pytest.raises(BadRequest, match="272 spans"):
        make_plan(replace(wish, replicas=16), named(1), house, None, asked=True)


def test_who_plans_anew_and_when() -> None:
    plan = planned(WISH, 1)
    deployment = Deployment(WISH, plan, named(1), A, 0)
    everybody, names = {A, B, C}, {C: "study"}
    assert planner(deployment, {B, C}) == B
    assert stale(deployment, {}, everybody, 60.0, names) is None
    assert stale(deployment, {C: 59.0}, everybody, 60.0, names) is None
    assert "study has been away for 61 s" in str(
        stale(deployment, {C: 61.0}, everybody, 60.0, names)
    )
    assert "study may hold no layers" in str(stale(deployment, {}, {A, B}, 60.0, names))
    assert (
        stale(replace(deployment, event=named(2)), {}, everybody, 60.0, names)
        == "the wish has changed"
    )
    evicted = replace(deployment, wish=replace(WISH, evicted=True))
    assert stale(evicted, {C: 61.0}, set(), 60.0, names) is None


@pytest.mark.parametrize("joined", range(6))
@pytest.mark.parametrize("rooms", [{}, {A: 3, B: 6, C: 2}, {A: 2, B: 4, C: 4}, {A: 6, B: 1}])
def test_layers_that_are_not_parted_lie_on_one_machine(
    joined: int, rooms: dict[NodeId, int]
) -> None:
    cuts = Cuts(frozenset(range(joined + 1, 6)))
    laid = Laid(rooms=rooms, cuts=cuts)
    most = [rooms.get(machine.node, 6) for machine in MACHINES]
    if max(most) < 6 - joined:
        with pytest.raises(NotEnoughMemory):
            make_plan(WISH, named(1), MACHINES, None, asked=True, laid=laid)
        return
    plan = make_plan(WISH, named(1), MACHINES, None, asked=True, laid=laid)
    (whole,) = plan.replicas
    _require_together(whole.spans, joined)
    taken = Counter[NodeId]()
    for span in whole.spans:
        taken[span.node] += len(span.layers)
    assert all(taken[node] <= rooms.get(node, 6) for node in taken)
    # And what a lost machine held goes where there is room beside what is there.
    for lost in {span.node for span in whole.spans}:
        left = [machine for machine in MACHINES if machine.node != lost]
        again = make_plan(WISH, named(2), left, plan, asked=False, laid=Laid(cuts=cuts))
        _require_together(again.replicas[0].spans, joined)


def test_layers_that_are_not_parted_find_room_in_whatever_order_it_takes() -> None:
    """Pairs 0-1 and 2-3, then single ones: the pairs go where there is room for them."""
    laid = Laid(rooms={A: 1, B: 3, C: 2}, cuts=Cuts(frozenset({1, 3})))
    plan = make_plan(WISH, named(1), MACHINES, None, asked=True, laid=laid)
    assert [str(span.layers) for span in plan.replicas[0].spans] == ["0-1", "2-4", "5-5"]


def _require_together(spans: Sequence[Span], joined: int) -> None:
    assert [each.layers.start for each in spans] == [0, *(s.layers.stop for s in spans[:-1])]
    assert spans[-1].layers.covers(LayerRange(joined, 6))
