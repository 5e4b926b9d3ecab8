"""When the mesh cannot answer and the asker holds the model itself: exact tokens from home."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from mesh.errors import ContextTooLong, MeshError, NoRoute, WeightsMismatch
from mesh.pipeline.generation import PipelineOrchestrator
from mesh.pipeline.room_line import RoomLine
from mesh.pipeline.sessions import Sessions
from mesh.types import Done, GenerationRequest, PipelineAborted, Queued, TokenDelta
from mesh.wire.messages import Step
from tests.health.watched import tokens_of, watched
from tests.pipeline.toy_mesh import (
    ToyNetwork,
    ToyShard,
    expected_tokens,
    toy_orchestrator,
    toy_request,
)

PROMPT = [5, 11, 23, 42, 8, 61]
COUNT = 12
WAIT_S = 0.1
"""For room, before the answer comes from home."""
OTHER_WEIGHTS = "e" * 64


class House:
    """Two halves of the model at others' nodes, the whole of it at home."""

    def __init__(self) -> None:
        self.network = ToyNetwork()
        self.home = self.network.home()
        self.first = self.network.add("0-3")
        self.second = self.network.add("4-7", streams=1)

    def orchestrator(self) -> tuple[PipelineOrchestrator, Sessions]:
        return toy_orchestrator(self.network, home=self.home, line=RoomLine(WAIT_S))


async def ask(
    orchestrator: PipelineOrchestrator, request: GenerationRequest
) -> tuple[list[str], list[int], Done]:
    """The kinds of frames without the tokens; the tokens; the last frame."""
    frames = [frame async for frame in orchestrator.chat(request)]
    kinds = [frame.type for frame in frames if not isinstance(frame, TokenDelta)]
    assert isinstance(frames[-1], Done)
    return kinds, tokens_of(frames), frames[-1]


def at_step(shard: ToyShard, number: int, act: Callable[[], None]) -> None:
    """Do `act`, once, when the shard is about to compute that step."""

    def before(step: Step) -> bool:
        if step.step == number:
            shard.before_step = lambda step: True
            act()
        return shard.alive

    shard.before_step = before


def nobody(house: House) -> None:
    house.second.is_advertised = False


def full(house: House) -> None:
    house.second.descriptor = replace(house.second.descriptor, max_concurrent_streams=0)


def gone(house: House) -> None:
    house.second.kill()


def other_weights(house: House) -> None:
    house.second.descriptor = replace(house.second.descriptor, weights_sha256=OTHER_WEIGHTS)


def too_small(house: House) -> None:
    house.second.kv_tokens = len(PROMPT)


WHYS = [nobody, full, gone, other_weights, too_small]


@pytest.mark.parametrize("why", WHYS)
async def test_what_the_mesh_cannot_begin_is_answered_at_home(why: Callable[[House], None]) -> None:
    house = House()
    why(house)
    orchestrator, sessions = house.orchestrator()
    frames = [frame async for frame in orchestrator.chat(toy_request(PROMPT, COUNT))]
    frames = [frame for frame in frames if not isinstance(frame, Queued)]
    assert isinstance(frames[0], PipelineAborted)
    assert "local model" in frames[0].reason
    assert tokens_of(frames) == expected_tokens(PROMPT, COUNT)
    done = frames[-1]
    assert isinstance(done, Done)
    assert (done.fallback, done.failovers) == (True, 0)
    assert [hop.shard.node_name for hop in done.route] == ["home"]
    await sessions.close()


@pytest.mark.parametrize(
    ("why", "error", "said"),
    [
        (nobody, NoRoute, "4-7"),
        (full, NoRoute, "node-1002: full"),
        (gone, NoRoute, "node-1002"),
        (other_weights, WeightsMismatch, "node-1002"),
        (too_small, ContextTooLong, "18 of 6"),
    ],
)
async def test_without_leave_or_room_at_home_the_reason_is_named(
    why: Callable[[House], None], error: type[MeshError], said: str
) -> None:
    house = House()
    why(house)
    orchestrator, sessions = house.orchestrator()
    stays = replace(toy_request(PROMPT, COUNT), fallback_to_local=False)
    with pytest.raises(error, match=said):
        await ask(orchestrator, stays)
    assert not house.home.steps
    house.home.alive = False
    with pytest.raises(error, match=said):
        await ask(orchestrator, toy_request(PROMPT, COUNT))
    assert not sessions.live
    await sessions.close()


async def test_a_follow_up_goes_on_at_home_only_while_the_mesh_cannot() -> None:
    house = House()
    nobody(house)
    orchestrator, sessions = house.orchestrator()
    _, answer, _ = await ask(orchestrator, toy_request(PROMPT, COUNT))
    second = [*PROMPT, *answer, 33]
    kinds, more, done = await ask(orchestrator, toy_request(second, COUNT))
    assert kinds == ["done"]
    assert done.cached_tokens == len(PROMPT) + COUNT - 1
    assert done.fallback
    house.second.is_advertised = True
    third = [*second, *more, 44]
    _, tokens, done = await ask(orchestrator, toy_request(third, COUNT))
    assert tokens == expected_tokens(third, COUNT)
    assert not done.fallback
    assert [hop.shard.node_name for hop in done.route] == ["node-1001", "node-1002"]
    await sessions.close()


async def test_the_loss_that_the_settings_name_sends_it_home_though_others_are_left() -> None:
    house = House()
    spares = [house.network.add("4-7", name=name) for name in ("y", "z")]
    orchestrator, sessions = house.orchestrator()
    at_step(house.second, 4, house.second.kill)
    at_step(spares[0], 3, spares[0].kill)
    kinds, tokens, done = await ask(orchestrator, toy_request(PROMPT, COUNT))
    assert kinds == ["shard_status", "shard_failover", "shard_status", "pipeline_aborted", "done"]
    assert tokens == expected_tokens(PROMPT, COUNT)
    assert done.fallback
    assert not spares[1].steps, "the second loss is the one"
    await sessions.close()


async def test_a_home_that_could_not_is_not_tried_again() -> None:
    house = House()
    spares = [house.network.add("4-7", name=name) for name in ("x", "y", "z")]
    orchestrator, sessions = house.orchestrator()
    house.home.kv_tokens = 0

    def when_home_could() -> None:
        house.home.kv_tokens = 1 << 20
        spares[1].kill()

    at_step(house.second, 4, house.second.kill)
    at_step(spares[0], 3, spares[0].kill)
    at_step(spares[1], 3, when_home_could)
    kinds, tokens, done = await ask(orchestrator, toy_request(PROMPT, COUNT))
    assert kinds == [*["shard_status", "shard_failover"] * 3, "done"]
    assert tokens == expected_tokens(PROMPT, COUNT)
    assert (done.fallback, done.failovers) == (False, 3)
    await sessions.close()


async def test_a_lost_hop_whose_layers_are_left_with_other_weights_is_replaced_at_home() -> None:
    house = House()
    house.network.add("4-7", name="stranger", weights=OTHER_WEIGHTS)
    orchestrator, sessions = house.orchestrator()

    def vanish() -> None:
        house.second.is_advertised = False
        house.second.kill()

    at_step(house.second, 4, vanish)
    _, tokens, done = await ask(orchestrator, toy_request(PROMPT, COUNT))
    assert tokens == expected_tokens(PROMPT, COUNT)
    assert done.fallback
    await sessions.close()


async def test_a_lost_hop_is_waited_for_though_a_stranger_holds_its_layers() -> None:
    house = House()
    house.network.add("4-7", name="stranger", weights=OTHER_WEIGHTS)
    orchestrator, sessions = toy_orchestrator(house.network)
    second = house.second

    def come_back() -> None:
        second.alive = second.is_advertised = True

    def vanish() -> None:
        second.is_advertised = False
        second.kill()
        asyncio.get_running_loop().call_later(0.005, come_back)

    at_step(second, 4, vanish)
    kinds, tokens, _ = await ask(orchestrator, toy_request(PROMPT, COUNT))
    assert tokens == expected_tokens(PROMPT, COUNT)
    assert kinds == ["shard_status", "shard_failover", "done"]
    await sessions.close()


async def test_a_draining_hop_stays_where_only_a_stranger_could_take_over() -> None:
    house = House()
    house.network.add("4-7", name="stranger", weights=OTHER_WEIGHTS)
    orchestrator, sessions = toy_orchestrator(house.network)

    def retire() -> None:
        house.second.is_advertised = False
        house.second.drain()

    at_step(house.second, 4, retire)
    kinds, tokens, _ = await ask(orchestrator, toy_request(PROMPT, COUNT))
    assert tokens == expected_tokens(PROMPT, COUNT)
    assert kinds == ["done"]
    await sessions.close()


@pytest.mark.parametrize("says_too_long", [False, True], ids=["nobody", "who has no room, it says"])
async def test_home_answers_before_it_is_known_what_others_may_be_sent(says_too_long: bool) -> None:
    """The first request finds out the wire dtype from hops; there are none that serve."""
    network = ToyNetwork()
    home = network.home()
    if says_too_long:
        network.add("0-7").kv_tokens = 0
    with watched(network, fallback_to_local=True, activation_dtype="fp16") as mesh:
        mesh.home = home
        frames = await mesh.ask(COUNT, prompt=PROMPT)
        assert tokens_of(frames) == expected_tokens(PROMPT, COUNT)
        await mesh.engine.close()
