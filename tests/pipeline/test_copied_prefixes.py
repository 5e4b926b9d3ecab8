"""Texts of one caller that begin alike: what they have in common is computed once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from mesh.clock import SystemClock
from mesh.pipeline.watch.oversight import Oversight
from mesh.routing.cover import Candidate, key_of
from mesh.types import (
    THIS_NODE,
    Done,
    GenerationRequest,
    ModelId,
    Principal,
    PrincipalKind,
    ShardFailover,
    StreamFrame,
    WireDtype,
)
from tests.health.watched import tokens_of
from tests.pipeline.toy_mesh import (
    TOTAL_LAYERS,
    ToyNetwork,
    ToySession,
    ToyShard,
    expected_tokens,
    toy_orchestrator,
    toy_request,
)
from tests.shard.asker import settled

COUNT = 5
SYSTEM = [(7 * i + 3) % 90 + 1 for i in range(100)]
FIRST = [*SYSTEM, *range(1, 121)]
"""Long enough that its cache is no good for another conversation."""
SECOND = [*SYSTEM, 80, 81, 82]
SHORT = [*SYSTEM[:63], 5, 6, 7]


class House:
    """Two shards and an asker that keeps its sessions."""

    def __init__(self, network: ToyNetwork | None = None) -> None:
        self.network = network or ToyNetwork()
        self.shards = [self.network.add("0-3"), self.network.add("4-7")]
        self.orchestrator, self.sessions = toy_orchestrator(self.network)

    async def ask(self, prompt: list[int], who: Principal = THIS_NODE, count: int = COUNT) -> Done:
        return self.checked(prompt, count, [f async for f in self.frames(prompt, who, count)])

    def frames(self, prompt: list[int], who: Principal = THIS_NODE, count: int = COUNT):  # type: ignore[no-untyped-def]
        request: GenerationRequest = replace(toy_request(prompt, count), principal=who)
        return self.orchestrator.chat(request)

    @staticmethod
    def checked(prompt: list[int], count: int, frames: list[StreamFrame]) -> Done:
        assert tokens_of(frames) == expected_tokens(prompt, count)
        assert isinstance(frames[-1], Done)
        return frames[-1]

    def fed(self) -> list[int]:
        """Rows that each shard has computed since it was last asked."""
        rows = [sum(count for _, count in shard.steps) for shard in self.shards]
        for shard in self.shards:
            shard.steps.clear()
        return rows

    @property
    def copied(self) -> list[list[int]]:
        return [shard.copied for shard in self.shards]


async def test_what_two_prompts_have_in_common_is_copied_on_every_hop() -> None:
    house = House()
    assert (await house.ask(FIRST)).cached_tokens == 0
    house.fed()
    assert (await house.ask(SECOND)).cached_tokens == len(SYSTEM)
    assert house.fed() == [len(SECOND) - len(SYSTEM) + COUNT - 1] * 2
    assert house.copied == [[len(SYSTEM)]] * 2
    # The first conversation has lost nothing by it.
    follow_up = [*FIRST, *expected_tokens(FIRST, COUNT), 9]
    assert (await house.ask(follow_up)).cached_tokens == len(FIRST) + COUNT - 1
    await house.sessions.close()


async def test_less_than_a_block_in_common_is_computed() -> None:
    house = House()
    await house.ask(FIRST)
    assert (await house.ask(SHORT)).cached_tokens == 0
    assert house.copied == [[], []]
    await house.sessions.close()


async def test_one_that_is_just_answered_is_copied_from_as_well() -> None:
    house = House()
    frames = house.frames(FIRST, count=40)
    seen = [await anext(frames) for _ in range(3)]
    assert (await house.ask(SECOND)).cached_tokens == len(SYSTEM)
    # What it has said so far may still be taken back, so only its prompt is copied.
    said = [*FIRST, *expected_tokens(FIRST, 40)[:2], 3]
    assert (await house.ask(said)).cached_tokens == len(FIRST)
    house.checked(FIRST, 40, [*seen, *[frame async for frame in frames]])
    await house.sessions.close()


async def test_nobody_elses_is_copied() -> None:
    house = House()
    someone = Principal(PrincipalKind.KEY, "someone")
    await house.ask(FIRST, someone)
    assert (await house.ask(SECOND)).cached_tokens == 0
    assert house.copied == [[], []]
    assert (await house.ask(SECOND, someone)).cached_tokens == len(SYSTEM)
    await house.sessions.close()


@pytest.mark.parametrize("prompt", [SECOND, [*FIRST, 9]])
async def test_what_travelled_in_another_format_is_neither_copied_nor_gone_on_with(
    prompt: list[int],
) -> None:
    house = House()
    await house.ask(FIRST)
    terms = house.sessions.known()[0].route.terms
    for wire_dtype in (WireDtype.FP16, terms.wire_dtype):
        other = replace(terms, wire_dtype=wire_dtype)
        session = await house.sessions.acquire(prompt, other, TOTAL_LAYERS, at_home=False)
        assert bool(session.token_ids) is (wire_dtype is terms.wire_dtype)
        house.sessions.release(session, keep=False)
    await house.sessions.close()


@pytest.mark.parametrize("hop", [0, 1])
@pytest.mark.parametrize("held", [0, 70])
async def test_what_a_hop_holds_no_more_is_computed_on_all(hop: int, held: int) -> None:
    class Forgetful(ToySession):
        def begin_as(self, other: ToySession, positions: int) -> int:
            return super().begin_as(other, min(positions, held))

    house = House()
    await house.ask(FIRST)
    house.shards[hop].new_session = Forgetful
    assert (await house.ask(SECOND)).cached_tokens == held
    await house.sessions.close()


async def test_a_lost_hop_is_rebuilt_from_what_was_copied() -> None:
    house = House()
    await house.ask(FIRST)
    spare = house.network.add("4-7", name="spare")
    spare.is_advertised = False
    frames = house.frames(SECOND, count=20)
    seen = [await anext(frames) for _ in range(4)]
    spare.is_advertised = True
    house.shards[1].kill()
    done = house.checked(SECOND, 20, [*seen, *[frame async for frame in frames]])
    assert (done.cached_tokens, done.failovers) == (len(SYSTEM), 1)
    assert spare.steps[0][0] == 0
    await house.sessions.close()


async def test_a_route_over_other_shards_is_fed_everything() -> None:
    house = House()
    await house.ask(FIRST)
    house.shards[1].is_advertised = False
    other: ToyShard = house.network.add("4-7", name="other")
    assert (await house.ask(SECOND)).cached_tokens == 0
    assert house.copied == [[], []]
    assert other.steps
    await house.sessions.close()


async def test_where_nobody_else_has_the_layers_it_does_not_matter_who_is_suspected() -> None:
    class Suspicious(ToyNetwork):
        def candidates(self, model_id: ModelId) -> list[Candidate]:
            return [replace(each, penalty=2) for each in super().candidates(model_id)]

    house = House(Suspicious())
    await house.ask(FIRST)
    assert (await house.ask(SECOND)).cached_tokens == len(SYSTEM)
    await house.sessions.close()


async def test_while_it_is_copied_from_a_conversation_is_not_gone_on_with() -> None:
    """It would be cut back to what is asked now, under the hands of who copies."""
    house = House()
    await house.ask(FIRST)
    house.shards[0].copies_after_s = 0.2
    copying = asyncio.create_task(house.ask(SECOND))
    await settled(lambda: bool(house.shards[0].copied))
    shorter = [*FIRST[:150], 90]  # would cut what it goes on with to 150 tokens
    assert (await house.ask(shorter)).cached_tokens == 150
    assert house.shards[0].copied == [len(SYSTEM), 150]
    assert (await copying).cached_tokens == len(SYSTEM)
    assert (await house.ask([*FIRST[:140], 91])).cached_tokens == 140
    assert len(house.shards[0].copied) == 2
    await house.sessions.close()


async def test_hops_that_say_they_copied_more_than_was_asked_are_not_believed() -> None:
    class Boaster(ToySession):
        def begin_as(self, other: ToySession, positions: int) -> int:
            return super().begin_as(other, positions) + 1000

    house = House()
    for shard in house.shards:
        shard.new_session = Boaster
    await house.ask(FIRST)
    assert (await house.ask(SECOND)).cached_tokens == len(SYSTEM)
    await house.sessions.close()


@pytest.mark.parametrize("found", ["never", "before", "while it is copied"])
async def test_what_was_computed_from_a_lie_is_not_begun_with(found: str) -> None:
    """The liar is not among the hops any more, but the cache behind it holds what it said."""
    network, oversight = ToyNetwork(), Oversight(SystemClock(), ceiling_s=30.0)
    first, second = network.add("0-3"), network.add("4-7")
    second.copies_after_s = 0.02
    orchestrator, sessions = toy_orchestrator(network, oversight)
    frames: list[StreamFrame] = []
    async for frame in orchestrator.chat(toy_request(FIRST, COUNT)):
        if not frames:
            network.add("0-3", name="z")
            first.drain()
            await asyncio.sleep(0)
        frames.append(frame)
    assert any(isinstance(frame, ShardFailover) for frame in frames)
    House.checked(FIRST, COUNT, frames)
    first.is_advertised = False
    lied = partial(oversight.reputations.lied, key_of(first.descriptor), "it was caught")
    if found == "before":
        lied()
    elif found != "never":
        asyncio.get_running_loop().call_later(0.01, lied)
    async with asyncio.timeout(5):
        frames = [frame async for frame in orchestrator.chat(toy_request(SECOND, COUNT))]
    done = House.checked(SECOND, COUNT, frames)
    assert done.cached_tokens == (len(SYSTEM) if found == "never" else 0)
    assert second.copied == ([] if found == "before" else [len(SYSTEM)])
    await sessions.close()
