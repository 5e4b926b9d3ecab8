"""Who rests for whom, over the machines of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mesh.deployments.laid import AvailableNode
from mesh.deployments.placement import make_plan
from mesh.deployments.room import Absence, Change, Standing, absences, room_of_others, to_rest
from mesh.deployments.wishes import Deployment, Plan, Replica, Span, Wish
from mesh.errors import NotEnoughMemory
from mesh.types import LayerRange, ModelId, NodeId

ATTIC = NodeId("a")
HOUR = 3600.0


def wish(name: str, mb: int, *, dedicated: bool = False) -> Wish:
    return Wish(name * 16, ModelId(name), "ab" * 32, 4, mb, dedicated=dedicated)


def up(name: str, mb: int, up_s: float = HOUR, *, dedicated: bool = False) -> Standing:
    asked = wish(name, mb, dedicated=dedicated)
    return Standing(Deployment(asked, planned(asked), "cd" * 32, ATTIC, 0), up_s)


def planned(asked: Wish, free_mb: int | None = None) -> Plan:
    return make_plan(asked, "cd" * 32, [AvailableNode(ATTIC, "attic", free_mb)], None, asked=True)


def need(asked: Wish, layers: LayerRange) -> int:
    return asked.layers_mb * len(layers) // asked.total_layers


def rest(new: Wish, free_mb: int | None, *others: Standing) -> tuple[str, ...]:
    machines = [AvailableNode(ATTIC, "attic", free_mb)]
    return to_rest(Change(new, planned(new)), others, machines, need)


def test_nobody_rests_where_there_is_room_or_nobody_knows() -> None:
    assert rest(wish("f", 40), 40, up("a", 100)) == ()
    assert rest(wish("f", 40), None, up("a", 100)) == ()


def test_the_smallest_that_have_been_up_for_long_rest() -> None:
    others = [up("a", 100), up("b", 20), up("c", 10, HOUR - 1), up("d", 30, dedicated=True)]
    assert rest(wish("f", 40), 20, *others) == ("b" * 16,)
    assert rest(wish("f", 40), 10, *others) == ("b" * 16, "a" * 16)
    # The minimum time is waived for a dedicated newcomer alone; a dedicated one never rests.
    assert rest(wish("f", 40, dedicated=True), 10, *others) == ("c" * 16, "b" * 16)


def test_only_who_may_rest_counts_as_room() -> None:
    others = [up("a", 100), up("b", 20), up("c", 10, HOUR - 1), up("d", 30, dedicated=True)]
    assert room_of_others(wish("f", 40), others, need) == {ATTIC: 120}
    assert room_of_others(wish("f", 40, dedicated=True), others, need) == {ATTIC: 130}


def test_what_cannot_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        NotEnoughMemory, match="attic needs 40 MiB, 10 MiB are free, 20 MiB are held"
    ):
        rest(wish("f", 40), 10, up("a", 20))


def test_on_each_machine_only_what_it_holds_still_rests_for_what_it_lacks() -> None:
    kitchen = NodeId("k")
    machines = [AvailableNode(ATTIC, "attic", 20), AvailableNode(kitchen, "kitchen", 0)]

    def over(asked: Wish, **layers: str) -> Plan:
        spans = [Span(NodeId(node), LayerRange.parse(each)) for node, each in layers.items()]
        return Plan(asked.deployment, "cd" * 32, 1, (Replica(0, tuple(spans)),), 1, asked=True)

    def standing(name: str, mb: int, **layers: str) -> Standing:
        asked = wish(name, mb)
        return Standing(Deployment(asked, over(asked, **layers), "cd" * 32, ATTIC, 0), HOUR)

    here, new = over(wish("f", 80), a="0-1"), over(wish("f", 80), a="0-1", k="2-3")
    small, large = standing("a", 40, a="0-1", k="2-3"), standing("a", 80, a="0-1", k="2-3")
    second = standing("b", 100, k="0-3")
    for plan, others, expected in (
        (here, [standing("c", 4, k="0-3"), small], ("a" * 16,)),
        (new, [small, second], ("a" * 16, "b" * 16)),
        (new, [large, second], ("a" * 16,)),
    ):
        assert to_rest(Change(wish("f", 80), plan), others, machines, need) == expected


def test_what_the_plan_before_held_makes_room() -> None:
    new = wish("f", 40)
    machines = [AvailableNode(ATTIC, "attic", 10)]
    other = NodeId("b")
    before = make_plan(
        new, "cd" * 32, [*machines, AvailableNode(other, "kitchen", 10)], None, asked=True
    )
    stays = Change(new, before, Deployment(new, before, "cd" * 32, ATTIC, 0))
    assert to_rest(stays, (), machines, need) == ()
    moves = replace(stays, plan=planned(new))
    assert to_rest(moves, (), [AvailableNode(ATTIC, "attic", 20)], need) == ()
    with pytest.raises(NotEnoughMemory):
        to_rest(moves, (), machines, need)


def test_another_format_needs_room_in_the_place_of_what_is_there() -> None:
    old = wish("f", 40)
    plan = planned(old)
    before = Deployment(old, plan, "cd" * 32, ATTIC, 0)
    larger = Change(replace(old, layers_mb=60), plan, before, frozenset(plan.spans))
    assert to_rest(larger, (), [AvailableNode(ATTIC, "attic", 20)], need) == ()
    with pytest.raises(NotEnoughMemory, match="needs 60 MiB, 59 MiB are free"):
        to_rest(larger, (), [AvailableNode(ATTIC, "attic", 19)], need)


def away(
    before: list[tuple[str, str]],
    after: list[tuple[str, str]],
    free_mb: int | None,
    *anew: str,
    resting: Sequence[Standing] = (),
) -> list[Absence]:
    """What is away when one replica of ten MiB a layer moves so, over machines with so much free;
    these layers are loaded `anew`. Beside it another is up, 20 MiB on the attic, `resting` or not.
    """
    asked = wish("f", 40)
    plans = []
    for rows in (before, after):
        spans = tuple(Span(NodeId(node), LayerRange.parse(layers)) for node, layers in rows)
        plans.append(Plan(asked.deployment, "cd" * 32, 0, (Replica(0, spans),), 1, asked=True))
    change = Change(
        asked, plans[1], Deployment(asked, plans[0], "cd" * 32, ATTIC, 0),
        frozenset(span for span in plans[1].spans if str(span.layers) in anew),
    )  # fmt: skip
    machines = [AvailableNode(NodeId(name), name, free_mb) for name in ("a", "b")]
    going = [each.deployment.id for each in resting]
    return absences(change, [up("b", 20), *resting], going, machines, need)


def test_what_is_away_before_the_new_is_there_is_known_beforehand() -> None:
    whole, half = LayerRange(0, 4), LayerRange(0, 2)
    alone, shared = [("a", "0-3")], [("a", "0-1"), ("b", "2-3")]
    assert away(shared, alone, 40) == [], "there is room for both"
    assert away(shared, alone, 39) == [Absence("a", half, whole)]
    # `b` keeps its part until `a` has it; `a` needs no room for what it only drops.
    assert away(alone, [("b", "0-3")], 40) == []
    assert away(alone, shared, 20) == []
    assert away(alone, shared, 19) == [Absence("a", whole, half)]
    # Who rests for it makes room as well, and nobody knows where it is not known what is free.
    assert away(shared, alone, 20, resting=[up("c", 20)]) == []
    assert away(shared, alone, 19, resting=[up("c", 20)]) == [Absence("a", half, whole)]
    assert away(shared, alone, None) == []
    # Of several that are loaded each takes its room.
    first, others = LayerRange(0, 1), LayerRange(1, 4)
    parted = [("a", str(first)), ("a", str(others))]
    assert away(alone, parted, 40) == []
    assert away(alone, parted, 39) == [Absence("a", whole, others)]
    assert away(alone, parted, 9) == [Absence("a", whole, first)]
    # What stands elsewhere meanwhile is not away.
    twice = [("a", "0-1"), ("b", "0-3")]
    assert away(twice, [("a", "2-3"), ("b", "0-3")], 0) == []
    # In another format it goes by the same name.
    assert away(shared, shared, 100, "2-3") == [Absence("b", LayerRange(2, 4), LayerRange(2, 4))]
