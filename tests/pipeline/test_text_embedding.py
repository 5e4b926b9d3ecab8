"""Embeddings over toy hops: the rows that a model's pooling wants, whatever happens on the way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mesh.errors import NotSupported
from mesh.models.pooling import NO_POOLING, Pooling
from mesh.pipeline.generation import PipelineOrchestrator
from mesh.pipeline.model import AskerModel
from mesh.pipeline.text_embedding import require_embeds, shortened
from mesh.types import Done, GenerationRequest, ShardFailover, StreamFrame
from tests.pipeline.toy_mesh import (
    HIDDEN,
    MODEL,
    PRIME,
    TOTAL_LAYERS,
    WEIGHTS,
    ToyEnds,
    ToyNetwork,
    ToyText,
    lost_in_the_second_chunk,
    toy_orchestrator,
    toy_request,
    whole_output,
)

PROMPT = [(7 * i * i + 3 * i + 5) % PRIME for i in range(300)]
"""Three chunks."""
LAST, MEAN = Pooling("last"), Pooling("mean")


def asked(prompt: list[int] = PROMPT) -> GenerationRequest:
    return replace(toy_request(prompt, 0), embeds=True, draft=False)


def expected(pooling: Pooling, prompt: list[int] = PROMPT) -> torch.Tensor:
    """The same with one session over all layers and no mesh at all."""
    normed = ToyEnds().norm(whole_output(prompt)[0])
    row = normed[-1] if pooling is LAST else normed.mean(dim=0)
    return row / row.norm()


async def frames_of(orchestrator: PipelineOrchestrator, prompt: list[int]) -> list[StreamFrame]:
    return [frame async for frame in orchestrator.chat(asked(prompt))]


def embedding_of(frames: list[StreamFrame]) -> torch.Tensor:
    done = frames[-1]
    assert isinstance(done, Done)
    assert (done.completion_tokens, done.cached_tokens) == (0, 0)
    assert done.first_token_ms > done.construct_ms  # when the text was computed
    return torch.from_numpy(np.frombuffer(done.embedding, "<f4").copy())


@pytest.mark.parametrize("pooling", [LAST, MEAN])
async def test_a_text_is_one_vector(pooling: Pooling) -> None:
    network = ToyNetwork()
    for span in ("0-2", "3-5", "6-7"):
        network.add(span)
    orchestrator, sessions = toy_orchestrator(network, pooling=pooling)
    for prompt in (PROMPT, PROMPT[:129], [5]):
        found = embedding_of(await frames_of(orchestrator, prompt))
        assert torch.allclose(found, expected(pooling, prompt), atol=1e-5)
    assert not sessions.known()  # nobody goes on with such a text


@pytest.mark.parametrize("pooling", [LAST, MEAN])
async def test_a_hop_lost_under_way_costs_no_row(pooling: Pooling) -> None:
    network = ToyNetwork()
    network.add("0-3")
    lost_in_the_second_chunk(network, network.add("4-7"))
    orchestrator, _ = toy_orchestrator(network, pooling=pooling)
    frames = await frames_of(orchestrator, PROMPT)
    assert any(isinstance(frame, ShardFailover) for frame in frames)
    assert torch.allclose(embedding_of(frames), expected(pooling), atol=1e-5)


def test_the_end_of_a_long_text_is_left_out_and_what_ends_every_text_stays() -> None:
    text, ids = ToyText(), [5, 6, 7, 8]
    assert shortened(ids, 4, text) == ids
    assert shortened(ids, 3, text) == [5, 6, 7]
    assert shortened([*ids, 0], 3, text) == [5, 6, 0]


def test_other_models_refuse_with_the_reason() -> None:
    sizes = TOTAL_LAYERS, HIDDEN, PRIME, 64
    with pytest.raises(NotSupported, match="makes no embeddings: its checkpoint does not say"):
        require_embeds(AskerModel(MODEL, WEIGHTS, *sizes, ToyEnds(), ToyText()))
    assert NO_POOLING.kind == ""
