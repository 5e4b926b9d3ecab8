"""Prompts that are given back with their log-probabilities, over toy hops: every row, in order."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from mesh.errors import BadRequest, ContextTooLong
from mesh.pipeline.generation import PipelineOrchestrator
from mesh.pipeline.scoring import TokenPlaces
from mesh.types import (
    Done,
    GenerationRequest,
    PromptPiece,
    SamplingParams,
    ShardFailover,
    StreamFrame,
    TokenDelta,
)
from tests.pipeline.toy_mesh import (
    PRIME,
    TOTAL_LAYERS,
    ToyEnds,
    ToyNetwork,
    expected_tokens,
    lost_in_the_second_chunk,
    toy_orchestrator,
    toy_request,
    whole_output,
)

PROMPT = [(7 * i * i + 3 * i + 5) % PRIME for i in range(300)]
"""Three chunks."""


def asked(count: int, prompt: list[int] = PROMPT) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=count, ignore_eos=True, logprobs=2)
    return replace(toy_request(prompt, count), sampling=sampling, echo=True)


def strongest(prompt: list[int]) -> list[int]:
    """What the whole model says behind each token, with no mesh at all."""
    return [int(token) for token in ToyEnds().logits(whole_output(prompt))[0].argmax(-1)]


async def frames_of(
    orchestrator: PipelineOrchestrator, request: GenerationRequest
) -> list[StreamFrame]:
    return [frame async for frame in orchestrator.chat(request)]


def require_scored(frames: list[StreamFrame], prompt: list[int]) -> None:
    pieces = [frame for frame in frames if isinstance(frame, PromptPiece)]
    scored = [each for piece in pieces for each in piece.logprobs]
    assert [token for piece in pieces for token in piece.token_ids] == prompt
    assert [each.token_id for each in scored] == prompt
    assert (scored[0].logprob, scored[0].top) == (None, ())
    said = strongest(prompt)
    assert [each.top[0][0] for each in scored[1:]] == said[:-1]
    likely = torch.nn.functional.one_hot(torch.tensor(0), PRIME).float().log_softmax(-1)
    for each, first in zip(scored[1:], said[:-1], strict=True):
        expected = likely[0] if each.token_id == first else likely[1]
        assert each.logprob == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("layers", [["0-7"], ["0-1", "2-3", "4-5", "6-7"]])
async def test_every_token_of_the_prompt_is_scored_then_it_goes_on(layers: list[str]) -> None:
    network = ToyNetwork()
    for span in layers:
        network.add(span)
    orchestrator, _ = toy_orchestrator(network)
    frames = await frames_of(orchestrator, asked(3))
    require_scored(frames, PROMPT)
    answer = [token for f in frames if isinstance(f, TokenDelta) for token in f.token_ids]
    assert answer == expected_tokens(PROMPT, 3)
    assert sum(f.prompt_tokens for f in frames if isinstance(f, TokenDelta)) == 0  # told before


async def test_nothing_needs_to_follow() -> None:
    network = ToyNetwork()
    shard = network.add("0-7")
    orchestrator, sessions = toy_orchestrator(network, context=len(PROMPT))
    frames = await frames_of(orchestrator, asked(0))
    require_scored(frames, PROMPT)
    done = frames[-1]
    assert isinstance(done, Done)
    assert (done.finish_reason, done.completion_tokens) == ("length", 0)
    assert (done.prompt_tokens, done.cached_tokens) == (len(PROMPT), 0)
    assert sum(rows for _, rows in shard.steps) == len(PROMPT) - 1
    assert not sessions.known()
    with pytest.raises(ContextTooLong):
        await frames_of(orchestrator, asked(1))
    alone = await frames_of(orchestrator, asked(0, [5]))
    assert [each.type for each in alone] == ["prompt_piece", "done"]
    with pytest.raises(BadRequest):
        await frames_of(orchestrator, asked(0, []))


async def test_what_is_kept_of_the_prompt_hides_none_of_it() -> None:
    network = ToyNetwork()
    network.add("0-7")
    orchestrator, _ = toy_orchestrator(network)
    await frames_of(orchestrator, toy_request(PROMPT, 3))
    require_scored(await frames_of(orchestrator, asked(1)), PROMPT)
    later = (await frames_of(orchestrator, toy_request(PROMPT, 3)))[-1]
    assert isinstance(later, Done)
    assert later.cached_tokens == len(PROMPT) - 1  # who was not scored still has it


async def test_a_slow_reader_loses_no_row() -> None:
    network = ToyNetwork()
    for layer in range(TOTAL_LAYERS):
        network.add(f"{layer}-{layer}")  # all could be busy at once, with more than is kept
    orchestrator, _ = toy_orchestrator(network)
    prompt = (PROMPT * 3)[: 5 * 128 + 2]
    frames = []
    async for frame in orchestrator.chat(asked(0, prompt)):
        frames.append(frame)
        await asyncio.sleep(0.05)
    require_scored(frames, prompt)


async def test_a_hop_lost_under_way_costs_no_row() -> None:
    network = ToyNetwork()
    network.add("0-3")
    lost_in_the_second_chunk(network, network.add("4-7"))
    orchestrator, _ = toy_orchestrator(network)
    frames = await frames_of(orchestrator, asked(2))
    assert any(isinstance(frame, ShardFailover) for frame in frames)
    require_scored(frames, PROMPT)


async def test_a_prompt_comes_back_without_any_work() -> None:
    network = ToyNetwork()
    shard = network.add("0-7")
    orchestrator, _ = toy_orchestrator(network)
    request = replace(toy_request([5, 11], 0), echo=True)
    frames = await frames_of(orchestrator, request)
    assert [frame.type for frame in frames] == ["prompt_piece", "done"]
    assert isinstance(frames[0], PromptPiece)
    assert (frames[0].text, frames[0].token_ids) == ("5 11 ", (5, 11))
    assert not shard.steps


@pytest.mark.parametrize(
    ("text", "tokens", "places"),
    [
        ("ab cd", [b"ab", b" cd"], [0, 2]),
        ("ab cd", [b"<s>", b" ab", b" cd"], [0, 0, 2]),  # one that begins all texts, and a space
        ("🐈 s", ["🐈".encode()[:2], "🐈".encode()[2:], b" s"], [0, 1, 1]),
        ("<b>hi", [b"<b>", b"hi"], [0, 3]),
        ("cafe\u0301 au lait", ["café".encode(), b" au", b" lait"], [0, 5, 8]),  # rewritten
    ],
)
def test_tokens_are_found_in_the_text_that_was_sent(
    text: str, tokens: list[bytes], places: list[int]
) -> None:
    found = TokenPlaces(text)
    assert [found.take(token) for token in tokens] == places
