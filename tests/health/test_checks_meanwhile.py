"""A check waits for its judge; meanwhile the session it is about goes back, ends, or goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from mesh.pipeline.route import Route
from mesh.pipeline.terms import SessionTerms
from mesh.pipeline.watch.evidence import Record
from mesh.pipeline.watch.reputation import LIED
from mesh.types import WireDtype
from tests.health.watched import (
    ASKER,
    PROMPT,
    Watched,
    answers,
    halves,
    lie,
    tokens_of,
    told,
    watched,
)
from tests.pipeline.toy_mesh import (
    MODEL,
    TOTAL_LAYERS,
    WEIGHTS,
    ToyNetwork,
    ToyShard,
    encode,
    expected_tokens,
)
from tests.simulation.virtual_loop import run_virtually

LOAD_S = 5.0


def judged_by(*judges: str, body: Callable[[Watched, list[ToyShard]], Awaitable[None]]) -> None:
    """Virtual time, every step of `a` checked by hosts that take a while to open a session."""

    async def main() -> None:
        network, shards = halves("a", *judges)
        for judge in shards[1:]:
            judge.opens_after_s, judge.is_loading = LOAD_S, True
        with watched(network, probability=1.0, allow_self_as_first=True) as mesh:
            await body(mesh, shards)
            await mesh.engine.close()

    run_virtually(main)


@asynccontextmanager
async def live(mesh: Watched) -> AsyncIterator[Route]:
    """A session that ends with the block."""
    terms = SessionTerms(MODEL, WEIGHTS, 64, WireDtype.FP32)
    session = await mesh.engine.sessions.open_fresh(terms, TOTAL_LAYERS)
    yield session.route
    mesh.engine.sessions.release(session, keep=False)


async def pass_through(route: Route, first: int, count: int, value: int) -> None:
    route.feed(encode([[value + row, 2, 3, 4] for row in range(count)]))
    await route.output(first + count)


@pytest.mark.parametrize("judges", [(ASKER,), ("b", "c")], ids=["home", "others"])
def test_a_follow_up_that_takes_the_session_back_accuses_nobody(judges: tuple[str, ...]) -> None:
    async def body(mesh: Watched, shards: list[ToyShard]) -> None:
        answer = tokens_of(await mesh.ask(6))
        assert mesh.engine.spot_checks.running, "the check waits for its judge"
        edited = [*PROMPT, *answer[:3], 90, 91]
        frames = await mesh.ask(6, prompt=edited, name="r2")
        assert tokens_of(frames) == expected_tokens(edited, 6)
        await mesh.idle()
        assert told(mesh) == []
        assert [mesh.standing(shard) for shard in shards] == [0] * len(shards)
        assert set(mesh.checks(shards[0])) == {"agreed"}

    judged_by(*judges, body=body)


def test_a_cut_while_the_judges_session_is_resumed_makes_it_go_back_too() -> None:
    async def body(mesh: Watched, shards: list[ToyShard]) -> None:
        async with live(mesh) as route:
            await pass_through(route, 0, 6, value=10)
            await mesh.idle()
            await pass_through(route, 6, 1, value=20)
            assert mesh.engine.spot_checks.running
            route.cut(2)
            await pass_through(route, 2, 8, value=40)
            await mesh.idle()
            assert told(mesh) == []
            assert mesh.checks(shards[0]) == {"agreed": 2}

    judged_by("b", body=body)


@pytest.mark.parametrize("lies", [False, True], ids=["honest", "lying"])
def test_a_check_of_one_text_is_finished_while_the_session_is_about_the_next(lies: bool) -> None:
    async def body(mesh: Watched, shards: list[ToyShard]) -> None:
        if lies:
            shards[0].answer = lie
        async with live(mesh) as route:
            await pass_through(route, 0, 6, value=10)
            route.cut(0)
            shards[0].answer = lambda step, computed: computed
            await pass_through(route, 0, 8, value=40)
            await mesh.idle()
            assert mesh.checks(shards[0]) == {"lied" if lies else "agreed": 1}
            assert [event["type"] for event in told(mesh)] == ["shard_lied"] * lies
            assert not shards[1].sessions
            if not lies:
                route.cut(0)
                await pass_through(route, 0, 6, value=20)
                await mesh.idle()
                assert mesh.checks(shards[0]) == {"agreed": 2}

    judged_by(ASKER, body=body)


def test_an_answer_to_what_was_taken_back_accuses_nobody() -> None:
    async def main() -> None:
        network = ToyNetwork()
        front, judge = (network.add("0-3", name=name) for name in ("front", "judge"))
        network.add("4-7", name="back")
        with watched(network, probability=1.0) as mesh:
            async with live(mesh) as route:
                front.delay_s = 1.0
                route.feed(encode([[10 + row, 2, 3, 4] for row in range(6)]))
                await asyncio.sleep(0.5)
                route.cut(0)
                front.delay_s = 10.0
                await pass_through(route, 0, 6, value=40)
                await mesh.idle()
                assert told(mesh) == []
                assert mesh.checks(front) == {"agreed": 1}
                assert judge.steps
            await mesh.engine.close()

    run_virtually(main)


def test_a_third_one_judges_by_what_was_asked_before_a_cut() -> None:
    async def body(mesh: Watched, shards: list[ToyShard]) -> None:
        liar, *judges = shards
        liar.answer = lie
        async with live(mesh) as route:
            await pass_through(route, 0, 6, value=10)
            await asyncio.sleep(1.5 * LOAD_S)
            assert sorted(bool(judge.steps) for judge in judges) == [False, True]
            route.cut(2)
            liar.answer = lambda step, computed: computed
            await pass_through(route, 2, 8, value=40)
            await mesh.idle()
            assert [event["type"] for event in told(mesh)] == ["shard_lied"]
            assert mesh.standing(liar) == LIED

    judged_by("b", "c", body=body)


def test_a_check_that_is_ended_before_it_began_leaves_nothing_behind() -> None:
    async def main() -> None:
        network, (shard, judge) = halves("a", "b")
        with watched(network, probability=1.0) as mesh:
            spot_checks, ended = mesh.engine.spot_checks, 0
            start = spot_checks._start

            def start_and_end(record: Record) -> None:
                nonlocal ended
                start(record)
                if judge.sessions and not ended:  # the second check of a session has begun
                    ended += sum(task.cancel() for task in spot_checks._tasks)

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(spot_checks, "_start", start_and_end)
                frames = await answers(mesh, 12)
            assert tokens_of(frames) == expected_tokens(PROMPT, 12)
            await mesh.idle()
            assert ended == 1
            assert mesh.checks(shard)["agreed"] > 1, "it was checked again after that"
            assert not judge.sessions
            await mesh.engine.close()

    run_virtually(main)
