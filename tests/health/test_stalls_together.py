"""Several generations on a hop that stalls, and an asker that is busy meanwhile; virtual time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from mesh.pipeline.watch.latency import FLOOR_S
from mesh.pipeline.watch.stalls import TICK_S
from mesh.types import ShardStatus
from mesh.wire.messages import Result, Step
from tests.health.test_stalls import CEILING_S, STEP_S, Watching
from tests.health.watched import PROMPT, Watched, tokens_of, watched
from tests.pipeline.toy_mesh import ToyNetwork, expected_tokens, toy_request
from tests.simulation.virtual_loop import pass_time, run_virtually
from tests.wire.memory import MemoryLink

COUNT = 30


class Together:
    """Generations over a front and the hop `bad`, which a spare can replace."""

    def __init__(self) -> None:
        self.network = ToyNetwork()
        self.network.add("0-3", streams=99)
        self.bad = self.network.add("4-7", name="a-bad", streams=99)
        self.network.add("4-7", name="z-spare", streams=99)
        for shard in self.network.shards.values():
            shard.delay_s = STEP_S
        self.noticed: dict[int, float] = {}
        self.tokens: dict[int, list[int]] = {}

    async def ask(self, mesh: Watched, number: int) -> None:
        frames = []
        async for frame in mesh.engine.chat(toy_request([number, 2, 3], COUNT, f"r{number}")):
            frames.append(frame)
            if isinstance(frame, ShardStatus):
                self.noticed[number] = asyncio.get_running_loop().time()
        self.tokens[number] = tokens_of(frames)

    def run(self, body: Callable[[Watched], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            with watched(self.network, ceiling_s=CEILING_S) as mesh:
                async with mesh.watching_stalls():
                    await body(mesh)

        run_virtually(main)
        for number, tokens in self.tokens.items():
            assert tokens == expected_tokens([number, 2, 3], COUNT)

    def failures(self, mesh: Watched) -> int:
        """How often the bad hop failed, as its standing has it."""
        rows = mesh.engine.oversight.reputations.rows()
        return sum(row["failures"] for row in rows if row["host"] == self.bad.descriptor.host)


def test_one_silence_is_noticed_by_all_at_once_and_counted_once() -> None:
    case, numbers = Together(), range(1, 7)

    async def body(mesh: Watched) -> None:
        def silent() -> None:
            case.bad.before_step = lambda step: False

        asks = []
        for number in numbers:
            asks.append(asyncio.create_task(case.ask(mesh, number), name=f"ask {number}"))
            await asyncio.sleep(STEP_S / 3)
        asyncio.get_running_loop().call_later(10 * STEP_S, silent)
        await asyncio.gather(*asks)
        assert case.failures(mesh) == 1

    case.run(body)
    assert sorted(case.noticed) == list(numbers)
    assert max(case.noticed.values()) < 10 * STEP_S + FLOOR_S + 3 * TICK_S


def test_one_that_waits_for_longer_than_the_others_is_of_the_same_silence() -> None:
    case = Together()

    async def body(mesh: Watched) -> None:
        await case.ask(mesh, 1)
        case.bad.before_step = lambda step: False
        # The first answer of a session is given the ceiling.
        first = asyncio.create_task(case.ask(mesh, 2), name="ask 2")
        await asyncio.sleep(10 * FLOOR_S)
        second = asyncio.create_task(case.ask(mesh, 3), name="ask 3")
        await asyncio.gather(first, second)
        assert case.failures(mesh) == 1

    case.run(body)
    assert case.noticed[3] - case.noticed[2] > 9 * FLOOR_S


def test_another_silence_is_counted_again_and_given_more_time() -> None:
    case, waited = Together(), []

    async def body(mesh: Watched) -> None:
        loop = asyncio.get_running_loop()
        for number in (1, 2):
            mesh.engine.oversight.reputations._records.clear()  # so that it is picked again
            case.bad.before_step = lambda step: True
            ask = asyncio.create_task(case.ask(mesh, number), name=f"ask {number}")
            await asyncio.sleep(10 * STEP_S)
            case.bad.before_step, silent_at = lambda step: False, loop.time()
            await ask
            waited.append(case.noticed[number] - silent_at)
            assert case.failures(mesh) == 1

    case.run(body)
    assert waited[0] < FLOOR_S + 2 * TICK_S < 2 * FLOOR_S < waited[1] < 2 * FLOOR_S + 2 * TICK_S


@pytest.mark.parametrize("turn_s", [0.2, 0.6])
def test_a_silent_hop_is_noticed_by_an_asker_that_is_never_idle(turn_s: float) -> None:
    case = Watching(spare=True)
    case.shards[1].before_step = lambda step: False

    async def busy() -> None:
        while True:
            pass_time(turn_s)
            await asyncio.sleep(0)

    async def body(mesh: Watched) -> None:
        work = asyncio.create_task(busy(), name="busy")
        try:
            async with asyncio.timeout(20 * CEILING_S):
                await case.ask(mesh)
        finally:
            work.cancel()

    run_virtually(lambda: case.run(body))
    (noticed,) = case.noticed()
    assert CEILING_S <= noticed[0] < 2 * CEILING_S


def test_answers_that_lay_unread_while_we_were_busy_do_not_make_a_hop_slow() -> None:
    case = Together()

    async def body(mesh: Watched) -> None:
        async def pausing() -> None:
            for _ in range(20):
                await asyncio.sleep(5.3 * STEP_S)
                pass_time(40.0)

        asks = [asyncio.create_task(case.ask(mesh, n), name=f"ask {n}") for n in range(1, 6)]
        await asyncio.gather(*asks, pausing())

    case.run(body)
    assert case.noticed == {}


@pytest.mark.parametrize("spare", [True, False])
def test_who_waits_while_a_long_prompt_of_another_is_read_waits(spare: bool) -> None:
    case, long = Watching(spare=spare, home=not spare), list(range(1, 500))
    loaded = case.shards[1]

    taken, free_at, answers = deque[int](), [0.0], dict[int, list[int]]()

    def take(step: Step) -> bool:
        taken.append(step.tensor.shape[1])
        return True

    def in_turn(link: MemoryLink, result: Result) -> None:
        loop = asyncio.get_running_loop()
        free_at[0] = max(free_at[0], loop.time()) + (
            2.0 if taken.popleft() > len(PROMPT) else STEP_S
        )
        loop.call_at(free_at[0], lambda: None if link.is_closed else link.send(result))

    loaded.before_step, loaded.reply = take, in_turn

    async def body(mesh: Watched) -> None:
        async def read(number: int) -> None:
            answers[number] = tokens_of(
                await mesh.ask(3, prompt=[number, *long], name=f"r{number}")
            )

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(case.ask(mesh, 3 * COUNT))
            for number in range(3):
                await asyncio.sleep(30 * STEP_S)
                tasks.create_task(read(number))

    run_virtually(lambda: case.run(body))
    assert case.noticed() == []
    assert case.tokens() == expected_tokens(PROMPT, 3 * COUNT)
    assert answers == {n: expected_tokens([n, *long], 3) for n in range(3)}


def test_one_that_is_never_answered_while_others_are_does_not_wait_for_ever() -> None:
    case, forgotten = Together(), [0]

    def passes_over(step: Step) -> bool:
        forgotten[0] = forgotten[0] or step.session
        return step.session != forgotten[0]

    async def body(mesh: Watched) -> None:
        await case.ask(mesh, 1)
        case.bad.before_step = passes_over
        async with asyncio.timeout(20 * CEILING_S), asyncio.TaskGroup() as tasks:
            first = tasks.create_task(case.ask(mesh, 2))
            await asyncio.sleep(STEP_S / 2)
            number = 2
            while not first.done():
                number += 1
                await case.ask(mesh, number)

    case.run(body)
    assert case.noticed.keys() == {2}
    assert 10 * CEILING_S <= case.noticed[2] < 11 * CEILING_S
