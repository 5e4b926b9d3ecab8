"""What is kept for follow-ups is bounded in number, age and bytes; what goes is freed on hops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from mesh.pipeline.process import EXPIRY_TICK_S
from mesh.pipeline.sessions import MAX_PARKED, PARKED_SECONDS, expire_regularly
from mesh.types import THIS_NODE, Done, Principal, PrincipalKind
from mesh.wire.messages import Result
from tests.health.watched import Watched, tokens_of, watched
from tests.pipeline.toy_mesh import ToyNetwork, expected_tokens
from tests.simulation.virtual_loop import run_virtually
from tests.wire.memory import MemoryLink

COUNT = 4
FED = 3 + COUNT - 1
"""Positions of a conversation: the last token was sampled, never fed."""


class Conversations:
    """Each begins with other tokens, so that none continues another."""

    def __init__(self, mesh: Watched) -> None:
        self.mesh = mesh

    async def begin(self, number: int, who: Principal = THIS_NODE) -> None:
        await self.mesh.ask(COUNT, prompt=_opening(number), principal=who)
        await asyncio.sleep(1.0)

    async def cached(self, number: int, who: Principal = THIS_NODE) -> int:
        """Ask what follows, and how many of its tokens did not have to be computed again."""
        prompt = [*_opening(number), *expected_tokens(_opening(number), COUNT), 7]
        frames = await self.mesh.ask(COUNT, prompt=prompt, principal=who)
        assert tokens_of(frames) == expected_tokens(prompt, COUNT)
        assert isinstance(frames[-1], Done)
        return frames[-1].cached_tokens

    def held(self) -> list[int]:
        """Sessions on each hop."""
        return [len(shard.sessions) for shard in self.mesh.network.shards.values()]


def _opening(number: int) -> list[int]:
    return [number + 1, 50 - number, 3 * number]


def converse(body: Callable[[Conversations], Awaitable[None]]) -> None:
    """In virtual time, with an asker that drops what is too old as its process does."""

    async def main() -> None:
        network = ToyNetwork()
        network.add("0-3")
        network.add("4-7")
        with watched(network) as mesh:
            expiring = asyncio.create_task(expire_regularly(mesh.engine.sessions, EXPIRY_TICK_S))
            await body(Conversations(mesh))
            expiring.cancel()
            await mesh.engine.close()

    run_virtually(main)


def test_only_so_many_are_kept_and_the_oldest_goes_first() -> None:
    async def body(talks: Conversations) -> None:
        for number in range(MAX_PARKED + 2):
            await talks.begin(number)
            assert talks.held() == [min(number + 1, MAX_PARKED)] * 2
        assert await talks.cached(2) == FED
        assert await talks.cached(1) == 0

    converse(body)


KEY, OTHER = Principal(PrincipalKind.KEY, "0a1b2c3d"), Principal(PrincipalKind.KEY, "4e5f6071")
STRANGERS = [OTHER, Principal.user(1000), Principal.connection("a"), THIS_NODE]


@pytest.mark.parametrize("stranger", STRANGERS, ids=str)
def test_what_one_principal_asked_is_in_nobody_else_s_cache(stranger: Principal) -> None:
    async def body(talks: Conversations) -> None:
        await talks.begin(0, KEY)
        assert await talks.cached(0, stranger) == 0
        assert await talks.cached(0, KEY) == FED, "nobody took it away"

    converse(body)


def test_connections_of_unknown_users_share_nothing_either() -> None:
    async def body(talks: Conversations) -> None:
        await talks.begin(0, Principal.connection("a"))
        assert await talks.cached(0, Principal.connection("b")) == 0
        assert await talks.cached(0, Principal.connection("a")) == FED

    converse(body)


@pytest.mark.parametrize(
    "pushy", [[OTHER] * 6, [Principal.connection(str(number)) for number in range(6)]]
)
def test_whoever_parks_most_makes_room_first(pushy: list[Principal]) -> None:
    async def body(talks: Conversations) -> None:
        await talks.begin(0, KEY)
        for number, who in enumerate(pushy, 1):
            await talks.begin(number, who)
        assert talks.held() == [MAX_PARKED] * 2
        assert await talks.cached(0, KEY) == FED

    converse(body)


def test_what_nobody_follows_up_is_dropped_after_a_while() -> None:
    async def body(talks: Conversations) -> None:
        await talks.begin(0)
        await asyncio.sleep(PARKED_SECONDS / 2)
        await talks.begin(1)
        await asyncio.sleep(PARKED_SECONDS / 2 - 10)
        assert talks.held() == [2, 2]
        await asyncio.sleep(20)
        assert talks.held() == [1, 1]
        assert await talks.cached(1) == FED
        await asyncio.sleep(PARKED_SECONDS + 10)
        assert talks.held() == [0, 0]

    converse(body)


def test_what_is_kept_to_replay_it_is_bounded_in_bytes() -> None:
    async def body(talks: Conversations) -> None:
        await talks.begin(0)
        (first,) = talks.mesh.engine.sessions.known()
        talks.mesh.engine.sessions.max_parked_bytes = 2 * first.route.history_bytes
        await talks.begin(1)
        assert talks.held() == [2, 2], "as many as the bound allows"
        await talks.begin(2)
        assert talks.held() == [2, 2]
        assert await talks.cached(1) == FED
        assert await talks.cached(0) == 0

    converse(body)


def test_a_hop_that_still_owes_an_answer_is_not_taken_over() -> None:
    async def main() -> None:
        network = ToyNetwork()
        first, slow = network.add("0-3", name="a"), network.add("0-3", name="b")
        back = network.add("4-7", name="c")
        slow.delay_s = 1.0
        answered = 0

        def answer(link: MemoryLink, result: Result) -> None:
            nonlocal answered
            link.send(result)
            answered += 1
            if answered == COUNT:  # what it said last is on its way to the last token
                back.delay_s = 0.05
                asyncio.get_running_loop().call_later(0.01, first.kill)

        first.reply = answer
        with watched(network) as mesh:
            frames = await mesh.ask(COUNT, prompt=[1, 2, 3])
            said = tokens_of(frames)
            assert said == expected_tokens([1, 2, 3], COUNT)
            edited = [1, 2, 3, *said[:2], 33, 44, 55]
            frames = await mesh.ask(COUNT, prompt=edited, name="edited")
            assert tokens_of(frames) == expected_tokens(edited, COUNT)
            await mesh.engine.close()

    run_virtually(main)
