"""Who comes while as many generations run as may waits in fair turns, a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import pytest

from mesh.clock import SystemClock
from mesh.errors import Busy, ModelNotFound
from mesh.pipeline.askers import Askers
from mesh.pipeline.entrance import Entrance
from mesh.pipeline.live import LiveCounts
from mesh.types import (
    BringingUp,
    GenerationRequest,
    ModelId,
    Principal,
    PrincipalKind,
    Queued,
    StreamFrame,
    TokenDelta,
)

if TYPE_CHECKING:
    from mesh.pipeline.supervisor import AskerSupervisor


@dataclass
class Door:
    """An entrance and what each request was told."""

    entrance: Entrance
    told: dict[str, list[int]] = field(default_factory=dict)
    inside: list[str] = field(default_factory=list)

    def come(self, name: str, owner: str = "") -> asyncio.Task[None]:
        return asyncio.create_task(self._come(name, Principal(PrincipalKind.NODE, owner or name)))

    async def _come(self, name: str, principal: Principal) -> None:
        entering = self.entrance.enter(name, principal)
        self.told[name] = []
        async with contextlib.aclosing(entering):
            async for queued in entering:
                self.told[name].append(queued.position)
        self.inside.append(name)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_next_comes_in_when_one_leaves_and_all_hear_where_they_stand() -> None:
    door = Door(Entrance(2, 5, 8))
    tasks = [door.come(name) for name in ("a", "b", "c", "d")]
    await settle()
    assert door.inside == ["a", "b"]
    assert door.told == {"a": [], "b": [], "c": [1], "d": [2]}
    door.entrance.leave("b")
    await settle()
    assert door.inside == ["a", "b", "c"]
    assert door.told["d"] == [2, 1]
    door.entrance.leave("a")
    await asyncio.gather(*tasks)
    assert door.inside == ["a", "b", "c", "d"]


async def test_owners_take_turns() -> None:
    door = Door(Entrance(1, 5, 8))
    for name, owner in (("a", "x"), ("b", "x"), ("c", "x"), ("d", "y")):
        door.come(name, owner)
        await settle()
    for leaving in ("a", "b", "d"):
        door.entrance.leave(leaving)
        await settle()
    assert door.inside == ["a", "b", "d", "c"]


async def test_places_are_bounded_for_all_and_for_each() -> None:
    door = Door(Entrance(1, 5, 4))
    tasks = {name: door.come(name, owner) for name, owner in (("a", "x"), ("b", "x"), ("c", "x"))}
    await settle()
    with pytest.raises(Busy, match="1 generations run here already"):
        await door.come("e", "x")
    others = [door.come(name) for name in ("f", "g")]
    await settle()
    with pytest.raises(Busy, match="4 wait"):
        await door.come("h")
    for task in (*tasks.values(), *others):
        task.cancel()


async def test_the_wait_ends() -> None:
    door = Door(Entrance(1, 0.05, 4))
    await door.come("a")
    with pytest.raises(Busy, match=r"this request waited 0.05 s"):
        await door.come("b")
    door.entrance.leave("a")
    await door.come("c")
    assert door.inside == ["a", "c"]
    assert door.told["c"] == []


async def test_who_has_none_is_let_in_where_another_has_several() -> None:
    entrance = Entrance(3, 5, 8, patience_s=0.02)
    door = Door(entrance)
    for name in ("a", "b", "c"):
        await door.come(name, "x")
    more, guest = door.come("d", "x"), door.come("e", "y")
    await asyncio.wait_for(guest, 1)
    for going in ("a", "b", "e"):
        await asyncio.wait_for(entrance.turn(going), 1)
    resting = asyncio.create_task(entrance.turn("c"))  # the youngest of those who have several
    last = door.come("f", "z")
    await asyncio.wait_for(last, 1)
    assert door.inside == ["a", "b", "c", "e", "f"], "and no other of theirs comes in meanwhile"
    assert not resting.done()
    assert not more.done()
    for leaving in ("e", "f", "a"):
        entrance.leave(leaving)
    await asyncio.wait_for(asyncio.gather(resting, more, entrance.turn("b")), 1)


async def test_nobody_rests_who_has_but_one_nor_for_ever() -> None:
    one_each = Door(Entrance(2, 0.1, 8, patience_s=0.01))
    for name in ("a", "b"):
        await one_each.come(name)
    with pytest.raises(Busy):
        await one_each.come("c")
    entrance = Entrance(2, 5, 8, patience_s=0.01, rest_s=0.05)
    door = Door(entrance)
    for name, owner in (("a", "x"), ("b", "x"), ("c", "y")):
        await asyncio.wait_for(door.come(name, owner), 1)
    await asyncio.wait_for(entrance.turn("b"), 1)
    entrance.leave("b")
    entrance.leave("c")
    await asyncio.wait_for(door.come("d", "y"), 1)


async def test_who_has_only_one_that_had_its_turn_rests_for_who_has_none() -> None:
    entrance = Entrance(2, 5, 8, patience_s=0.01, turn_s=0.1, rest_s=0.3)
    door = Door(entrance)
    for name in ("a", "b"):
        await door.come(name)
    guest, own = door.come("c"), door.come("d", "b")
    await asyncio.wait_for(guest, 1)
    await asyncio.wait_for(entrance.turn("b"), 1)
    await asyncio.wait_for(entrance.turn("a"), 1)  # the oldest, for which the next oldest rests
    assert not own.done()
    resting = asyncio.create_task(entrance.turn("b"))
    await settle()
    assert not resting.done()
    for leaving in ("a", "c"):
        entrance.leave(leaving)
    await asyncio.wait_for(asyncio.gather(resting, own), 1)


async def test_who_gives_up_leaves_the_line_and_takes_nobodys_place() -> None:
    door = Door(Entrance(1, 5, 8))
    await door.come("a")
    gone, last = door.come("b"), door.come("c")
    await settle()
    gone.cancel()
    await settle()
    assert door.told["c"] == [2, 1] or door.told["c"] == [2]
    door.entrance.leave("b")  # as its request's end says, whether it was in or not
    assert door.inside == ["a"]
    door.entrance.leave("a")
    await last
    gone = door.come("d")
    await settle()
    door.entrance.leave("c")
    gone.cancel()  # between being let in and hearing of it
    await settle()
    door.entrance.leave("d")
    await asyncio.wait_for(door.come("e"), 1)


class Asker:
    """An asker's process that says these words."""

    def __init__(self, *words: str) -> None:
        self._words = words

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[StreamFrame, None]:
        for word in self._words:
            yield TokenDelta(word, (1,))


async def no_steps(request: GenerationRequest) -> AsyncGenerator[BringingUp, None]:
    for _ in ():
        yield _


async def as_it_is(request: GenerationRequest) -> GenerationRequest:
    return request


def behind(entrance: Entrance, askers: dict[ModelId, AskerSupervisor]) -> Askers:
    return Askers(
        askers, entrance=entrance, why_disabled=lambda model: None, prepared=as_it_is,
        on_frame=lambda frame: None, counts=LiveCounts(SystemClock(), lambda: None),
        bring_up=no_steps,
    )  # fmt: skip


async def test_what_rests_is_not_read() -> None:
    model, entrance = ModelId("toy"), Entrance(2, 5, 8, patience_s=0.01)
    askers = behind(entrance, {model: cast("AskerSupervisor", Asker("one", "two"))})
    async with (
        contextlib.aclosing(askers.generate(GenerationRequest("a", model))) as first,
        contextlib.aclosing(askers.generate(GenerationRequest("b", model))) as second,
    ):
        for frames in (first, second):
            assert await anext(frames) == TokenDelta("one", (1,))
        await asyncio.wait_for(Door(entrance).come("guest"), 1)
        resting = asyncio.ensure_future(anext(second))
        assert await anext(first) == TokenDelta("two", (1,))
        await settle()
        assert not resting.done()
        entrance.leave("guest")
        assert await asyncio.wait_for(resting, 1) == TokenDelta("two", (1,))


@pytest.mark.parametrize("then", ["another", None])
async def test_who_stood_in_line_asks_whom_there_is_by_then(then: str | None) -> None:
    """The number format may have been changed meanwhile, or the model evicted."""
    model, entrance = ModelId("toy"), Entrance(1, 5, 8)
    found = {model: cast("AskerSupervisor", Asker("the first"))}
    askers = behind(entrance, found)
    async for _ in entrance.enter("somebody", Principal(PrincipalKind.NODE, "x")):
        pass
    async with contextlib.aclosing(askers.generate(GenerationRequest("r", model))) as frames:
        assert await anext(frames) == Queued(1)
        del found[model]
        if then is not None:
            found[model] = cast("AskerSupervisor", Asker(then))
        entrance.leave("somebody")
        if then is None:
            with pytest.raises(ModelNotFound):
                await anext(frames)
        else:
            assert await anext(frames) == TokenDelta(then, (1,))
    await asyncio.wait_for(Door(entrance).come("the next"), 5)
