"""Spot checks are few, and give back at once what they took on another host."""

from __future__ import annotations

import asyncio

from mesh.pipeline.watch.spot_checks import MAX_RUNNING
from tests.health.watched import PROMPT, halves, tokens_of, watched
from tests.pipeline.toy_mesh import ToyNetwork, expected_tokens, toy_request
from tests.simulation.virtual_loop import run_virtually


def test_few_checks_run_at_once_however_many_generations_do() -> None:
    async def main() -> None:
        network, (shard, judge) = halves("a", "b")
        judge.before_step = lambda step: False
        with watched(network, probability=1.0) as mesh:
            names = [f"r{number}" for number in range(MAX_RUNNING + 3)]
            asked = await asyncio.gather(*(mesh.ask(8, name=name) for name in names))
            assert [tokens_of(frames) for frames in asked] == [expected_tokens(PROMPT, 8)] * len(
                names
            )
            assert len(judge.sessions) == MAX_RUNNING
            judge.before_step = lambda step: True
            await mesh.idle()
            await mesh.ask(8, name="later")
            await mesh.idle()
            assert mesh.checks(shard)["agreed"] >= 1, "there is room for checks again"
            await mesh.engine.close()

    run_virtually(main)


def test_a_check_that_is_ended_while_its_session_opens_leaves_its_stream_to_a_generation() -> None:
    async def main() -> None:
        network = ToyNetwork()
        network.add("0-3", name="front")
        one, other = (network.add("4-7", streams=1, name=name) for name in ("a", "b"))
        with watched(network, probability=1e-12) as mesh:
            other.opens_after_s = 1.0
            first = mesh.engine.chat(toy_request(PROMPT, 30, "first"))
            begun = [await anext(first) for _ in range(6)]
            assert (one.open_streams(), other.open_streams()) == (1, 1)
            assert not other.steps, "its check has not begun"
            second = await mesh.ask(30, name="second")
            assert tokens_of(second) == expected_tokens(PROMPT, 30)
            rest = [frame async for frame in first]
            assert tokens_of(begun + rest) == expected_tokens(PROMPT, 30)
            await mesh.engine.close()

    run_virtually(main)
