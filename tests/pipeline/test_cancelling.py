"""A request that is given up, whatever it waits for just then, leaves nothing on any hop."""

from __future__ import annotations

import asyncio

import pytest

from mesh.pipeline.sessions import Sessions
from mesh.wire.messages import Step
from tests.health.watched import PROMPT, tokens_of
from tests.pipeline.toy_mesh import ToyNetwork, expected_tokens, toy_orchestrator, toy_request
from tests.simulation.virtual_loop import run_virtually

COUNT = 6
FOLLOW_UP = [*PROMPT, *expected_tokens(PROMPT, COUNT), 7]


def network_that_loses_a_hop(at_position: int) -> ToyNetwork:
    """Two hops and spares; the second is gone when it is to compute that position."""
    network = ToyNetwork()
    network.add("0-3", name="a")
    lost = network.add("4-7", name="b")
    network.add("4-5", name="z1")
    network.add("6-7", name="z2")

    def die(step: Step) -> bool:
        if step.position == at_position:
            lost.kill()
        return True

    lost.before_step = die
    return network


def held(network: ToyNetwork) -> list[int]:
    """How many sessions each hop has, and how many streams are taken in all."""
    shards = network.shards.values()
    return [len(shard.sessions) for shard in shards] + [sum(s.open_streams() for s in shards)]


def known(network: ToyNetwork, sessions: Sessions) -> list[int]:
    """What `held` has to be when nothing runs: what the asker kept, all of it parked."""
    hosts = [s.hop.shard.host for kept in sessions.known() for s in kept.route.hops]
    return [*(hosts.count(s.descriptor.host) for s in network.shards.values()), 0]


async def give_up_after(turns: int, *, kept: bool) -> bool:
    """Ask, and cancel that after so many turns of the loop. Whether it was in time."""
    network = network_that_loses_a_hop(len(FOLLOW_UP if kept else PROMPT) + 2)
    orchestrator, sessions = toy_orchestrator(network)

    async def ask(prompt: list[int], name: str) -> list[int]:
        return tokens_of([f async for f in orchestrator.chat(toy_request(prompt, COUNT, name))])

    if kept:
        await ask(PROMPT, "before")
        await asyncio.sleep(1.0)
    prompt = FOLLOW_UP if kept else PROMPT
    asking = asyncio.create_task(ask(prompt, "given up"))
    for _ in range(turns):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    await asyncio.sleep(1.0)
    assert not sessions.live
    assert held(network) == known(network, sessions)
    if not asking.cancelled():
        assert asking.result() == expected_tokens(prompt, COUNT)
        assert [s.descriptor.node_name for s in network.shards.values() if s.sessions] == [
            "a",
            "z1",
            "z2",
        ], "a hop was replaced on the way"
    await sessions.close()
    return asking.cancelled()


@pytest.mark.parametrize("kept", [False, True], ids=["fresh", "follow-up"])
def test_a_request_given_up_at_any_turn_leaves_nothing_on_its_hops(kept: bool) -> None:
    turns = 0
    while run_virtually(lambda: give_up_after(turns, kept=kept)):  # noqa: B023 - used at once
        turns += 1
    assert turns > 30, "a prefill, several steps and a replacement take more turns than that"
