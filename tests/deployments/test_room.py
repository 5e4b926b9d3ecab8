"""Who rests for whom, over the machines of a plan."""

from __future__ import annotations

import pytest

from mesh.deployments.placement import AvailableNode, make_plan
from mesh.deployments.room import Standing, room_of_others, to_rest
from mesh.deployments.wishes import Deployment, Plan, Wish
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
    return to_rest(new, planned(new), None, others, machines, need)


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


def test_what_the_plan_before_held_makes_room() -> None:
    new = wish("f", 40)
    machines = [AvailableNode(ATTIC, "attic", 10)]
    other = NodeId("b")
    before = make_plan(
        new, "cd" * 32, [*machines, AvailableNode(other, "kitchen", 10)], None, asked=True
    )
    assert to_rest(new, before, before, (), machines, need) == ()
    assert to_rest(new, planned(new), before, (), [AvailableNode(ATTIC, "attic", 20)], need) == ()
    with pytest.raises(NotEnoughMemory):
        to_rest(new, planned(new), before, (), machines, need)
