"""One call of the head for the rows of several generations, with the bits of each alone."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from mesh.models.manifest import read_manifest
from mesh.pipeline.checkpoint import load_asker
from mesh.pipeline.commands import AskerOptions
from mesh.pipeline.head import OutputHead
from mesh.pipeline.model import AskerModel
from mesh.shard.compiled.formats import Quant
from mesh.shard.compiled.head import CompiledLinear
from mesh.shard.compiled.store import stored_products
from mesh.shard.ends import MOST_ROWS, ModelEnds, rows_at_once
from mesh.types import Done
from mesh.wire.messages import Result
from tests.checkpoints import make_checkpoint
from tests.pipeline.toy_mesh import (
    HIDDEN,
    MODEL,
    PRIME,
    TOTAL_LAYERS,
    WEIGHTS,
    ToyEnds,
    ToyNetwork,
    ToyText,
    expected_tokens,
    toy_orchestrator,
    toy_request,
)
from tests.simulation.virtual_loop import run_virtually
from tests.wire.memory import MemoryLink


class CountedEnds(ToyEnds):
    """Notes of how many rows each call of the head was; may fail."""

    def __init__(self, ends: ModelEnds | None = None) -> None:
        self.ends = ends or ToyEnds()
        self.calls: list[int] = []
        self.error: Exception | None = None

    def embed(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        return self.ends.embed(ids, position)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls.append(hidden.shape[1])
        if self.error is not None:
            raise self.error
        return self.ends.logits(hidden)


class LinearEnds(ToyEnds):
    """A head of its own; `off` is added where it computes more rows than one."""

    def __init__(self, head: nn.Module, off: float = 0.0) -> None:
        self.head, self.off = head, off

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(hidden)
        return logits + self.off * (hidden.shape[1] > 1)


def toy_head(ends: ToyEnds, rows: int = MOST_ROWS) -> OutputHead:
    """Its head over `rows` at once."""
    model = AskerModel(
        MODEL, WEIGHTS, TOTAL_LAYERS, HIDDEN, PRIME, 64, ends, ToyText(), False, rows
    )
    return OutputHead(model)


class AtOnce:
    """Sends what a shard answered within 10 ms together, as hosts do that compute batches."""

    def __init__(self) -> None:
        self._answers: list[tuple[MemoryLink, Result]] = []

    def __call__(self, link: MemoryLink, result: Result) -> None:
        self._answers.append((link, result))
        if len(self._answers) == 1:
            asyncio.get_running_loop().call_later(0.01, self._send)

    def _send(self) -> None:
        for link, result in self._answers:
            if not link.is_closed:
                link.send(result)
        self._answers.clear()


ROWS = [torch.full((1, 1, HIDDEN), float(number)) for number in range(12)]


def test_generations_at_once_share_calls_and_say_what_each_says_alone() -> None:
    prompts, count = [[number, 1, 4] for number in range(1, 7)], 20

    async def main() -> None:
        network, ends = ToyNetwork(), CountedEnds()
        reply = AtOnce()
        for _ in prompts:  # a link delivers one answer in each turn of the loop
            network.add("0-7", streams=1).reply = reply
        orchestrator, sessions = toy_orchestrator(network, ends=ends)

        async def answer(prompt: list[int]) -> list[int]:
            async for frame in orchestrator.chat(toy_request(prompt, count, f"r{prompt[0]}")):
                if isinstance(frame, Done):
                    return list(frame.token_ids)
            raise AssertionError("no end")

        said = await asyncio.gather(*map(answer, prompts))
        assert said == [expected_tokens(prompt, count) for prompt in prompts]
        assert len(ends.calls) < len(prompts) * count / 3
        assert set(ends.calls) <= {1, 2, 4, 8}, "sizes that were checked"
        await sessions.close()

    run_virtually(main)


async def test_rows_beyond_the_most_are_another_call_and_each_gets_its_own() -> None:
    ends = CountedEnds()
    head = toy_head(ends)
    said = await asyncio.gather(*map(head.logits, ROWS))
    assert ends.calls == [8, 4]
    for row, logits in zip(ROWS, said, strict=True):
        assert torch.equal(logits, ToyEnds().logits(row)[0])


async def test_a_head_whose_bits_depend_on_the_batch_computes_each_row_alone() -> None:
    ends = CountedEnds()
    await asyncio.gather(*map(toy_head(ends, rows=1).logits, ROWS))
    assert ends.calls == [1] * len(ROWS)


async def test_who_gives_up_is_not_computed() -> None:
    ends = CountedEnds()
    head = toy_head(ends)
    tasks = [asyncio.create_task(head.logits(row), name="row") for row in ROWS[:2]]
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert torch.equal(await tasks[1], ToyEnds().logits(ROWS[1])[0])
    assert ends.calls == [1]


async def test_what_the_head_raises_reaches_each_who_waits() -> None:
    ends = CountedEnds()
    head = toy_head(ends)
    ends.error = RuntimeError("no memory")
    said = await asyncio.gather(*map(head.logits, ROWS[:2]), return_exceptions=True)
    assert [str(error) for error in said] == ["no memory"] * 2
    ends.error = None
    assert torch.equal(await head.logits(ROWS[3]), ToyEnds().logits(ROWS[3])[0])


@pytest.mark.parametrize(("off", "rows"), [(0.0, MOST_ROWS), (1e-6, 1)])
def test_the_bits_decide_how_many_rows_go_together(off: float, rows: int) -> None:
    assert rows_at_once(LinearEnds(nn.Identity(), off), 16) == rows


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_the_compiled_head_computes_rows_together(quant: Quant) -> None:
    torch.manual_seed(0)
    head = nn.Linear(256, 1000, bias=False).requires_grad_(False)
    products, _ = stored_products({"head": (head,)}, quant, None)
    ends = LinearEnds(CompiledLinear(products["head"], 1, None))
    assert rows_at_once(ends, 256) == MOST_ROWS


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoints_rows_together_have_the_bits_of_each_alone(
    tmp_path_factory: pytest.TempPathFactory, dtype: str
) -> None:
    directory = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(directory, "llama", layers=1, vocab=4096)
    cache = tmp_path_factory.mktemp("cache")
    model_id = read_manifest(directory, model_id=MODEL, cache_dir=cache).model_id
    model, reasons = load_asker(directory, model_id, AskerOptions(dtype, "cpu", 1, cache))
    assert any(reason.startswith("head: ") for reason in reasons)
    rows = torch.randn(7, 1, 1, model.hidden_size).unbind()
    counted = CountedEnds(model.own_ends)
    head = OutputHead(replace(model, ends=counted))

    async def together() -> list[torch.Tensor]:
        return await asyncio.gather(*map(head.logits, rows))

    for row, logits in zip(rows, asyncio.run(together()), strict=True):
        assert torch.equal(logits, model.own_ends.logits(row)[0])
    assert len(counted.calls) == (7 if model.head_rows == 1 else -(-7 // model.head_rows))


def test_how_long_a_text_may_be_is_said_by_the_class_where_the_config_leaves_it_out(
    tmp_path: Path,
) -> None:
    """As those of Gemma 3 4B, 12B and 27B do."""
    directory = make_checkpoint(tmp_path / "toy", "gemma3", layers=1)
    config = json.loads((directory / "config.json").read_text())
    assert config.pop("max_position_embeddings") == 1024
    (directory / "config.json").write_text(json.dumps(config))
    model, _ = load_asker(directory, MODEL, AskerOptions("fp32", "cpu", 1, tmp_path, thin="always"))
    assert model.max_positions == 131072
