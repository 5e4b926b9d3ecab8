"""Planning anew: whatever goes wrong with one deployment, the others have their turn."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mesh.clock import loop_time
from mesh.deployments.laid import UNKNOWN, AvailableNode, Laid
from mesh.deployments.replan import LONGEST_RETRY_S, RETRY_S, SETTLE_S, Replanner
from mesh.deployments.wishes import Deployment, Plan, Replica, Span, Wish
from mesh.errors import NoRoute
from mesh.types import ModelId, NodeId
from tests.simulation.virtual_loop import run_virtually
from tests.waiting import until

HERE, THERE = NodeId("a"), NodeId("b")
BAD, GOOD = "0" * 16, "f" * 16


class House:
    """One node, whose log has two wishes without a plan. `errors` come of what is done for the
    first of them, by what that is."""

    node = HERE

    def __init__(self, **errors: Exception) -> None:
        self.errors = errors
        self.asked: list[str] = []
        self.planned: list[str] = []
        self.told: list[dict[str, Any]] = []
        self.log = {
            name: Deployment(Wish(name, ModelId(name), "ab" * 32, 4, 40), None, "cd" * 32, HERE, 0)
            for name in (BAD, GOOD)
        }

    def deployments(self) -> dict[str, Deployment]:
        self._fail("deployments")
        return self.log

    def machines(self) -> Sequence[AvailableNode]:
        return [AvailableNode(HERE, "attic", 1000)]

    async def laid_out(
        self, wish: Wish, before: Plan | None, freed_mb: Mapping[NodeId, int]
    ) -> Laid:
        self.asked.append(wish.deployment)
        if wish.deployment == BAD:
            self._fail("laid_out")
        return UNKNOWN

    def refused(self, deployment: Deployment) -> Collection[Span]:
        if deployment.id == BAD:
            self._fail("refused")
        return ()

    def trusted(self) -> Collection[NodeId]:
        return [HERE]

    def names(self) -> Mapping[NodeId, str]:
        return {HERE: "attic"}

    async def publish_plan(self, plan: Plan) -> None:
        self.planned.append(plan.deployment)
        known = self.log[plan.deployment]
        self.log[plan.deployment] = Deployment(known.wish, plan, known.event, HERE, 0)

    def tell(self, kind: str, **fields: Any) -> None:
        self.told.append({"kind": kind, **fields})

    def _fail(self, what: str) -> None:
        if what in self.errors:
            raise self.errors[what]


def watched(house: House, seconds: float, *later: float) -> list[list[str]]:
    """What was planned after so many seconds, and after the later ones, with nothing in the way
    any more."""
    found = []

    async def main() -> None:
        replanner = Replanner(house, 10.0, house.tell)
        replanner.start()
        for wait_s in (seconds, *later):
            await asyncio.sleep(wait_s)
            found.append(list(house.planned))
            house.errors = {}
        await replanner.stop()

    run_virtually(main)
    return found


@pytest.mark.parametrize("error", [ValueError("a mistake of ours"), NoRoute("no way.", fix="")])
def test_one_that_cannot_be_planned_is_told_and_waits_while_others_are_planned(
    error: Exception,
) -> None:
    house = House(laid_out=error)
    before, soon, then = watched(house, SETTLE_S + 2, RETRY_S - 5, 10.0)
    assert before == soon == [GOOD]
    assert house.asked == [BAD, GOOD, BAD]
    assert then == [GOOD, BAD]
    assert all(each.plan is not None and each.plan.asked for each in house.log.values())
    first, *others = house.told
    assert (first["kind"], first["deployment"]) == ("deployment_unplanned", BAD)
    assert str(error).strip() in first["reason"]
    assert [each["kind"] for each in others] == ["deployment_planned"] * 2


def test_one_that_cannot_even_be_looked_at_waits_alone() -> None:
    house = House(refused=ValueError("a mistake of ours"))
    bad = house.log[BAD]
    house.log[BAD] = replace(bad, plan=Plan(BAD, bad.event, 0, (), 0, asked=True))
    assert watched(house, 60.0) == [[GOOD]]
    unplanned = [each for each in house.told if each["kind"] == "deployment_unplanned"]
    assert 2 <= len(unplanned) < 10, "less often each time"


def test_what_fails_for_all_is_tried_again() -> None:
    house = House(deployments=ValueError("a mistake of ours"))
    before, then = watched(house, 60.0, 120.0)
    assert before == []
    assert then == [BAD, GOOD]


def test_what_was_planned_at_last_is_planned_anew_as_soon_as_any_other() -> None:
    house = House(laid_out=NoRoute("no way.", fix=""))
    took_s: list[float] = []

    async def main() -> None:
        replanner = Replanner(house, 10.0, house.tell)
        replanner.start()
        await asyncio.sleep(3600.0)  # it has failed for long
        house.errors = {}
        await until(lambda: BAD in house.planned, LONGEST_RETRY_S + 1)
        await asyncio.sleep(RETRY_S)
        house.log[BAD] = replace(house.log[BAD], event="ef" * 32)  # it is wished otherwise
        began = loop_time()
        await until(lambda: house.planned.count(BAD) == 2, LONGEST_RETRY_S + 1)
        took_s.append(loop_time() - began)
        await replanner.stop()

    run_virtually(main)
    assert SETTLE_S <= took_s[0] < SETTLE_S + 3


class TwoMachines(House):
    """Both copies lie on this machine; there is another, on which the planner has room."""

    def __init__(self, *, has_room: bool) -> None:
        super().__init__()
        self.has_room = has_room
        self.plans: list[Plan] = []
        wish = replace(self.log.pop(BAD).wish, deployment=GOOD, replicas=2)
        copies = tuple(Replica(number, (Span(HERE, wish.whole),)) for number in range(2))
        plan = Plan(GOOD, "cd" * 32, 7, copies, 2, asked=True)
        self.log[GOOD] = Deployment(wish, plan, "cd" * 32, HERE, 0)

    def machines(self) -> Sequence[AvailableNode]:
        return [*super().machines(), AvailableNode(THERE, "study", 1000)]

    def trusted(self) -> Collection[NodeId]:
        return [HERE, THERE]

    async def laid_out(
        self, wish: Wish, before: Plan | None, freed_mb: Mapping[NodeId, int]
    ) -> Laid:
        self.asked.append(wish.deployment)
        assert (wish.nodes, wish.replicas, before) == ((THERE,), 1, None)
        return Laid(((Span(THERE, wish.whole),),)) if self.has_room else UNKNOWN

    async def publish_plan(self, plan: Plan) -> None:
        self.plans.append(plan)
        await super().publish_plan(plan)


def test_a_second_copy_moves_to_a_machine_of_its_own() -> None:
    house = TwoMachines(has_room=True)
    assert watched(house, SETTLE_S - 1, 4.0, 600.0) == [[], [GOOD], [GOOD]]
    (plan,) = house.plans
    first, second = plan.replicas
    assert (first.number, first.spans[0].node) == (0, HERE)
    assert (second.number, second.spans[0].node) == (1, THERE)
    assert (plan.epoch, plan.next_replica, plan.asked) == (8, 2, False)
    assert plan.why == "attic held two copies, and there are others now"
    assert house.told == [{"kind": "deployment_planned", "deployment": GOOD, "reason": plan.why}]


def test_without_room_elsewhere_copies_stay_and_that_is_asked_less_and_less_often() -> None:
    house = TwoMachines(has_room=False)
    assert watched(house, 1200.0) == [[]]
    assert 3 <= len(house.asked) <= 8
    assert house.told == []


def test_copies_that_are_wished_for_on_these_machines_only_stay() -> None:
    house = TwoMachines(has_room=True)
    known = house.log[GOOD]
    house.log[GOOD] = replace(known, wish=replace(known.wish, nodes=(HERE,)))
    assert watched(house, 100.0) == [[]]
    assert house.asked == []


class Planned(House):
    """Its one deployment is planned for another machine, which comes and goes."""

    def __init__(self, *, asked: bool = True) -> None:
        super().__init__()
        del self.log[BAD]
        known = self.log[GOOD]
        self.span = Span(THERE, known.wish.whole)
        plan = Plan(GOOD, known.event, 0, (Replica(0, (self.span,)),), 1, asked)
        self.log[GOOD] = replace(known, plan=plan)
        self.here, self.is_there, self.has_room = HERE, True, True

    @property
    def node(self) -> NodeId:  # type: ignore[override]
        return self.here

    def machines(self) -> Sequence[AvailableNode]:
        there = [AvailableNode(THERE, "study", 1000)] if self.is_there else []
        return [*super().machines(), *there]

    def trusted(self) -> Collection[NodeId]:
        return [HERE, THERE]

    def refused(self, deployment: Deployment) -> Collection[Span]:
        return () if self.has_room else [self.span]


def test_a_machine_that_stays_away_is_planned_around_and_not_one_that_comes_back() -> None:
    house = Planned()
    found: list[list[str]] = []

    async def main() -> None:
        replanner = Replanner(house, 20.0, house.tell)
        replanner.start()
        for is_there, seconds in ((True, 60.0), (False, 18.0), (True, 3.0), (False, 18.0)):
            house.is_there = is_there
            await asyncio.sleep(seconds)
        found.append(list(house.planned))
        await asyncio.sleep(SETTLE_S + 5)
        await replanner.stop()

    run_virtually(main)
    assert found == [[]]
    plan = house.log[GOOD].plan
    assert plan is not None
    assert (plan.nodes, plan.asked, plan.epoch) == ({HERE}, False, 1)
    assert plan.why.startswith(f"{THERE} has been away for 2")


def test_what_rests_waits_for_no_room() -> None:
    house = Planned()
    house.has_room = False
    known = house.log[GOOD]
    house.log[GOOD] = replace(known, wish=replace(known.wish, resting=True))
    assert watched(house, 100.0) == [[]]
    house.log[GOOD] = known
    assert watched(house, 100.0) == [[GOOD]]


def test_a_node_that_starts_gives_those_who_are_away_as_long_as_any() -> None:
    house = Planned()
    house.is_there = False
    assert watched(house, 9.0, SETTLE_S + 5) == [[], [GOOD]]


def test_only_one_of_those_that_are_there_plans_anew() -> None:
    house = Planned()
    house.here, house.has_room = THERE, False
    assert watched(house, 600.0) == [[]]


@pytest.mark.parametrize("asked", [True, False])
def test_layers_that_have_no_room_go_elsewhere_as_whoever_asked_for_them_may(asked: bool) -> None:
    """What makes room for them may open a gap only where that was so before."""
    house = Planned(asked=asked)
    house.has_room = False
    assert watched(house, SETTLE_S + 2) == [[GOOD]]
    plan = house.log[GOOD].plan
    assert plan is not None
    assert (plan.nodes, plan.asked) == ({HERE}, asked)
    assert plan.why == f"{THERE} has no room for layers 0-3"


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_plan_that_can_be_no_other_is_not_published_again(is_pinned: bool) -> None:
    house = Planned()
    known, house.has_room = house.log[GOOD], False
    pins, nodes = ((house.span,), ()) if is_pinned else ((), (THERE,))
    house.log[GOOD] = replace(known, wish=replace(known.wish, pins=pins, nodes=nodes))
    assert watched(house, 600.0) == [[]]
    assert bool(house.told) is not is_pinned, "whether that was looked for"
