"""Answers as long as the context, reserved as they grow; and what happens where room ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from math import inf

import pytest

from mesh.clock import SystemClock
from mesh.errors import CacheFull
from mesh.pipeline.commands import GenerationFrame
from mesh.pipeline.history import CHUNK_ROWS
from mesh.pipeline.terms import FIRST_ANSWER
from mesh.pipeline.watch.oversight import Oversight
from mesh.routing.cover import key_of
from mesh.types import (
    Done,
    GenerationRequest,
    SamplingParams,
    ShardFailover,
    ShardStatus,
    StreamFrame,
)
from tests.health.watched import tokens_of
from tests.pipeline.test_commands import passed_on
from tests.pipeline.toy_mesh import (
    MODEL,
    ToyNetwork,
    expected_tokens,
    toy_orchestrator,
    toy_request,
)

PROMPT = [5, 11, 23, 42, 8, 61]
UNLIMITED = GenerationRequest(
    "r", MODEL, prompt_ids=tuple(PROMPT), sampling=SamplingParams(ignore_eos=True)
)


async def test_an_answer_without_a_limit_goes_to_the_end_of_the_context() -> None:
    network = ToyNetwork()
    shard = network.add("0-7")
    orchestrator, sessions = toy_orchestrator(network, context=1100)
    frames = [frame async for frame in orchestrator.chat(UNLIMITED)]
    assert tokens_of(frames) == expected_tokens(PROMPT, 1094)
    done = frames[-1]
    assert isinstance(done, Done)
    assert (done.finish_reason, done.completion_tokens, done.note) == ("length", 1094, "")
    assert shard.reserved == [len(PROMPT) + FIRST_ANSWER], "the rest is given as it grows"
    await sessions.close()


@pytest.mark.parametrize(("context", "reserved"), [(4096, 6 + 40 + FIRST_ANSWER), (150, 150)])
async def test_who_replaces_a_hop_is_asked_for_room_to_go_on_within_the_context(
    context: int, reserved: int
) -> None:
    network = ToyNetwork()
    lost, heir = network.add("0-7"), network.add("0-7", name="z")
    orchestrator, sessions = toy_orchestrator(network, context=context)
    answer = orchestrator.chat(UNLIMITED)
    frames: list[StreamFrame] = []
    async for frame in answer:
        frames.append(frame)
        if len(frames) == 40:
            lost.kill()
        if len(frames) == 50:
            break
    await answer.aclose()
    assert tokens_of(frames) == expected_tokens(PROMPT, len(tokens_of(frames)))
    assert heir.reserved == [reserved]
    await sessions.close()


async def test_an_answer_that_rests_near_the_end_of_the_context_asks_for_no_more_than_it() -> None:
    network = ToyNetwork()
    shard = network.add("0-7")
    shard.kv_tokens = 150
    orchestrator, sessions = toy_orchestrator(network, context=150)
    answer = orchestrator.chat(UNLIMITED)
    frames = [await anext(answer) for _ in range(60)]
    (session,) = sessions.known()
    for hop in session.route.hops:
        hop.rest(inf)
    frames += [frame async for frame in answer]
    assert tokens_of(frames) == expected_tokens(PROMPT, 144)
    assert shard.reserved == [6 + FIRST_ANSWER, 150]
    await sessions.close()


async def test_an_answer_without_room_goes_on_where_there_is_some_and_nobody_is_blamed() -> None:
    network = ToyNetwork()
    shards = [network.add("0-3"), network.add("4-7")]
    heir = network.add("4-7", name="z")
    shards[1].room = 20
    oversight = Oversight(SystemClock(), ceiling_s=30.0)
    orchestrator, sessions = toy_orchestrator(network, oversight)
    frames = [frame async for frame in orchestrator.chat(toy_request(PROMPT, 30))]
    assert tokens_of(frames) == expected_tokens(PROMPT, 30)
    kinds = [frame.type for frame in frames if frame.type != "token_delta"]
    assert kinds == ["shard_status", "shard_failover", "done"]
    said = next(frame for frame in frames if isinstance(frame, ShardStatus))
    assert said.status == "full"
    assert heir.steps
    assert oversight.reputations.penalty(key_of(shards[1].descriptor)) == 0
    await sessions.close()


async def test_an_answer_that_nobody_has_room_for_ends_there_and_says_so() -> None:
    network = ToyNetwork()
    shards = [network.add("0-3"), network.add("4-7")]
    shards[1].room = 20
    orchestrator, sessions = toy_orchestrator(network)
    frames = [frame async for frame in orchestrator.chat(toy_request(PROMPT, 30))]
    # A token is sampled from the row of the one before it, so the last was never fed.
    assert tokens_of(frames) == expected_tokens(PROMPT, 20 - len(PROMPT) + 1)
    done = frames[-1]
    assert isinstance(done, Done)
    assert done.finish_reason == "length"
    assert "node-1001 has no room" in done.note
    assert passed_on(GenerationFrame.of("r", done)) == GenerationFrame.of("r", done)
    assert not sessions.known(), "what it held is given back to whoever waits for room"
    await sessions.close()


async def test_an_answer_that_becomes_a_long_text_gets_as_many_tokens_as_it_was_to_get() -> None:
    """All that the model holds are wanted, some of which it has by then."""
    network = ToyNetwork()
    network.add("0-7")
    room, short = len(PROMPT) + 30, len(PROMPT) + 10
    orchestrator, sessions = toy_orchestrator(network, context=room, short=short)
    frames = [frame async for frame in orchestrator.chat(toy_request(PROMPT, 30))]
    assert tokens_of(frames) == expected_tokens(PROMPT, 30)
    done = frames[-1]
    assert isinstance(done, Done)
    assert not done.note
    await sessions.close()


async def test_an_answer_goes_on_once_there_is_room_for_more_of_it_but_not_for_another() -> None:
    network = ToyNetwork()
    shard = network.add("0-7")
    shard.room = 20
    orchestrator, sessions = toy_orchestrator(network)
    frames: list[StreamFrame] = []
    async for frame in orchestrator.chat(toy_request(PROMPT, 30)):
        frames.append(frame)
        shard.kv_tokens = 0
        if isinstance(frame, ShardStatus):
            asyncio.get_running_loop().call_later(0.015, setattr, shard, "room", None)
    assert tokens_of(frames) == expected_tokens(PROMPT, 30)
    assert not any(isinstance(frame, ShardFailover) for frame in frames), "it is the same one"
    done = frames[-1]
    assert isinstance(done, Done)
    assert not done.note
    assert done.failovers == 1, "however often it had none"
    await sessions.close()


async def test_a_hop_without_room_that_ends_meanwhile_is_replaced_in_the_same_failover() -> None:
    network = ToyNetwork()
    shard = network.add("0-7")
    shard.room = 20
    orchestrator, sessions = toy_orchestrator(network)
    frames: list[StreamFrame] = []
    async for frame in orchestrator.chat(toy_request(PROMPT, 30)):
        frames.append(frame)
        if isinstance(frame, ShardStatus):
            shard.is_advertised = False  # but it is back before others are looked for again
            shard.kill()
            shard.alive, shard.room = True, None
            asyncio.get_running_loop().call_later(0.001, setattr, shard, "is_advertised", True)
    assert tokens_of(frames) == expected_tokens(PROMPT, 30)
    done = frames[-1]
    assert isinstance(done, Done)
    assert done.failovers == 1
    await sessions.close()


async def test_a_replay_without_room_goes_on_from_what_the_new_hop_has_of_it() -> None:
    """Which is less than the next hop has seen of the lost one."""
    prompt = [7 * at % 90 + 1 for at in range(CHUNK_ROWS + 12)]
    network = ToyNetwork()
    lost, heir = network.add("0-7"), network.add("0-7", name="z")
    heir.room = CHUNK_ROWS
    orchestrator, sessions = toy_orchestrator(network)
    frames: list[StreamFrame] = []
    async with asyncio.timeout(5):
        async for frame in orchestrator.chat(toy_request(prompt, 8)):
            frames.append(frame)
            if len(tokens_of(frames)) == 3:
                lost.kill()
            if isinstance(frame, ShardStatus) and frame.status == "full":
                heir.kv_tokens = 0
                asyncio.get_running_loop().call_later(0.015, setattr, heir, "room", None)
    assert tokens_of(frames) == expected_tokens(prompt, 8)
    done = frames[-1]
    assert isinstance(done, Done)
    assert done.failovers == 2
    await sessions.close()


async def test_an_answer_that_nobody_has_room_for_goes_on_at_home() -> None:
    network = ToyNetwork()
    home = network.home()
    network.add("0-7").room = 20
    orchestrator, sessions = toy_orchestrator(network, home=home)
    frames = [frame async for frame in orchestrator.chat(toy_request(PROMPT, 30))]
    assert tokens_of(frames) == expected_tokens(PROMPT, 30)
    assert isinstance(frames[-1], Done)
    assert frames[-1].fallback
    await sessions.close()


async def test_a_prompt_that_nobody_has_room_for_is_refused() -> None:
    network = ToyNetwork()
    network.add("0-7").room = 4
    orchestrator, sessions = toy_orchestrator(network)
    with pytest.raises(CacheFull, match="node-1000 has no room"):
        _ = [frame async for frame in orchestrator.chat(toy_request(PROMPT, 30))]
    assert not sessions.known()
    await sessions.close()


async def test_the_text_that_a_stop_string_held_back_is_shown_when_the_room_ends() -> None:
    network = ToyNetwork()
    network.add("0-7").room = 20
    orchestrator, sessions = toy_orchestrator(network)
    tokens = expected_tokens(PROMPT, 15)
    request = toy_request(PROMPT, 30)
    # A beginning of this is held back until it is known not to be it.
    stops = replace(request.sampling, stop=(f"{tokens[-1]} never",))
    frames = [frame async for frame in orchestrator.chat(replace(request, sampling=stops))]
    shown = "".join(frame.text for frame in frames if frame.type == "token_delta")
    assert shown == "".join(f"{token} " for token in tokens)
    await sessions.close()
