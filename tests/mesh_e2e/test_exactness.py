"""Spread over hops, a model says exactly what it says on one machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from mesh.models.builtin import checkpoint_dir
from mesh.shard.supervisor import ShardSupervisor
from mesh.types import LayerRange, ModelId, SamplingParams, WireDtype
from tests import secure
from tests.checkpoints import FAMILIES, STATEFUL, make_checkpoint
from tests.mesh_e2e.spread import Spread, asking, greedy, hugging_face, loads_of, split

LAYERS = 6
"""So many that a family whose every sixth layer is another kind has one of them."""
PROMPT = 200
COUNT = 64
NEAR_TIE = 0.05
"""Logits that are closer may change places as activations are rounded to fp16 at each hop."""
REPEATING = 160
BUILT_IN_LAYERS = 8
NARROW = "qwen3_5 in 16 bit"
"""Layers that keep running states, computed without transformers' modules."""

TOGETHER = 7
"""Models in one shard process, which takes so many commands at once and no more."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


def splits(layers: int) -> list[list[LayerRange]]:
    """So many layers over one to four hops."""
    return [split(layers, hops) for hops in (1, 2, 3, 4)]


def prompt_ids(vocab: int, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, vocab, (length,), generator=generator).tolist()


@dataclass
class House:
    """Shard processes that hold every family, and the built-in model, cut for one to four hops."""

    cache_dir: Path
    hosts: dict[str, ShardSupervisor] = field(default_factory=dict)
    directories: dict[str, Path] = field(default_factory=dict)

    @asynccontextmanager
    async def asking(self, name: str) -> AsyncIterator[tuple[Path, Spread]]:
        """The model of this family, or ``builtin``: its directory, and who asks it."""
        directory = self.directories[name]
        async with asking(self.hosts[name], directory, ModelId(name), self.cache_dir) as mesh:
            yield directory, mesh


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    root = tmp_path_factory.mktemp("exact")
    made = House(root / "cache", directories={"builtin": checkpoint_dir()})
    for family in FAMILIES:
        made.directories[family] = make_checkpoint(root / family, family, layers=LAYERS)
    made.directories[NARROW] = make_checkpoint(
        root / "narrow", "qwen3_5", layers=LAYERS, dtype="bfloat16"
    )
    held = {family: [*chain(*splits(LAYERS))] for family in FAMILIES}
    held |= {"builtin": [*chain(*splits(BUILT_IN_LAYERS))], NARROW: split(LAYERS, 2)}
    names = list(made.directories)
    async with AsyncExitStack() as stack:
        for first in range(0, len(names), TOGETHER):
            together = names[first : first + TOGETHER]
            loads = [
                load
                for name in together
                for load in loads_of(
                    made.directories[name],
                    held[name],
                    ModelId(name),
                    max_concurrent_streams=8,
                    dtype="auto" if name == NARROW else "fp32",
                )
            ]
            host = await stack.enter_async_context(secure.hosting(made.cache_dir, *loads))
            made.hosts |= dict.fromkeys(together, host)
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
async def test_one_to_four_hops_equal_hugging_face(family: str, house: House) -> None:
    async with house.asking(family) as (directory, mesh):
        prompt = prompt_ids(384, PROMPT, seed=1)
        ids, logits = hugging_face(directory, prompt, COUNT)
        for spans in splits(LAYERS):
            await mesh.use(spans)
            done = await mesh.generate(greedy(prompt, COUNT))
            assert list(done.token_ids) == ids, f"{len(spans)} hops"
            assert len(done.route) == len(spans)
            ours = await mesh.logits(prompt, ids)
            # What is rounded stays in a state: their own logits are as far from those in fp64.
            allowed = 1e-3 if family in STATEFUL else 1e-4
            assert (ours - logits).abs().max() <= allowed, f"{len(spans)} hops"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
async def test_verified_drafts_equal_hugging_face(family: str, house: House) -> None:
    """A prompt that repeats itself, and an answer that these models soon repeat."""
    async with house.asking(family) as (directory, mesh):
        mesh.draft_worth = 0.0  # they are sent whatever they cost just now
        prompt = prompt_ids(384, 12, seed=3) * 6
        ids, _ = hugging_face(directory, prompt, REPEATING)
        await mesh.use(split(LAYERS, 2))
        done = await mesh.generate(greedy(prompt, REPEATING))
        assert list(done.token_ids) == ids
        # With states of noise nothing is said twice: there all drafts are taken back.
        assert done.accepted_tokens > 0 or (family in STATEFUL and done.drafted_tokens > 0)


async def test_seeded_answers_are_the_same_with_and_without_drafts(
    house: House,
) -> None:
    async with house.asking("llama") as (_, mesh):
        mesh.draft_worth = 0.0
        await mesh.use(split(LAYERS, 2))
        accepted = 0
        for seed in range(4):
            sampling = SamplingParams(
                temperature=0.7, top_k=3, seed=seed, max_tokens=REPEATING, ignore_eos=True
            )
            request = replace(greedy(prompt_ids(384, 12, seed=3) * 6, 1), sampling=sampling)
            drafted = await mesh.generate(request)
            plain = await mesh.generate(replace(request, draft=False))
            assert drafted.token_ids == plain.token_ids
            assert plain.drafted_tokens == 0
            accepted += drafted.accepted_tokens
        assert accepted > 0


async def test_the_built_in_model_is_exact_with_fp16_on_the_wire(house: House) -> None:
    """Where no two best tokens are closer than rounding, which is all that is promised there."""
    async with house.asking("builtin") as (directory, mesh):
        compared = 0
        for seed in range(1, 12):
            prompt = prompt_ids(mesh.model.vocab_size, PROMPT, seed)
            ids, logits = hugging_face(directory, prompt, COUNT)
            best, second = logits.topk(2).values.unbind(-1)
            if (best - second).min() < NEAR_TIE:
                continue
            if (compared := compared + 1) > 3:
                break
            for spans in splits(BUILT_IN_LAYERS):
                await mesh.use(spans)
                done = await mesh.generate(greedy(prompt, COUNT), WireDtype.FP16)
                assert list(done.token_ids) == ids, f"{len(spans)} hops"
        assert compared > 2


async def test_answers_at_once_in_16_bit_are_those_of_each_alone(house: House) -> None:
    prompts = [prompt_ids(384, length, seed=length) for length in (5, 40, 130, 200, 17, 64)]
    async with house.asking(NARROW) as (_, mesh):
        await mesh.use(split(LAYERS, 2))
        requests = [greedy(prompt, 32, f"r{i}") for i, prompt in enumerate(prompts)]
        together = await asyncio.gather(*map(mesh.generate, requests))
        for request, done in zip(requests, together, strict=True):
            alone = await mesh.generate(replace(request, request_id="alone"))
            assert alone.token_ids == done.token_ids


async def test_batched_and_interleaved_requests_equal_each_alone(house: House) -> None:
    prompts = [prompt_ids(384, length, seed=length) for length in (5, 40, 130, 200, 17, 64)]
    async with house.asking("llama") as (directory, mesh):
        await mesh.use(split(LAYERS, 2))
        together = await asyncio.gather(
            *(mesh.generate(greedy(p, 32, f"r{i}")) for i, p in enumerate(prompts))
        )
    for prompt, done in zip(prompts, together, strict=True):
        assert list(done.token_ids) == hugging_face(directory, prompt, 32)[0]
