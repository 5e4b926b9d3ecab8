"""Opening a route: who refuses is left out, and who is only full is asked again for a moment."""

from __future__ import annotations

import asyncio

import pytest

from mesh.errors import ConnectFailed, NoRoute
from mesh.pipeline.claims import Claim, Claims
from mesh.pipeline.generation import PipelineOrchestrator
from mesh.pipeline.hop import HopSession
from mesh.pipeline.links import HopLink, HopLinks
from mesh.pipeline.room_line import WAIT_S
from mesh.pipeline.route import HopLost, open_sessions
from mesh.routing.cover import key_of
from mesh.types import Done, RouteHop
from mesh.wire.link import Link
from tests.pipeline.one_hop import hop_over
from tests.pipeline.test_hop_session import FullLink
from tests.pipeline.toy_mesh import ToyNetwork, expected_tokens, toy_orchestrator, toy_request
from tests.simulation.virtual_loop import run_virtually

PROMPT = [3, 1, 4, 1, 5]


async def answer_of(orchestrator: PipelineOrchestrator, name: str) -> Done:
    """The end of the answer to `PROMPT`."""
    async for frame in orchestrator.chat(toy_request(PROMPT, 4, name)):
        if isinstance(frame, Done):
            return frame
    raise AssertionError("no end")


async def tokens_of(orchestrator: PipelineOrchestrator, name: str) -> list[int]:
    """The whole answer to `PROMPT`."""
    return list((await answer_of(orchestrator, name)).token_ids)


@pytest.mark.parametrize("frees_after_s", [0.04, 1.0])
def test_a_route_waits_a_moment_for_room_where_every_shard_is_full(frees_after_s: float) -> None:
    async def main() -> None:
        network = ToyNetwork()
        shards = [network.add("0-7", streams=1, name=name) for name in ("a", "b")]
        orchestrator, sessions = toy_orchestrator(network)
        live = [orchestrator.chat(toy_request(PROMPT, 90, name)) for name in ("r1", "r2")]
        for stream in live:
            await anext(stream)
        waiting = asyncio.create_task(tokens_of(orchestrator, "r3"), name="waiting")
        await asyncio.sleep(frees_after_s)
        assert not waiting.done()
        await live[0].aclose()
        assert await waiting == expected_tokens(PROMPT, 4)
        await live[1].aclose()
        await sessions.close()
        await asyncio.sleep(0)  # what was said last arrives
        assert [shard.open_streams() for shard in shards] == [0, 0]

    run_virtually(main)


def test_what_stays_full_is_said_after_the_stated_time() -> None:
    async def main() -> None:
        network = ToyNetwork()
        network.add("0-7", streams=1, name="a")
        orchestrator, sessions = toy_orchestrator(network)
        live = orchestrator.chat(toy_request(PROMPT, 90, "r1"))
        await anext(live)
        began = asyncio.get_running_loop().time()
        with pytest.raises(NoRoute, match=r"a: full\."):
            await tokens_of(orchestrator, "r2")
        waited_s = asyncio.get_running_loop().time() - began  # of virtual time
        assert waited_s == pytest.approx(WAIT_S, abs=0.01)
        await live.aclose()
        await sessions.close()

    run_virtually(main)


@pytest.mark.parametrize("frees_after_s", [1.0, None])
def test_home_is_for_whoever_waited_for_room_in_vain(frees_after_s: float | None) -> None:
    async def main() -> None:
        network = ToyNetwork()
        network.add("0-7", streams=1, name="a")
        orchestrator, sessions = toy_orchestrator(network, home=network.home())
        live = orchestrator.chat(toy_request(PROMPT, 90, "r1"))
        await anext(live)
        began = asyncio.get_running_loop().time()
        waiting = asyncio.create_task(answer_of(orchestrator, "r2"), name="waiting")
        if frees_after_s is not None:
            await asyncio.sleep(frees_after_s)
            await live.aclose()
        done = await waiting
        assert list(done.token_ids) == expected_tokens(PROMPT, 4)
        assert done.fallback == (frees_after_s is None)
        waited_s = asyncio.get_running_loop().time() - began  # of virtual time
        assert waited_s == pytest.approx(frees_after_s or WAIT_S, abs=0.01)
        await live.aclose()
        await sessions.close()

    run_virtually(main)


async def test_a_host_that_is_not_there_is_not_taken_for_busy_afterwards() -> None:
    async def dial(*_: object) -> Link:
        raise ConnectFailed("nobody is there.", fix="")

    hop, _, _ = hop_over(FullLink)
    claims = Claims()

    def claim(hop: RouteHop) -> Claim:
        return claims.claim(key_of(hop.shard))

    def session_on(hop: RouteHop, link: HopLink, claimed: Claim) -> HopSession:
        raise AssertionError("there is no link")

    with pytest.raises(HopLost, match="nobody is there"):
        await open_sessions([hop], HopLinks(dial), claim, session_on)
    assert claims.depth(key_of(hop.shard)) == 0
