"""Spread over hops, a model says exactly what it says on one machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from mesh.models.builtin import checkpoint_dir
from mesh.types import WireDtype
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.mesh_e2e.spread import greedy, hugging_face, split, spread

LAYERS = 8
PROMPT = 200
COUNT = 64


def prompt_ids(vocab: int, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, vocab, (length,), generator=generator).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
async def test_one_to_four_hops_equal_hugging_face(family: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", family, layers=LAYERS)
    prompt = prompt_ids(384, PROMPT, seed=1)
    ids, logits = hugging_face(directory, prompt, COUNT)
    splits = [split(LAYERS, hops) for hops in (1, 2, 3, 4)]
    layers = [span for spans in splits for span in spans]
    async with spread(directory, layers, tmp_path / "cache") as mesh:
        for spans in splits:
            await mesh.use(spans)
            done = await mesh.generate(greedy(prompt, COUNT))
            assert list(done.token_ids) == ids, f"{len(spans)} hops"
            assert len(done.route) == len(spans)
            ours = await mesh.logits(prompt, ids)
            assert (ours - logits).abs().max() <= 1e-4, f"{len(spans)} hops"


async def test_the_built_in_model_is_exact_with_fp16_on_the_wire(tmp_path: Path) -> None:
    directory = checkpoint_dir()
    splits = [split(LAYERS, hops) for hops in (1, 2, 3, 4)]
    layers = [span for spans in splits for span in spans]
    async with spread(directory, layers, tmp_path / "cache") as mesh:
        for seed in (1, 2):
            prompt = prompt_ids(mesh.model.vocab_size, PROMPT, seed)
            ids, _ = hugging_face(directory, prompt, COUNT)
            for spans in splits:
                await mesh.use(spans)
                done = await mesh.generate(greedy(prompt, COUNT), WireDtype.FP16)
                assert list(done.token_ids) == ids, f"{len(spans)} hops"


async def test_batched_and_interleaved_requests_equal_each_alone(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama", layers=LAYERS)
    prompts = [prompt_ids(384, length, seed=length) for length in (5, 40, 130, 200, 17, 64)]
    spans = split(LAYERS, 2)
    async with spread(directory, spans, tmp_path / "cache", max_concurrent_streams=8) as mesh:
        await mesh.use(spans)
        together = await asyncio.gather(
            *(mesh.generate(greedy(p, 32, f"r{i}")) for i, p in enumerate(prompts))
        )
    for prompt, done in zip(prompts, together, strict=True):
        assert list(done.token_ids) == hugging_face(directory, prompt, 32)[0]
