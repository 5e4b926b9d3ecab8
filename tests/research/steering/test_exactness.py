"""A steered request over hops says what a local model with forward hooks says."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mesh.errors import BadSteering
from mesh.types import Edit, LayerRange
from tests.checkpoints import make_checkpoint
from tests.mesh_e2e.spread import greedy, spread
from tests.research.steering.local import edit, greedy_ids, load, low_rank_file, vector_file

LAYERS = 4
HALVES = [LayerRange(0, 2), LayerRange(2, 4)]
COUNT = 16


def prompt_ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 384, (length,), generator=generator).tolist()


def everywhere(attention: str) -> dict[str, list[Edit]]:
    """One case for each kind of place, and one of all together."""
    rank = low_rank_file()
    old = attention == "attn"
    last, norm = ("c_proj", "ln_2") if old else ("down_proj", "post_attention_layernorm")
    mixed = "c_proj" if old else "o_proj"
    single = {
        "residual": [edit(1, strength=2.0)],
        "last layer": [edit(3, strength=2.0)],
        "mlp": [edit(2, "mlp", strength=2.0)],
        "attention": [edit(0, attention, strength=-2.0)],
        "low rank": [edit(2, strength=3.0, data=rank)],
        "inputs": [
            edit(1, side="input", strength=2.0),
            edit(2, "mlp", "input", data=rank, strength=2.0),
            edit(3, attention, "input"),
        ],
        "inside the mlp": [edit(1, f"mlp.{last}", strength=2.0)],
        "inside the attention": [edit(2, f"{attention}.{mixed}", data=rank, strength=3.0)],
        "a norm": [edit(2, norm, strength=2.0), edit(0, norm, "input")],
        "of another width": [
            edit(2, "mlp.act", data=vector_file(256), strength=2.0)
            if old
            else edit(2, "mlp.gate_proj", data=vector_file(128), strength=2.0)
        ],
    }
    return {**single, "all": [one for case in single.values() for one in case]}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
async def test_every_place_equals_a_forward_hook(family: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", family, layers=LAYERS)
    model = load(directory)
    prompt = prompt_ids(70, 1)
    plain = greedy_ids(model, prompt, COUNT, ())
    cases = everywhere("attn" if family == "gpt2" else "self_attn")
    expected = {name: greedy_ids(model, prompt, COUNT, edits) for name, edits in cases.items()}
    assert sum(ids != plain for ids in expected.values()) >= 8, "the edits do not do anything"
    async with spread(directory, HALVES, tmp_path / "cache") as mesh:
        await mesh.use(HALVES)
        for name, edits in cases.items():
            done = await mesh.generate(replace(greedy(prompt, COUNT), edits=tuple(edits)))
            assert list(done.token_ids) == expected[name], name
            assert done.cached_tokens == 0, "another steering's cache was used"
        done = await mesh.generate(greedy(prompt, COUNT))
        assert list(done.token_ids) == plain


async def test_a_batch_steers_only_its_own_rows(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama", layers=LAYERS)
    model = load(directory)
    steering: list[tuple[Edit, ...]] = [
        (),
        (edit(1, strength=3.0),),
        (),
        (edit(1, strength=-3.0), edit(3, "mlp", strength=2.0)),
        (edit(1, strength=3.0, data=vector_file(seed=5)),),
        (edit(2, data=low_rank_file(), strength=4.0),),
        (edit(1, "mlp.down_proj", strength=4.0), edit(2, "self_attn.o_proj", "input")),
    ]
    prompts = [prompt_ids(length, length) for length in (5, 40, 30, 12, 17, 64, 9)]
    count = 40
    async with spread(directory, HALVES, tmp_path / "cache", max_concurrent_streams=8) as mesh:
        await mesh.use(HALVES)
        together = await asyncio.gather(
            *(
                mesh.generate(replace(greedy(prompt, count, f"r{i}"), edits=edits))
                for i, (prompt, edits) in enumerate(zip(prompts, steering, strict=True))
            )
        )
    for prompt, edits, done in zip(prompts, steering, together, strict=True):
        assert list(done.token_ids) == greedy_ids(model, prompt, count, edits)


async def test_a_kept_cache_serves_the_same_steering_and_no_other(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama", layers=LAYERS)
    model = load(directory)
    prompt = prompt_ids(40, 3)
    calm, wild = (edit(1, strength=2.0),), (edit(1, strength=2.5),)
    async with spread(directory, HALVES, tmp_path / "cache") as mesh:
        await mesh.use(HALVES)
        first = await mesh.generate(replace(greedy(prompt, 8), edits=calm))
        longer = [*prompt, *first.token_ids]
        for edits, reused in ((wild, False), ((), False), (calm, True)):
            done = await mesh.generate(replace(greedy(longer, 8), edits=edits))
            assert (done.cached_tokens > 0) is reused
            assert list(done.token_ids) == greedy_ids(model, longer, 8, edits)


async def test_what_cannot_be_applied_is_refused_and_named(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama", layers=LAYERS)
    prompt = prompt_ids(10, 4)
    wrong = {
        "attn": edit(1, "attn"),
        "width 32": edit(1, data=vector_file(32)),
        "width 128, the edit is for 64": edit(1, "mlp.up_proj"),
        "'mlp.nothing'": edit(1, "mlp.nothing"),
        "not safetensors": edit(1, data=b"nonsense"),
        "Lower the strength": edit(1, strength=1e38),
    }
    async with spread(directory, HALVES, tmp_path / "cache") as mesh:
        await mesh.use(HALVES)
        for words, bad in wrong.items():
            with pytest.raises(BadSteering, match=words):
                await mesh.generate(replace(greedy(prompt, 4), edits=(edit(2), bad)))
        done = await mesh.generate(greedy(prompt, 4))
        assert done.failovers == 0
        assert list(done.token_ids) == greedy_ids(load(directory), prompt, 4, ())


async def test_more_bytes_than_one_message_holds_arrive_whole(tmp_path: Path) -> None:
    hidden = 512
    directory = make_checkpoint(tmp_path / "model", "llama", layers=LAYERS, hidden=hidden)
    edits = tuple(edit(1, data=low_rank_file(hidden, 200, seed), strength=0.5) for seed in (0, 7))
    assert sum(len(one.data) for one in edits) > 1 << 20
    prompt = prompt_ids(10, 5)
    async with spread(directory, HALVES, tmp_path / "cache") as mesh:
        await mesh.use(HALVES)
        done = await mesh.generate(replace(greedy(prompt, 6), edits=edits))
    assert list(done.token_ids) == greedy_ids(load(directory), prompt, 6, edits)
