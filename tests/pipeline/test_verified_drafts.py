"""Drafts in a generation: nobody can tell from an answer whether any were sent.

In virtual time, where only hops take any: what is drafted follows from that alone.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import ParamSpec

import pytest

from mesh.pipeline.history import CHUNK_ROWS
from mesh.types import Done, Edit, GenerationRequest, SamplingParams, Site, StreamFrame, TokenDelta
from mesh.wire.messages import Step
from tests.health.watched import tokens_of
from tests.pipeline.toy_mesh import (
    NarrowEnds,
    RepeatingEnds,
    ToyEnds,
    ToyNetwork,
    ToyShard,
    expected_tokens,
    toy_orchestrator,
    toy_request,
)
from tests.simulation.virtual_loop import run_virtually

PROMPT = [5, 11, 23, 42, 8, 61]
COUNT = 90
HEADS = [NarrowEnds(), RepeatingEnds()]
EXPECTED = {head: expected_tokens(PROMPT, COUNT, head) for head in HEADS}
STEP_S = 0.002
"""What a hop takes for a step of any length: so a second row is worth its while."""


P = ParamSpec("P")


def virtually(test: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    """The test, run in virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_virtually(lambda: test(*args, **kwargs))

    return run


def network_of(*layers: str) -> tuple[ToyNetwork, list[ToyShard]]:
    network = ToyNetwork()
    shards = [network.add(span) for span in layers]
    for shard in shards:
        shard.delay_s, shard.computes_in_turn = STEP_S, True
    return network, shards


@pytest.fixture(params=HEADS, ids=["narrow", "repeating"])
def head(request: pytest.FixtureRequest) -> ToyEnds:
    """With the second one, drafts follow each other."""
    assert isinstance(request.param, ToyEnds)
    return request.param


async def asked(
    network: ToyNetwork, *requests: GenerationRequest, head: ToyEnds
) -> list[StreamFrame]:
    """The frames of the last of these requests, asked one after the other."""
    orchestrator, sessions = toy_orchestrator(network, ends=head)
    for request in requests:
        frames = [frame async for frame in orchestrator.chat(request)]
    assert not sessions.live
    await sessions.close()
    return frames


def deltas(frames: list[StreamFrame]) -> list[TokenDelta]:
    return [frame for frame in frames if isinstance(frame, TokenDelta)]


def done_of(frames: list[StreamFrame]) -> Done:
    assert isinstance(frames[-1], Done)
    return frames[-1]


def is_verifying(step: Step) -> bool:
    return step.position >= len(PROMPT) + 10 and step.tensor.shape[1] > 1


@pytest.mark.parametrize("layers", [["0-7"], ["0-3", "4-7"], ["0-2", "1-5", "4-7"]])
@virtually
async def test_drafts_right_and_wrong_leave_the_answer_as_it_is(
    layers: list[str], head: ToyEnds
) -> None:
    network, shards = network_of(*layers)
    frames = await asked(network, toy_request(PROMPT, COUNT), head=head)
    assert tokens_of(frames) == EXPECTED[head]
    done = done_of(frames)
    assert 0 < done.accepted_tokens < done.drafted_tokens
    assert done.failovers == 0
    steps = [rows for position, rows in shards[0].steps if position >= len(PROMPT)]
    assert sum(steps) == COUNT - 1 + done.drafted_tokens - done.accepted_tokens
    assert COUNT - 1 - done.accepted_tokens <= len(steps) < COUNT - 1
    assert max(shard.most_under_way for shard in shards) <= 2


@virtually
async def test_a_draft_follows_another_before_that_is_answered() -> None:
    head = HEADS[1]
    network, shards = network_of("0-3", "4-7")
    frames = await asked(network, toy_request(PROMPT, COUNT), head=head)
    assert tokens_of(frames) == EXPECTED[head]
    # Both go out at once; one hop computes the second while the other one computes the first.
    assert [shard.most_under_way for shard in shards] == [2, 1]


SAMPLED = SamplingParams(temperature=1.3, top_k=2, seed=7, ignore_eos=True)


@pytest.mark.parametrize(
    "sampling",
    [
        *(replace(SAMPLED, seed=seed) for seed in range(4)),
        replace(SAMPLED, repetition_penalty=1.2),
        SamplingParams(repetition_penalty=1.7, ignore_eos=True),
        SamplingParams(logprobs=3, ignore_eos=True),
        SamplingParams(stop=("2 1 1 2 2 1 ",), ignore_eos=True),
        SamplingParams(),
    ],
)
@virtually
async def test_frames_are_the_same_with_and_without(
    sampling: SamplingParams, head: ToyEnds
) -> None:
    request = replace(toy_request(PROMPT, 1), sampling=replace(sampling, max_tokens=COUNT))
    network, _ = network_of("0-3", "4-7")
    plain = await asked(network, replace(request, draft=False), head=head)
    drafted = await asked(network, request, head=head)
    assert deltas(drafted) == deltas(plain)
    assert done_of(drafted).finish_reason == done_of(plain).finish_reason
    assert done_of(plain).drafted_tokens == 0
    assert done_of(drafted).accepted_tokens > 0


@virtually
async def test_a_draft_goes_not_beyond_the_last_token(head: ToyEnds) -> None:
    network, shards = network_of("0-3", "4-7")
    for count in range(20, 32):
        frames = await asked(network, toy_request(PROMPT, count), head=head)
        assert tokens_of(frames) == EXPECTED[head][:count]
    furthest = max(position + rows for position, rows in shards[0].steps)
    assert furthest == len(PROMPT) + 31 - 1


@pytest.mark.parametrize("dying", [0, 1])
@pytest.mark.parametrize("after_answer", [False, True])
@virtually
async def test_a_hop_that_dies_with_a_draft_is_replaced(
    dying: int, after_answer: bool, head: ToyEnds
) -> None:
    network, shards = network_of("0-3", "4-7", "0-3", "4-7")
    lost = shards[dying]

    def die(step: Step) -> bool:
        if is_verifying(step):
            lost.kill()
        return True

    # With the first hop's answer on its way to the second, or before there is any.
    (shards[1] if after_answer and not dying else lost).before_step = die
    frames = await asked(network, toy_request(PROMPT, COUNT), head=head)
    assert tokens_of(frames) == EXPECTED[head]
    assert done_of(frames).failovers == 1
    assert done_of(frames).accepted_tokens > 0


@pytest.mark.parametrize("length", [6, 900])
@virtually
async def test_a_replay_that_is_still_under_way_does_not_bring_wrong_drafts_back(
    length: int,
    head: ToyEnds,
) -> None:
    """The hop is lost while the next one still computes, whose answer is all that was missing; of
    a long replay not even all was sent."""
    network, (first, second, spare) = network_of("0-3", "4-7", "0-3")
    prompt = [(5 * i) % 97 for i in range(length)]
    second.delay_s = 0.02
    spare.delay_s = 0.1
    deaths = 0

    def die(step: Step) -> bool:
        nonlocal deaths
        if step.position >= length + 10 and step.tensor.shape[1] > 1 and not deaths:
            deaths += 1
            asyncio.get_running_loop().call_later(0.01, first.kill)
        return True

    first.before_step = die
    frames = await asked(network, toy_request(prompt, 40), head=head)
    assert tokens_of(frames) == expected_tokens(prompt, 40, head)
    assert deaths == 1
    assert done_of(frames).failovers == 1


@virtually
async def test_where_a_draft_has_no_room_the_token_alone_still_has(head: ToyEnds) -> None:
    network, (first, _) = network_of("0-3", "4-7")
    first.room = len(PROMPT) + 30
    plenty = first.kv_tokens

    def fill(step: Step) -> bool:
        first.kv_tokens = 0  # what the answer holds leaves no room for another session
        return True

    first.before_step = fill
    plain = await asked(network, replace(toy_request(PROMPT, COUNT), draft=False), head=head)
    first.kv_tokens = plenty
    drafted = await asked(network, toy_request(PROMPT, COUNT), head=head)
    assert tokens_of(drafted) == tokens_of(plain) == EXPECTED[head][:31]
    assert done_of(drafted).note
    assert done_of(drafted).accepted_tokens > 0


@virtually
async def test_a_stop_within_a_draft_is_the_end(head: ToyEnds) -> None:
    network, _ = network_of("0-3", "4-7")
    ends = set()
    for at in range(40, 60):
        stop = "".join(f"{token} " for token in EXPECTED[head][at - 20 : at])
        sampling = SamplingParams(max_tokens=COUNT, stop=(stop,), ignore_eos=True)
        frames = await asked(network, replace(toy_request(PROMPT, 1), sampling=sampling), head=head)
        ids = tokens_of(frames)
        assert ids == EXPECTED[head][: len(ids)]
        assert stop in "".join(f"{token} " for token in ids)
        assert stop not in "".join(f"{token} " for token in ids[:-1])
        ends.add(len(ids))
    assert len(ends) > 10


@pytest.mark.parametrize("ending", [{"stop": ("2 1 1 2 2 1 ",)}, {"max_tokens": 37}])
@virtually
async def test_what_is_parked_ends_with_the_answer(
    ending: dict[str, object], head: ToyEnds
) -> None:
    network, _ = network_of("0-3", "4-7")
    first = toy_request(PROMPT, COUNT)
    first = replace(first, sampling=replace(first.sampling, **ending))
    orchestrator, sessions = toy_orchestrator(network, ends=head)
    said = done_of([frame async for frame in orchestrator.chat(first)]).token_ids
    (parked,) = sessions.known()
    assert parked.token_ids == [*PROMPT, *said[:-1]]
    assert {hop.history.length for hop in parked.route.hops} == {len(parked.token_ids)}
    longer = [*PROMPT, *said, 9, 9]
    frames = [frame async for frame in orchestrator.chat(toy_request(longer, 20))]
    assert done_of(frames).cached_tokens == len(parked.token_ids) - 20 - 2
    await sessions.close()
    assert tokens_of(frames) == expected_tokens(longer, 20, head)


@virtually
async def test_a_draft_that_is_replayed_is_verified_whole_wherever_chunks_end(
    head: ToyEnds,
) -> None:
    apart = 0
    # Where drafts come depends on what steps were measured to take: on a busy machine later.
    for length in range(100, 127):
        if apart >= 3:
            break
        network, (_, lost, _) = network_of("0-3", "4-7", "4-7")
        prompt = [(5 * i) % 97 for i in range(length)]

        def die(step: Step, lost: ToyShard = lost) -> bool:
            nonlocal apart
            if step.position < CHUNK_ROWS - 1 < step.position + step.tensor.shape[1] - 1:
                apart += 1
                lost.kill()
            return True

        lost.before_step = die
        frames = await asked(network, toy_request(prompt, 50), head=head)
        assert tokens_of(frames) == expected_tokens(prompt, 50, head)
    assert apart


@virtually
async def test_nothing_is_guessed_under_steering(head: ToyEnds) -> None:
    network, shards = network_of("0-7")
    steered = replace(toy_request(PROMPT, COUNT), edits=(Edit(Site(3), 1.0, b""),))
    frames = await asked(network, steered, head=head)
    assert tokens_of(frames) == EXPECTED[head]
    assert {rows for position, rows in shards[0].steps if position} == {1}
