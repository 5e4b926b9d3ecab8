"""Deployments that rest: after how long, by whose hand, and who may wake them."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from mesh.deployments.laid import AvailableNode
from mesh.deployments.listing import SeenDeployment, SeenSpan
from mesh.deployments.phases import Phase, PhaseProgress
from mesh.deployments.placement import make_plan
from mesh.deployments.waking import Sleeper, Stay, Waker
from mesh.deployments.wishes import Deployment, Span, Wish
from mesh.deployments.world import Use
from mesh.errors import NoRoute, PipelineStalled
from mesh.types import BringingUp, GenerationRequest, ModelId, NodeId
from tests.simulation.virtual_loop import run_virtually

A, B = NodeId("a"), NodeId("b")
MODEL = ModelId("m")
WISH = Wish("0" * 16, MODEL, "ab" * 32, 4, 40, minimum_s=0.0, keep_alive_s=300.0)


class House:
    """A node whose log is one wish."""

    def __init__(self, wish: Wish, node: NodeId = A) -> None:
        self.node = node
        self.wished: list[Wish] = []
        self.others: list[Deployment] = []
        self.now = Use(is_busy=False, signs=0)
        self.is_coming = False
        self.broken: set[str] = set()
        """Deployments about whose use nothing can be said; "" for all of them."""
        plan = make_plan(
            wish, "cd" * 32, [AvailableNode(A, "a"), AvailableNode(B, "b")], None, asked=True
        )
        self._deployment = Deployment(wish, plan, "cd" * 32, A, 0)

    def deployments(self) -> dict[str, Deployment]:
        if "" in self.broken:
            raise RuntimeError("a mistake of ours")
        return {each.id: each for each in (*self.others, self._deployment)}

    def alive(self) -> set[NodeId]:
        return {A, B}

    def use(self, deployment: Deployment) -> Use:
        if deployment.id in self.broken:
            raise RuntimeError("a mistake of ours")
        return self.now

    async def publish_wish(self, wish: Wish) -> Deployment:
        self.wished.append(wish)
        self._deployment = replace(self._deployment, wish=wish)
        return self._deployment


class ScaledMeanwhile(House):
    """There is another deployment, and while that goes to rest somebody scales the first."""

    def __init__(self, wish: Wish) -> None:
        super().__init__(wish)
        other = replace(wish, deployment="/" * 16)
        self.others = [replace(self._deployment, wish=other)]

    async def publish_wish(self, wish: Wish) -> Deployment:
        if self.others:
            (other,) = self.others
            self.others = []
            self.wished.append(wish)
            scaled = replace(self._deployment.wish, replicas=2)
            self._deployment = replace(self._deployment, wish=scaled)
            return replace(other, wish=wish)
        return await super().publish_wish(wish)


class Unsigned(House):
    """Nothing can be signed there."""

    async def publish_wish(self, wish: Wish) -> Deployment:
        self.wished.append(wish)
        raise NoRoute("the log is not to be had", fix="Try again.")


def slept(house: House, seconds: float, *signs: Hashable) -> list[Wish]:
    """What it wishes for in so many seconds, while the signs of use change one after the other."""

    async def main() -> None:
        told: list[str] = []
        sleeper = Sleeper(
            house, lambda kind, **fields: told.append(kind), lambda deployment: house.is_coming
        )
        sleeper.start()
        for sign in signs or (0,):
            house.now = replace(house.now, signs=sign)
            await asyncio.sleep(seconds / max(1, len(signs)))
        await sleeper.stop()
        assert len(told) == len(house.wished)

    run_virtually(main)
    return house.wished


def test_it_rests_when_nobody_used_it_for_long() -> None:
    house = House(WISH)
    assert slept(house, 900.0) == [replace(WISH, resting=True)]


@pytest.mark.parametrize(
    "wish",
    [
        replace(WISH, dedicated=True),
        replace(WISH, keep_alive_s=0.0),
        replace(WISH, minimum_s=3600.0),
        replace(WISH, resting=True),
    ],
    ids=["dedicated", "no keep-alive", "below its minimum time", "it rests"],
)
def test_it_does_not(wish: Wish) -> None:
    assert slept(House(wish), 900.0) == []


def test_use_keeps_it_up_and_one_node_alone_has_it_rest() -> None:
    assert slept(House(WISH), 900.0, *range(8)) == []
    busy = House(WISH)
    busy.now = Use(is_busy=True, signs=0)
    assert slept(busy, 900.0) == []
    assert slept(House(WISH, node=B), 900.0) == []


def test_it_is_told_until_when_it_stays_up_and_stays_the_same_while_nobody_uses_it() -> None:
    house = House(replace(WISH, minimum_s=1000.0))
    seen: list[Stay] = []

    async def main() -> None:
        sleeper = Sleeper(house, lambda kind, **fields: None, lambda deployment: house.is_coming)
        sleeper.start()

        async def look() -> Stay:
            await asyncio.sleep(100.0)
            seen.append(sleeper.stay(WISH.deployment))
            return seen[-1]

        first = await look()
        assert await look() is first
        assert first.due_s is not None
        assert first.rests_at is not None
        assert not first.in_use
        house.now = Use(is_busy=True, signs=1)
        assert await look() == Stay(in_use=True)
        house.now = Use(is_busy=False, signs=1)
        after = await look()
        assert after.due_s == pytest.approx(first.due_s), "its minimum time is longer"
        await asyncio.sleep(500.0)
        house.now = Use(is_busy=False, signs=2)
        later = await look()
        assert later.due_s is not None
        assert later.due_s > first.due_s + 100
        assert later.rests_at is not None
        left_s = (later.rests_at - datetime.now(UTC)).total_seconds()
        assert left_s == pytest.approx(WISH.keep_alive_s, abs=20.0)
        house.is_coming = True
        assert await look() == Stay()
        await sleeper.stop()

    run_virtually(main)
    assert Sleeper(house, lambda kind, **fields: None, lambda _: False).stay("none") == Stay()


def test_what_was_woken_stays_up_for_its_minimum_time_once_more() -> None:
    house = House(replace(WISH, minimum_s=1000.0))

    async def main() -> None:
        sleeper = Sleeper(house, lambda kind, **fields: None, lambda deployment: False)
        sleeper.start()
        await asyncio.sleep(900.0)
        assert sleeper.up_s(WISH.deployment) == pytest.approx(900.0, abs=2.0)
        await asyncio.sleep(300.0)
        assert [each.resting for each in house.wished] == [True]
        assert sleeper.up_s(WISH.deployment) == 0.0
        await house.publish_wish(replace(WISH, minimum_s=1000.0))
        await asyncio.sleep(900.0)
        assert [each.resting for each in house.wished] == [True, False]
        await asyncio.sleep(300.0)
        assert [each.resting for each in house.wished] == [True, False, True]
        await sleeper.stop()

    run_virtually(main)


def test_a_rest_that_cannot_be_signed_is_tried_again_when_it_would_be_due_once_more() -> None:
    house = Unsigned(WISH)

    async def main() -> None:
        sleeper = Sleeper(house, lambda kind, **fields: None, lambda deployment: False)
        sleeper.start()
        await asyncio.sleep(950.0)
        await sleeper.stop()

    run_virtually(main)
    assert len(house.wished) == 3


def test_what_is_scaled_while_another_goes_to_rest_rests_as_it_is_wished_by_then() -> None:
    _, last = slept(ScaledMeanwhile(WISH), 900.0)
    assert last == replace(WISH, replicas=2, resting=True)


def test_what_is_still_brought_up_does_not_rest_before_anybody_can_use_it() -> None:
    house = House(WISH)
    house.is_coming = True
    assert slept(house, 900.0) == []
    house.is_coming = False
    assert slept(house, 200.0) == []
    assert slept(house, 900.0) == [replace(WISH, resting=True)]


def test_one_of_which_nothing_can_be_said_keeps_no_other_up() -> None:
    house = House(WISH)
    first = replace(WISH, deployment="/" * 16, model_id=ModelId("another"))
    house.others.append(Deployment(first, None, "cd" * 32, A, 0))
    house.broken = {first.deployment}
    assert slept(house, 900.0) == [replace(WISH, resting=True)]


def test_what_fails_for_all_ends_nothing() -> None:
    house = House(WISH)

    async def main() -> None:
        sleeper = Sleeper(house, lambda kind, **fields: None, lambda deployment: False)
        sleeper.start()
        house.broken = {""}
        await asyncio.sleep(60.0)
        house.broken = set()
        await asyncio.sleep(900.0)
        await sleeper.stop()

    run_virtually(main)
    assert house.wished == [replace(WISH, resting=True)]


class Verbs:
    """A deployment whose spans are as a test says."""

    def __init__(self, *phases: Phase) -> None:
        self.woken: list[bool] = []
        self.called: list[str] = []
        self.phases = list(phases)
        self.done = 30
        self.is_lacking = True
        self.wishes = [WISH]
        self.ends: PhaseProgress | None = None

    def seen(self, model: ModelId) -> list[SeenDeployment]:
        span = Span(A, WISH.whole)
        spans = [
            SeenSpan(0, span, "attic", PhaseProgress(phase, self.done, 40, "needs 900 MiB"))
            for phase in self.phases
        ]
        missing = (WISH.whole,) if self.is_lacking else ()
        return [
            SeenDeployment(
                Deployment(wish, None, "cd" * 32, A, 0), missing, tuple(spans), self.ends
            )
            for wish in self.wishes
            if wish.model_id == model
        ]

    async def wake(self, model: str, *, may_wake: bool) -> bool:
        self.woken.append(may_wake)
        return True


async def brought_up(
    verbs: Verbs, turns: int = 2, patience_s: float = 5.0, by_hand: Sequence[int] = ()
) -> list[BringingUp]:
    """What a request is told until the model can be asked, which is after so many looks; what is
    held `by_hand` is so far in percent meanwhile."""
    looks, far = iter(range(turns)), iter(by_hand)

    def loading(model: ModelId) -> BringingUp | None:
        return next((BringingUp(model, "DEPLOYING", percent) for percent in far), None)

    waker = Waker(
        verbs, lambda model: next(looks, None) is None, verbs.called.append, patience_s, loading
    )
    return [each async for each in waker.bring_up(GenerationRequest("r", MODEL, may_wake=True))]


async def test_who_waits_is_told_how_far_it_is() -> None:
    verbs = Verbs(Phase.PROVISIONING, Phase.QUEUED)
    assert await brought_up(verbs, 3) == [BringingUp(MODEL, "PROVISIONING", 75)]
    assert verbs.woken == [True]
    assert verbs.called == [WISH.deployment]


async def test_how_far_a_model_is_is_told_until_all_its_layers_are_offered() -> None:
    verbs = Verbs(Phase.DEPLOYING, Phase.QUEUED, Phase.READY)
    waker = Waker(verbs, lambda model: False, verbs.called.append, 5.0, lambda model: None)
    far = await waker.on_its_way(MODEL, may_wake=True)
    assert far == BringingUp(MODEL, "DEPLOYING", 75)
    assert verbs.woken == [True]
    verbs.phases[0], verbs.done = Phase.PROVISIONING, 10
    assert await waker.on_its_way(MODEL, may_wake=False) == BringingUp(MODEL, "PROVISIONING", 25)
    verbs.is_lacking = False
    assert await waker.on_its_way(MODEL, may_wake=False) is None
    assert await waker.on_its_way(ModelId("another"), may_wake=False) is None
    with pytest.raises(NoRoute, match="needs 900 MiB"):
        await Waker(
            Verbs(Phase.FAILED), lambda model: False, print, 5.0, lambda model: None
        ).on_its_way(MODEL, may_wake=True)


async def test_what_was_still_going_to_rest_when_it_was_woken_is_waited_for() -> None:
    assert await brought_up(Verbs(Phase.LEAVING), 3) == [BringingUp(MODEL, "QUEUED")]
    assert await brought_up(Verbs(Phase.LEAVING, Phase.DEPLOYING), 3) == [
        BringingUp(MODEL, "DEPLOYING", 75)
    ]


async def test_what_can_be_asked_or_is_not_deployed_is_not_waited_for() -> None:
    verbs = Verbs(Phase.READY)
    assert await brought_up(verbs, 0) == []
    verbs.wishes = []
    assert await brought_up(verbs, 9) == []
    assert verbs.woken == []


async def test_layers_that_are_held_by_hand_and_loading_are_waited_for() -> None:
    verbs = Verbs(Phase.READY)
    verbs.wishes = []
    told = await brought_up(verbs, 99, by_hand=(10, 10, 50))
    assert [each.percent for each in told] == [10, 50], "then they did not load"
    assert [each.percent for each in await brought_up(verbs, 2, by_hand=(10, 50))] == [10]
    with pytest.raises(PipelineStalled):
        await brought_up(verbs, 999, patience_s=0.3, by_hand=range(9))


async def test_what_is_not_on_its_way_is_not_waited_for() -> None:
    away = Verbs(Phase.AWAY, Phase.READY)
    assert await brought_up(away, 999) == []
    waker = Waker(
        away, lambda model: False, print, 5.0, lambda model: None, is_asked=lambda model: False
    )
    with pytest.raises(NoRoute, match=f"no node that is up serves layers {WISH.whole} of {MODEL}"):
        await anext(waker.bring_up(GenerationRequest("r", MODEL)))
    with pytest.raises(NoRoute, match="needs 900 MiB"):
        await brought_up(Verbs(Phase.FAILED), 999)
    with pytest.raises(PipelineStalled):
        await brought_up(Verbs(Phase.DEPLOYING), 999, patience_s=0.3)


async def test_whoever_passes_slowly_on_what_it_is_told_hears_that_it_took_too_long() -> None:
    verbs = Verbs(Phase.DEPLOYING)
    waker = Waker(verbs, lambda model: False, print, 0.1, lambda model: None)
    told = waker.bring_up(GenerationRequest("r", MODEL, may_wake=True))
    assert await anext(told) == BringingUp(MODEL, "DEPLOYING", 75)
    await asyncio.sleep(0.3)
    with pytest.raises(PipelineStalled):
        await anext(told)


@pytest.mark.parametrize("meanwhile", ["evicted", "it rests"])
async def test_what_is_wanted_no_longer_is_not_waited_for(meanwhile: str) -> None:
    verbs = Verbs(Phase.DEPLOYING)
    waker = Waker(verbs, lambda model: False, print, 5.0, lambda model: None)
    told = []
    async for each in waker.bring_up(GenerationRequest("r", MODEL, may_wake=True)):
        told.append(each)
        if meanwhile == "evicted":
            verbs.wishes = []
        else:
            verbs.wishes, verbs.phases = [replace(WISH, resting=True)], [Phase.RESTING]
            verbs.is_lacking = False
    assert told == [BringingUp(MODEL, "DEPLOYING", 75)], "who asks says that it is not up"


async def test_what_this_node_asks_with_is_waited_for_unless_it_cannot_be_had() -> None:
    verbs = Verbs(Phase.READY)
    verbs.is_lacking = False
    assert await brought_up(verbs, 3) == [BringingUp(MODEL, "DEPLOYING")]
    verbs.phases = [Phase.FAILED, Phase.READY]  # of two replicas one is enough
    assert await brought_up(verbs, 3) == [BringingUp(MODEL, "DEPLOYING")]
    verbs.ends = PhaseProgress(Phase.PROVISIONING, 10, 40)
    assert await brought_up(verbs, 3) == [BringingUp(MODEL, "PROVISIONING", 25)]
    verbs.ends = PhaseProgress(Phase.FAILED, reason="nobody has them")
    with pytest.raises(NoRoute, match="nobody has them"):
        await brought_up(verbs, 999)
