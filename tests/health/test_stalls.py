"""Hops that stop making progress, each in its own way, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from mesh.pipeline.hop import Patience
from mesh.pipeline.watch.latency import FLOOR_S
from mesh.types import Done, ShardStatus, StreamFrame, TokenDelta
from mesh.wire.messages import Result
from tests.health.watched import PROMPT, Watched, tokens_of, watched
from tests.pipeline.toy_mesh import ToyNetwork, ToyShard, expected_tokens, toy_request
from tests.simulation.virtual_loop import pass_time, run_virtually
from tests.wire.memory import MemoryLink

CEILING_S = 30.0
STEP_S = 0.02
COUNT = 40
BAD_FROM = 20

Pace = Callable[[int], float | None]
"""Seconds that the n-th answer of a shard takes; None: it never comes."""


def paced(shard: ToyShard, pace: Pace) -> None:
    """Have the shard answer at that pace, one step after the other."""
    loop, count, free_at = asyncio.get_running_loop(), [0], [0.0]

    def leave(link: MemoryLink, result: Result) -> None:
        if not link.is_closed:
            link.send(result)

    def reply(link: MemoryLink, result: Result) -> None:
        count[0] += 1
        wait = pace(count[0])
        if wait is not None:
            free_at[0] = max(free_at[0], loop.time()) + wait
            loop.call_at(free_at[0], leave, link, result)

    shard.reply = reply


def stops(number: int) -> float | None:
    """A process that was stopped, or a connection that only one end believes in: silence."""
    return STEP_S if number < BAD_FROM else None


def crawls(number: int) -> float | None:
    """Still answers, one chunk a second."""
    return STEP_S if number < BAD_FROM else 1.0


def lags(number: int) -> float | None:
    """Slow, but each answer just within what a single step may take."""
    return STEP_S if number < BAD_FROM else 0.8


class Watching:
    """A mesh of two hops, perhaps a spare or a home, with the stall watch running."""

    def __init__(self, *, spare: bool, home: bool = False) -> None:
        self.network = ToyNetwork()
        self.home = self.network.home() if home else None
        self.shards = [self.network.add(span) for span in ("0-3", "4-7")]
        if spare:
            self.network.add("4-7", name="z-spare")
        self.frames: list[tuple[float, StreamFrame]] = []

    async def run(self, body: Callable[[Watched], Awaitable[None]]) -> None:
        home = self.home is not None
        with watched(self.network, ceiling_s=CEILING_S, fallback_to_local=home) as mesh:
            mesh.home = self.home
            async with mesh.watching_stalls():
                await body(mesh)

    async def ask(self, mesh: Watched, count: int = COUNT) -> None:
        loop = asyncio.get_running_loop()
        async for frame in mesh.engine.chat(toy_request(PROMPT, count)):
            self.frames.append((loop.time(), frame))

    def noticed(self) -> list[tuple[float, str]]:
        """When hops were given up, and why."""
        return [(at, f.reason) for at, f in self.frames if isinstance(f, ShardStatus)]

    def started_at(self) -> float:
        """When the first token came."""
        return next(at for at, frame in self.frames if isinstance(frame, TokenDelta))

    def done(self) -> Done:
        """The last frame."""
        last = self.frames[-1][1]
        assert isinstance(last, Done)
        return last

    def tokens(self) -> list[int]:
        return tokens_of([frame for _, frame in self.frames])


def ask_with(pace: Pace, *, spare: bool = True, home: bool = False) -> Watching:
    """One request over two hops of which the second one keeps that pace."""

    async def main() -> Watching:
        case = Watching(spare=spare, home=home)
        for shard in case.network.shards.values():
            paced(shard, lambda number: STEP_S)
        paced(case.shards[1], pace)
        await case.run(case.ask)
        return case

    return run_virtually(main)


@pytest.mark.parametrize("pace", [stops, crawls, lags])
def test_a_hop_without_progress_is_replaced_within_seconds(pace: Pace) -> None:
    case = ask_with(pace)
    (noticed,) = case.noticed()
    bad_at = STEP_S * 2 * BAD_FROM  # two hops in a row
    assert noticed[0] - bad_at < 4 * FLOOR_S + 1
    assert case.tokens() == expected_tokens(PROMPT, COUNT)


def test_a_silent_hop_is_given_the_ceiling_before_it_ever_answered() -> None:
    case = ask_with(lambda number: None)
    (noticed,) = case.noticed()
    assert CEILING_S <= noticed[0] < CEILING_S + 1
    assert case.tokens() == expected_tokens(PROMPT, COUNT)


def ask_one_that_opens_late(seconds: float, *, loading: bool, spare: bool = True) -> Watching:
    """One request, whose second hop takes so long to open a session."""

    async def main() -> Watching:
        case = Watching(spare=spare)
        for shard in case.network.shards.values():
            paced(shard, lambda number: STEP_S)
        case.shards[1].opens_after_s, case.shards[1].is_loading = seconds, loading
        await case.run(case.ask)
        return case

    return run_virtually(main)


@pytest.mark.parametrize("spare", [True, False])
def test_weights_that_load_on_demand_are_waited_for(spare: bool) -> None:
    case = ask_one_that_opens_late(120.0, loading=True, spare=spare)
    assert case.started_at() >= 120.0
    assert case.tokens() == expected_tokens(PROMPT, COUNT)


def test_weights_that_never_come_are_waited_for_no_longer_than_the_load_limit() -> None:
    case = ask_one_that_opens_late(1000.0, loading=True)
    assert Patience().load_s <= case.started_at() < Patience().load_s + 1
    assert case.tokens() == expected_tokens(PROMPT, COUNT)


def test_a_hop_that_neither_opens_nor_says_why_is_given_up_soon() -> None:
    case = ask_one_that_opens_late(120.0, loading=False)
    assert Patience().answer_s <= case.started_at() < Patience().answer_s + 1
    assert case.tokens() == expected_tokens(PROMPT, COUNT)


def test_a_stand_in_that_has_to_load_its_weights_is_waited_for() -> None:
    async def main() -> Watching:
        case = Watching(spare=True)
        *_, spare = case.network.shards.values()
        for shard in case.network.shards.values():
            paced(shard, lambda number: STEP_S)
        paced(case.shards[1], stops)
        spare.opens_after_s, spare.is_loading = 60.0, True
        await case.run(case.ask)
        return case

    case = run_virtually(main)
    assert len(case.noticed()) == 1
    assert case.tokens() == expected_tokens(PROMPT, COUNT)


def test_a_first_answer_may_take_as_long_as_the_ceiling() -> None:
    case = ask_with(lambda number: 25.0 if number == 1 else STEP_S)
    assert case.noticed() == []
    assert case.tokens() == expected_tokens(PROMPT, COUNT)


def test_a_first_answer_after_others_may_too() -> None:
    async def main() -> Watching:
        case = Watching(spare=True)
        for shard in case.network.shards.values():
            paced(shard, lambda number: STEP_S)
        paced(case.shards[1], lambda number: 25.0 if number == COUNT + 1 else STEP_S)

        async def twice(mesh: Watched) -> None:
            await case.ask(mesh)
            case.frames.clear()
            async for frame in mesh.engine.chat(toy_request([9], COUNT)):
                case.frames.append((0.0, frame))

        await case.run(twice)
        return case

    case = run_virtually(main)
    assert case.noticed() == []
    assert case.tokens() == expected_tokens([9], COUNT)


@pytest.mark.parametrize("pace", [stops, crawls, lags])
def test_a_hop_that_only_the_local_model_can_replace_is_left_as_soon(pace: Pace) -> None:
    case = ask_with(pace, spare=False, home=True)
    (noticed,) = case.noticed()
    bad_at = STEP_S * 2 * BAD_FROM
    assert noticed[0] - bad_at < 4 * FLOOR_S + 1
    assert case.done().fallback
    assert case.tokens() == expected_tokens(PROMPT, COUNT)


@pytest.mark.parametrize("pace", [crawls, lags])
def test_a_slow_hop_that_nobody_could_replace_is_kept(pace: Pace) -> None:
    case = ask_with(pace, spare=False)
    assert case.noticed() == []
    assert case.tokens() == expected_tokens(PROMPT, COUNT)


def test_a_silent_hop_that_nobody_could_replace_is_given_the_ceiling_and_asked_again() -> None:
    case = ask_with(lambda number: None if number == BAD_FROM else STEP_S, spare=False)
    ((noticed_at, _),) = case.noticed()
    bad_at = STEP_S * 2 * BAD_FROM
    assert CEILING_S <= noticed_at - bad_at < CEILING_S + 1
    assert case.tokens() == expected_tokens(PROMPT, COUNT)


def test_a_model_that_takes_seconds_per_step_is_left_alone() -> None:
    case = ask_with(lambda number: 4.0 + (number % 5) * 0.5)
    assert case.noticed() == []
    assert case.tokens() == expected_tokens(PROMPT, COUNT)


def test_a_pause_of_our_own_is_not_held_against_the_hops() -> None:
    case: list[Watching] = []

    async def main() -> None:
        watching = Watching(spare=True)
        case.append(watching)
        for shard in watching.network.shards.values():
            paced(shard, lambda number: STEP_S)

        async def pausing(mesh: Watched) -> None:
            asyncio.get_running_loop().call_later(0.5, pass_time, 40.0)
            await watching.ask(mesh)

        await watching.run(pausing)

    run_virtually(main)
    assert case[0].noticed() == []
    assert case[0].tokens() == expected_tokens(PROMPT, COUNT)
