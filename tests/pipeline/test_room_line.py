"""The line in front of full shards: in turn, bounded, left at once, told of; through the door."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from mesh.errors import NoRoute
from mesh.pipeline.generation import PipelineOrchestrator
from mesh.pipeline.room_line import LONGEST_PAUSE_S, RoomLine
from mesh.types import Done, Principal, PrincipalKind, Queued, StreamFrame, TokenDelta
from tests.pipeline.toy_mesh import (
    ToyNetwork,
    expected_tokens,
    toy_orchestrator,
    toy_request,
)
from tests.simulation.virtual_loop import run_virtually
from tests.waiting import until

PROMPT = [3, 1, 4, 1, 5]
ANNE, BERT = (Principal(PrincipalKind.KEY, name) for name in ("anne", "bert"))
Stream = AsyncGenerator[StreamFrame, None]


class Household:
    """One shard with one stream, and an asker whose requests note when they end."""

    def __init__(self, line: RoomLine | None = None) -> None:
        self.network = ToyNetwork()
        self.shard = self.network.add("0-7", streams=1, name="a")
        self.line = line or RoomLine()
        self.orchestrator, self.sessions = toy_orchestrator(self.network, line=self.line)
        self.ended: list[str] = []

    async def hold(self, *, elsewhere: bool = False) -> Stream:
        """An answer that keeps the only stream until it is closed; of another asker `elsewhere`,
        so that nobody here is told."""
        asker = toy_orchestrator(self.network)[0] if elsewhere else self.orchestrator
        answer = asker.chat(toy_request(PROMPT, 90, "holder"))
        assert isinstance(await anext(answer), TokenDelta)
        return answer

    async def ask(self, name: str, principal: Principal = ANNE) -> list[int]:
        """The places that a request was told, when it has been answered with the right tokens."""
        request, places = toy_request(PROMPT, 4, name, principal), []
        async for frame in self.orchestrator.chat(request):
            if isinstance(frame, Queued):
                places.append(frame.position)
            elif isinstance(frame, Done):
                assert list(frame.token_ids) == expected_tokens(PROMPT, 4)
        self.ended.append(name)
        return places

    async def close(self) -> None:
        """Nothing is left in line, nor at the shard."""
        await self.sessions.close()
        assert not self.line.positions()
        await until(lambda: self.shard.open_streams() == 0)


async def asked_in_order(
    home: Household, *asked: tuple[str, Principal]
) -> list[asyncio.Task[list[int]]]:
    """Requests under way, each in line before the next is made."""
    tasks = []
    for name, principal in asked:
        tasks.append(asyncio.create_task(home.ask(name, principal), name=name))
        await asyncio.sleep(0.01)
    return tasks


@pytest.mark.parametrize("elsewhere", [False, True])
def test_who_finds_no_room_is_answered_in_order_and_told_where_it_stands(elsewhere: bool) -> None:
    async def main() -> None:
        home = Household()
        holder = await home.hold(elsewhere=elsewhere)
        tasks = await asked_in_order(home, ("1", ANNE), ("2", ANNE), ("3", ANNE))
        assert home.line.positions() == {"1": 1, "2": 2, "3": 3}
        await holder.aclose()
        assert await asyncio.gather(*tasks) == [[1], [2, 1], [3, 2, 1]]
        assert home.ended == ["1", "2", "3"]
        await home.close()

    run_virtually(main)


def test_who_comes_later_does_not_overtake_those_who_wait() -> None:
    async def main() -> None:
        home = Household()
        holder = await home.hold(elsewhere=True)
        tasks = await asked_in_order(home, ("1", ANNE))
        await asyncio.sleep(LONGEST_PAUSE_S)
        await holder.aclose()  # there is room, which is the first one's
        tasks.append(asyncio.create_task(home.ask("2"), name="2"))
        await asyncio.sleep(0)
        assert home.line.positions() == {"1": 1, "2": 2}
        await asyncio.gather(*tasks)
        assert home.ended == ["1", "2"]
        await home.close()

    run_virtually(main)


def test_what_ends_here_is_used_at_once() -> None:
    async def main() -> None:
        home = Household()
        holder = await home.hold()
        tasks = await asked_in_order(home, ("1", ANNE))
        await asyncio.sleep(10)  # its pauses are long by now
        now = asyncio.get_running_loop().time()
        await holder.aclose()
        await asyncio.gather(*tasks)
        assert asyncio.get_running_loop().time() == now
        await home.close()

    run_virtually(main)


def test_principals_take_turns() -> None:
    async def main() -> None:
        home = Household()
        holder = await home.hold()
        greedy = [(f"a{number}", ANNE) for number in range(4)]
        tasks = await asked_in_order(home, *greedy, ("b", BERT))
        await holder.aclose()
        await asyncio.gather(*tasks)
        assert home.ended == ["a0", "b", "a1", "a2", "a3"]
        await home.close()

    run_virtually(main)


def test_a_full_line_refuses_at_once_and_half_of_it_is_for_one_principal() -> None:
    async def main() -> None:
        home = Household(RoomLine(places=4))
        holder = await home.hold()
        tasks = await asked_in_order(home, ("a1", ANNE), ("a2", ANNE))
        began = asyncio.get_running_loop().time()
        with pytest.raises(NoRoute, match=r"a: full\."):
            await home.ask("a3", ANNE)
        tasks += await asked_in_order(home, ("b1", BERT), ("b2", BERT))
        with pytest.raises(NoRoute, match=r"a: full\."):
            await home.ask("c", Principal(PrincipalKind.KEY, "carl"))
        assert asyncio.get_running_loop().time() - began == pytest.approx(0.02, abs=0.001)
        await holder.aclose()
        await asyncio.gather(*tasks)
        await home.close()

    run_virtually(main)


@pytest.mark.parametrize("given_up", ["1", "2"])
def test_whoever_gives_up_leaves_the_line_at_once(given_up: str) -> None:
    async def main() -> None:
        home = Household()
        holder = await home.hold()
        tasks = await asked_in_order(home, ("1", ANNE), ("2", ANNE), ("3", ANNE))
        task = next(task for task in tasks if task.get_name() == given_up)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        left = [name for name in ("1", "2", "3") if name != given_up]
        assert home.line.positions() == {left[0]: 1, left[1]: 2}
        await holder.aclose()
        await asyncio.gather(*(task for task in tasks if task.get_name() != given_up))
        assert home.ended == left
        await home.close()

    run_virtually(main)


def test_a_stream_that_is_closed_while_it_waits_leaves_the_line() -> None:
    async def main() -> None:
        home = Household()
        holder = await home.hold()
        waiting = home.orchestrator.chat(toy_request(PROMPT, 4, "1"))
        assert await anext(waiting) == Queued(1)
        await waiting.aclose()
        assert not home.line.positions()
        await holder.aclose()
        await home.close()

    run_virtually(main)


def test_the_limit_is_kept_by_each_who_waits() -> None:
    async def main() -> None:
        home = Household(RoomLine(wait_s=3.0))
        loop = asyncio.get_running_loop()
        holder = await home.hold()

        async def refused(name: str) -> float:
            began = loop.time()
            with pytest.raises(NoRoute, match=r"a: full\."):
                await home.ask(name)
            return loop.time() - began

        waited = await asyncio.gather(*map(refused, ("1", "2", "3")))
        assert waited == pytest.approx([3.0] * 3, abs=0.01)
        await holder.aclose()
        await home.close()

    run_virtually(main)


def test_a_line_without_time_is_none() -> None:
    async def main() -> None:
        home = Household(RoomLine(wait_s=0))
        holder = await home.hold()
        began = asyncio.get_running_loop().time()
        with pytest.raises(NoRoute, match=r"a: full\."):
            await anext(home.orchestrator.chat(toy_request(PROMPT, 4, "1")))
        assert asyncio.get_running_loop().time() == began
        await holder.aclose()
        await home.close()

    run_virtually(main)


def test_three_askers_share_one_stream_and_find_out_by_asking_again() -> None:
    async def main() -> None:
        network = ToyNetwork()
        shard = network.add("0-7", streams=1, name="a")
        shard.delay_s = 0.1
        askers = [toy_orchestrator(network) for _ in range(3)]
        began = asyncio.get_running_loop().time()

        async def answered(orchestrator: PipelineOrchestrator, name: str) -> list[int]:
            async for frame in orchestrator.chat(toy_request(PROMPT, 4, name)):
                if isinstance(frame, Done):
                    return list(frame.token_ids)
            raise AssertionError("no end")

        asked = [
            answered(orchestrator, f"{asker}-{number}")
            for asker, (orchestrator, _) in enumerate(askers)
            for number in range(3)
        ]
        assert await asyncio.gather(*asked) == [expected_tokens(PROMPT, 4)] * 9
        took_s = asyncio.get_running_loop().time() - began
        assert took_s < 9 * (0.4 + LONGEST_PAUSE_S)
        for _, sessions in askers:
            await sessions.close()
        await asyncio.sleep(0)
        assert shard.open_streams() == 0

    run_virtually(main)


def test_who_cannot_go_home_after_all_waits_in_line() -> None:
    async def main() -> None:
        network = ToyNetwork()
        network.add("0-7", streams=1, name="a")
        home = network.home()
        orchestrator, sessions = toy_orchestrator(network, home=home)
        holder = orchestrator.chat(toy_request(PROMPT, 90, "holder"))
        await anext(holder)
        home.alive = False
        waiting = orchestrator.chat(toy_request(PROMPT, 4, "1"))
        assert await anext(waiting) == Queued(1)
        await holder.aclose()
        done = [frame async for frame in waiting][-1]
        assert isinstance(done, Done)
        assert (list(done.token_ids), done.fallback) == (expected_tokens(PROMPT, 4), False)
        await sessions.close()

    run_virtually(main)
