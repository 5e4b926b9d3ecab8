"""A smaller model that guesses along: what it guesses, and that no answer depends on it."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from mesh.errors import NotEnoughMemory
from mesh.models.builtin import checkpoint_dir
from mesh.pipeline.commands import AskerOptions
from mesh.pipeline.draft_model import MAX_TEXTS, DraftModel, load_asker_and_draft
from mesh.pipeline.model import AskerModel, TextReader
from mesh.processes.memory_budget import MemoryCaps
from mesh.types import Done, Edit, GenerationRequest, ModelId, Site
from tests.checkpoints import LONGROPE, make_checkpoint
from tests.health.watched import tokens_of
from tests.mesh_e2e.spread import hugging_face
from tests.pipeline.toy_mesh import (
    ToyNetwork,
    expected_tokens,
    toy_orchestrator,
    toy_request,
)

if TYPE_CHECKING:
    from mesh.shard.runtime import KeyValueCache, Runtime

PROMPT = [5, 11, 23, 42, 8, 61]
COUNT = 60
EXPECTED = [*PROMPT, *expected_tokens(PROMPT, COUNT)]


class Oracle:
    """Knows the answer, and is right but for every so-manieth token."""

    def __init__(self, wrong_every: int = 0) -> None:
        self.open = self.asked = 0
        self._wrong_every = wrong_every

    def read_along(self) -> TextReader:
        self.open += 1
        return self

    def prepare(self, text: Sequence[int]) -> None:
        assert list(text) == PROMPT

    async def guess(self, text: Sequence[int], count: int) -> list[int]:
        self.asked += 1
        assert list(text) == EXPECTED[: len(text)]
        guess = EXPECTED[len(text) : len(text) + count]
        return [
            (token + 1) % 97 if self._wrong_every and (len(text) + i) % self._wrong_every == 0
            else token
            for i, token in enumerate(guess)
        ]  # fmt: skip

    def close(self) -> None:
        self.open -= 1


async def answered(oracle: Oracle, request: GenerationRequest) -> tuple[list[int], Done]:
    network = ToyNetwork()
    for span in ("0-3", "4-7"):
        network.add(span).delay_s = 0.002  # for a step of any length
    orchestrator, sessions = toy_orchestrator(network, draft=oracle)
    frames = [frame async for frame in orchestrator.chat(request)]
    await sessions.close()
    assert isinstance(frames[-1], Done)
    assert oracle.open == 0
    return tokens_of(frames), frames[-1]


@pytest.mark.parametrize("wrong_every", [0, 2, 5])
async def test_guesses_right_and_wrong_leave_the_answer_as_it_is(wrong_every: int) -> None:
    tokens, done = await answered(Oracle(wrong_every), toy_request(PROMPT, COUNT))
    assert tokens == EXPECTED[len(PROMPT) :]
    if wrong_every == 0:
        assert done.accepted_tokens == done.drafted_tokens > COUNT // 2
    else:
        assert done.accepted_tokens < done.drafted_tokens


async def test_what_is_never_right_is_soon_not_asked() -> None:
    oracle = Oracle(wrong_every=1)
    tokens, done = await answered(oracle, toy_request(PROMPT, COUNT))
    assert tokens == EXPECTED[len(PROMPT) :]
    assert done.accepted_tokens == 0
    assert 0 < oracle.asked < 20


async def test_it_is_not_asked_where_nothing_may_be_drafted() -> None:
    oracle = Oracle()
    await answered(oracle, replace(toy_request(PROMPT, COUNT), draft=False))
    edit = Edit(Site(3), 1.0, b"")
    await answered(oracle, replace(toy_request(PROMPT, COUNT), edits=(edit,)))
    assert oracle.asked == 0


# The real one


@pytest.fixture(scope="module", params=["builtin", "qwen3_5"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AskerModel]:
    """The built-in model, with a copy of itself that drafts; and one that keeps running states."""
    directory = tmp_path_factory.mktemp("draft")
    own, other = checkpoint_dir(), directory / "other"
    if request.param != "builtin":
        own = make_checkpoint(directory / "own", request.param, layers=8)
    shutil.copytree(own, other)
    options = AskerOptions("fp32", "cpu", 1, directory / "cache", draft_model=other)
    found, reasons = load_asker_and_draft(own, ModelId("builtin"), options)
    assert any(reason.startswith("draft model other: 8 layers in ") for reason in reasons), reasons
    assert found.draft is not None
    yield found
    found.draft.close()


async def guessed(reader: TextReader, text: Sequence[int], count: int) -> list[int]:
    """Once the text was read before."""
    async with asyncio.timeout(60):
        while True:
            if guess := await reader.guess(text, count):
                return guess
            await asyncio.sleep(0.01)


async def test_it_goes_on_as_the_model_would(model: AskerModel) -> None:
    assert isinstance(model.draft, DraftModel)
    request = GenerationRequest(
        "", ModelId("builtin"), messages=({"role": "user", "content": "Hi"},)
    )
    prompt = await asyncio.to_thread(model.text.prompt_ids, request, None)
    reader, other = model.draft.read_along(), model.draft.read_along()
    assert reader is not None
    assert other is not None
    reader.prepare(prompt)
    other.prepare(prompt)
    whole = await guessed(reader, prompt, 12)
    assert len(whole) == 12
    # However its text came about: at once, in parts, or after it had gone wrong.
    for known in (1, 4, 5, 11):
        assert await guessed(other, [*prompt, *whole[:known]], 12 - known) == whole[known:]
    wrong = [*prompt, *whole[:3], *prompt[:4]]
    assert await guessed(other, wrong, 5) != whole[7:]
    assert await guessed(other, [*prompt, *whole[:3]], 9) == whole[3:]
    reader.close()
    reader = model.draft.read_along()
    assert reader is not None
    reader.prepare(([*prompt, *whole] * 99)[:700])  # farther than running states go back
    assert await guessed(reader, [*prompt, *whole[:3]], 9) == whole[3:]
    reader.close()
    other.close()
    assert model.draft.texts == 0


async def test_it_reads_a_text_as_a_short_one_until_it_is_long(tmp_path: Path) -> None:
    """Of a model that turns long texts otherwise, all of them."""
    short = int(LONGROPE["original_max_position_embeddings"])
    own = make_checkpoint(tmp_path / "own", "phi4_mini", layers=2, hidden=256)
    shutil.copytree(own, other := tmp_path / "other")
    options = AskerOptions("fp32", "cpu", 1, tmp_path / "cache", draft_model=other)
    model, _ = await asyncio.to_thread(load_asker_and_draft, own, ModelId("own"), options)
    assert isinstance(model.draft, DraftModel)
    prompt = [7 + i % 9 for i in range(short - 20)]
    text = prompt + (await asyncio.to_thread(hugging_face, own, prompt, 40))[0]
    reader = model.draft.read_along()
    assert reader is not None
    reader.prepare(prompt)

    async def right(known: int, count: int) -> int:
        guess = await guessed(reader, text[:known], count)
        return sum(a == b for a, b in zip(guess, text[known:], strict=False))

    assert await right(len(prompt), 20) > 15, "it is rounded to 8 bits"
    assert await reader.guess(prompt, 21) == [], "the last of them is none of a short text"
    assert await right(short + 1, 15) > 11
    assert await right(short + 4, 12) > 9
    reader.close()
    model.draft.close()


async def test_only_so_many_answers_are_read_along(model: AskerModel) -> None:
    assert isinstance(model.draft, DraftModel)
    readers = [model.draft.read_along() for _ in range(MAX_TEXTS)]
    assert model.draft.read_along() is None
    for reader in readers:
        assert reader is not None
        reader.close()
        reader.close()
    reader = model.draft.read_along()
    assert reader is not None
    assert await reader.guess([1] * (model.max_positions + 1), 1) == []
    reader.close()
    assert await reader.guess([1], 1) == []


class Counted:
    """As much of a cache as reading takes."""

    length, max_tokens = 0, 0

    def held(self, positions: int) -> int:
        return min(positions, self.length)

    def cut(self, length: int) -> None:
        self.length = length


class Gated(DraftModel):
    """Computes nothing; a text of twos waits for the gate in every part."""

    def __init__(self, model: AskerModel) -> None:
        super().__init__(model, cast("Runtime", None), model.vocab_size)
        self.began, self.gate = threading.Event(), threading.Event()
        self.twos = 0

    def new_cache(self, positions: int) -> KeyValueCache:
        cache = Counted()
        cache.max_tokens = positions
        return cast("KeyValueCache", cache)

    def can_read(self, text: Sequence[int], more: int = 0) -> bool:
        return True

    def read(self, cache: KeyValueCache, ids: Sequence[int]) -> torch.Tensor:
        if ids[0] == 2:
            self.began.set()
            assert self.gate.wait(30)
            self.twos += 1
        return torch.zeros(9)


async def test_texts_that_nobody_waits_for_any_more_hold_no_answer_up(model: AskerModel) -> None:
    gated = Gated(model)
    running, gone = gated.read_along(), gated.read_along()
    assert running is not None
    assert gone is not None
    running.prepare([1] * 10)
    assert await guessed(running, [1] * 11, 3) == [0, 0, 0]
    gone.prepare([2] * 8000)
    assert await asyncio.to_thread(gated.began.wait, 30)
    assert await running.guess([1] * 12, 3) == [], "it does not wait for the other text"
    gone.close()
    for _ in range(2 * MAX_TEXTS):
        reader = gated.read_along()
        assert reader is not None
        reader.prepare([2] * 8000)
        reader.close()
    gated.gate.set()
    assert await guessed(running, [1] * 13, 3) == [0, 0, 0]
    assert gated.twos == 1, "the part that was being read"
    running.close()
    assert gated.texts == 0
    gated.close()


@pytest.fixture
def larger(tmp_path: Path) -> Iterator[tuple[AskerModel, int]]:
    """The built-in model with one token more, which the built-in model itself drafts for."""
    own = shutil.copytree(checkpoint_dir(), tmp_path / "own")
    config = json.loads((own / "config.json").read_text())
    extra = config["vocab_size"]
    (own / "config.json").write_text(json.dumps({**config, "vocab_size": extra + 1}))
    tokenizer = json.loads((own / "tokenizer.json").read_text())
    added = {**tokenizer["added_tokens"][-1], "id": extra, "content": "<|extra|>"}
    tokenizer["added_tokens"].append(added)
    (own / "tokenizer.json").write_text(json.dumps(tokenizer))
    weights = load_file(own / "model.safetensors")
    name = next(name for name in weights if "embed_tokens" in name)
    weights[name] = torch.cat([weights[name], weights[name][:1]])
    save_file(weights, own / "model.safetensors", {"format": "pt"})
    options = AskerOptions("fp32", "cpu", 1, tmp_path / "cache", draft_model=checkpoint_dir())
    model, _ = load_asker_and_draft(own, ModelId("own"), options)
    yield model, extra
    if model.draft is not None:
        model.draft.close()


async def test_it_guesses_nothing_behind_a_token_that_it_does_not_have(
    larger: tuple[AskerModel, int],
) -> None:
    model, extra = larger
    assert isinstance(model.draft, DraftModel)
    reader, other = model.draft.read_along(), model.draft.read_along()
    assert reader is not None
    assert other is not None
    reader.prepare(PROMPT)
    other.prepare([*PROMPT, extra])
    assert await guessed(reader, PROMPT, 3)
    assert await reader.guess([*PROMPT, extra], 3) == []
    assert await other.guess([*PROMPT, extra, 5], 3) == []
    reader.close()
    other.close()


def test_one_with_other_tokens_is_refused_and_the_model_answers_without(tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "llama", "llama")
    options = AskerOptions("fp32", "cpu", 1, tmp_path / "cache", draft_model=other)
    found, reasons = load_asker_and_draft(checkpoint_dir(), ModelId("builtin"), options)
    assert found.draft is None
    assert "are not those of builtin" in reasons[-1]


def test_ends_and_draft_model_stay_within_what_the_owner_gives(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(checkpoint_dir(), other)

    def load(limit: str) -> tuple[AskerModel, list[str], int]:
        caps = MemoryCaps(tmp_path / limit, limit)
        options = AskerOptions(
            "fp32", "cpu", 1, tmp_path / "cache", draft_model=other, caps=caps
        )  # fmt: skip
        model, reasons = load_asker_and_draft(checkpoint_dir(), ModelId("builtin"), options)
        budget = caps.budget("cpu", 0)
        assert budget is not None
        return model, reasons, budget.standing().taken_mb

    with pytest.raises(NotEnoughMemory, match=r"10 MiB are left of the 10 MiB .*max_memory"):
        load("10 MiB")
    model, reasons, ends_mb = load("100 MiB")
    assert model.draft is None
    assert "no draft model: the draft model needs" in reasons[-1]
    assert 64 < ends_mb < 100, "what was refused has nothing"
    model, _, both_mb = load("1 GiB")
    assert model.draft is not None
    model.draft.close()
    assert both_mb > 2 * 64 + ends_mb
