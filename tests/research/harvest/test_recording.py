"""Harvests through real shards: the files, their values, and what is refused."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from mesh.accounts import allowances
from mesh.accounts.ledger import ResourceLedger
from mesh.clock import SystemClock
from mesh.errors import BadRequest, MeshError
from mesh.models.harvest import HarvestBatch, matches
from mesh.pipeline.checkpoint import load_asker
from mesh.pipeline.commands import AskerOptions, HarvestOrder
from mesh.pipeline.harvest import harvest
from mesh.pipeline.hop import Patience
from mesh.pipeline.links import HopLinks
from mesh.pipeline.model import AskerModel
from mesh.pipeline.prompts import Prompts
from mesh.pipeline.sessions import Sessions
from mesh.pipeline.watch.oversight import Oversight
from mesh.routing.cover import Candidate, CoverRules
from mesh.routing.router import ShardRouter
from mesh.shard.supervisor import ShardSupervisor
from mesh.types import LayerRange, ModelId
from tests import secure
from tests.checkpoints import make_checkpoint
from tests.mesh_e2e.spread import MODEL

LAYERS = 4
HALVES = (LayerRange(0, 2), LayerRange(2, 4))
TEXTS = (
    "The kettle sings on the hearth.",
    "Rain runs down the window while Anna reads to the cat, and nobody hears the door. " * 6,
    "a",
    "bread",
)
RUN = "0123456789abcdef"


class Field:
    """A checkpoint in a shard process that keeps harvests, and an asker."""

    def __init__(self, model: AskerModel, host: ShardSupervisor, files: Path) -> None:
        self.model = model
        self.host = host
        self.files = files
        router = ShardRouter(self, CoverRules())
        oversight = Oversight(SystemClock(), ceiling_s=30.0)
        self.prompts = Prompts(model.text, ResourceLedger(SystemClock(), allowances.ASKER))
        self.sessions = Sessions(
            HopLinks(secure.dial), router, SystemClock(), Patience(), oversight
        )

    def candidates(self, _model_id: ModelId) -> list[Candidate]:
        return [Candidate(hosted.descriptor, 0) for hosted in self.host.shards.values()]

    async def reap(self, pattern: str, batch: int = 0, **changes: Any) -> dict[str, Any]:
        fields = {"texts": TEXTS, "max_tokens": 200, **changes}
        order = HarvestOrder(HarvestBatch(RUN, batch, 1, "model.layers.", pattern), **fields)
        return await harvest(self.model, self.sessions, self.prompts, order)


@asynccontextmanager
async def field(tmp_path: Path, directory: Path) -> AsyncIterator[Field]:
    cache, files = tmp_path / "cache", tmp_path / "harvest"
    loads = (
        {"directory": str(directory), "model_id": MODEL, "layers": str(span), "dtype": "fp32",
         "advertise_host": "127.0.0.1"}
        for span in HALVES
    )  # fmt: skip
    async with secure.hosting(cache, *loads, harvest_dir=str(files)) as host:
        options = AskerOptions("fp32", "cpu", 1, cache)
        model, _ = await asyncio.to_thread(load_asker, directory, MODEL, options)
        here = Field(model, host, files)
        try:
            yield here
        finally:
            here.prompts.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "llama", layers=LAYERS)


def local(directory: Path, prompts: list[list[int]], module: str) -> torch.Tensor:
    """What the module puts out on one machine, (tokens, hidden)."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    seen: list[torch.Tensor] = []

    def keep(_m: Any, _a: Any, output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output)[0])

    model.get_submodule(module).register_forward_hook(keep)
    with torch.no_grad():
        for prompt in prompts:
            model(torch.tensor([prompt]))
    return torch.cat(seen)


def check(files: Path, directory: Path, result: dict[str, Any]) -> float:
    """Every file is what the index says; the largest relative error of its values."""
    worst = 0.0
    for entry in result["files"]:
        path = files / entry["file"]
        data = path.read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["bytes"], entry["sha256"])
        with safe_open(path, framework="pt") as stored:
            tensor = stored.get_tensor(entry["module"])
        assert (tensor.dtype, entry["dtype"]) == (torch.float32, "F32")
        assert tuple(tensor.shape) == (entry["rows"], entry["width"])
        expected = local(directory, result["prompts"], entry["module"])
        worst = max(worst, float((tensor - expected).abs().max() / expected.abs().max()))
    return worst


async def test_every_module_is_written_with_the_values_of_one_machine(
    directory: Path, tmp_path: Path
) -> None:
    async with field(tmp_path, directory) as mesh:
        result = await mesh.reap("model.layers.*.mlp")
        again = await mesh.reap("model.layers.[12]", batch=1)
        attention = await mesh.reap("model.layers.0.*", batch=2)
        inner = await mesh.reap("model.layers.3.mlp.*", batch=3)
    modules = [entry["module"] for entry in result["files"]]
    assert modules == [f"model.layers.{i}.mlp" for i in range(LAYERS)]
    assert [e["module"] for e in again["files"]] == ["model.layers.1", "model.layers.2"]
    assert {e["module"] for e in attention["files"]} == {
        "model.layers.0.input_layernorm", "model.layers.0.self_attn",
        "model.layers.0.post_attention_layernorm", "model.layers.0.mlp",
    }  # fmt: skip
    widths = {entry["module"].rpartition(".")[2]: entry["width"] for entry in inner["files"]}
    assert widths.keys() == {"gate_proj", "up_proj", "down_proj"}
    assert widths["gate_proj"] == widths["up_proj"] != widths["down_proj"]
    assert max(map(len, result["prompts"])) > 128, "no prompt takes several steps"
    worst = [
        await asyncio.to_thread(check, mesh.files, directory, one)
        for one in (result, again, attention, inner)
    ]
    assert max(worst) < 1e-5


async def until(condition: Callable[[], bool]) -> None:
    """Look at the disk until it holds: what a process of its own writes there tells nobody."""
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - as said
            await asyncio.sleep(0.01)


async def test_only_whole_batches_are_left_whatever_ends_one(
    directory: Path, tmp_path: Path
) -> None:
    async with field(tmp_path, directory) as mesh:
        folder = mesh.files / RUN

        def names(suffix: str = "") -> list[str]:
            return sorted(str(path.name) for path in folder.glob(f"*{suffix}"))

        # The same batch again, of other texts: the file takes the earlier one's place.
        first = await mesh.reap("model.layers.3")
        other = await mesh.reap("model.layers.3", texts=("different",))
        assert first["files"][0]["sha256"] != other["files"][0]["sha256"]
        whole = [other["files"][0]["file"].removeprefix(f"{RUN}/")]
        assert await asyncio.to_thread(names) == whole
        # What is no batch.
        for bad in ("../x", "a/b", "", "x" * 300):
            with pytest.raises(MeshError, match="batch"):
                await mesh.reap(bad)
        with pytest.raises(BadRequest, match="no tokens"):
            await mesh.reap("model.layers.*", texts=("",))
        # Whoever asked goes away.
        task = asyncio.create_task(mesh.reap("model.layers.*", batch=1, texts=TEXTS * 50))
        await until(lambda: bool(names(".tmp")))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not names(".tmp"))
        assert await asyncio.to_thread(names) == whole
        # The process that writes is killed; it comes back, and the batch is run again.
        task = asyncio.create_task(mesh.reap("model.layers.*", batch=2, texts=TEXTS * 20))
        await until(lambda: bool(names(".tmp")))
        killed = mesh.host.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        await asyncio.gather(task, return_exceptions=True)
        dead = {None, killed}
        await until(lambda: mesh.host.pid not in dead and len(mesh.host.shards) == len(HALVES))
        result = await mesh.reap("model.layers.*", batch=2, texts=TEXTS * 20)
        assert await asyncio.to_thread(check, mesh.files, directory, result) < 1e-5
        assert len(await asyncio.to_thread(names)) == 1 + LAYERS


@pytest.mark.parametrize(
    ("path", "pattern", "fits"),
    [
        ("model.layers.1.mlp", "model.layers.*.mlp", True),
        ("model.layers.1.mlp", "model.layers.*", False),
        ("model.layers.1", "model.layers.*", True),
        ("model.layers.12", "model.layers.?", False),
        ("model.layers.12", "model.layers.1[0-9]", True),
        ("model.layers.1.mlp", "*.*.*.*", True),
    ],
)
def test_a_star_does_not_reach_over_a_dot(path: str, pattern: str, fits: bool) -> None:
    assert matches(path, pattern) is fits


def test_a_batch_comes_back_from_its_fields_and_nothing_else_does() -> None:
    batch = HarvestBatch(RUN, 3, 100, "model.layers.", "model.layers.*")
    assert HarvestBatch.from_fields(batch.to_fields()) == batch
    for change in (
        {"run": "../../../../../.."}, {"run": RUN[:-1]}, {"batch": -1}, {"batch": True},
        {"batch": 10**6}, {"rows": 0}, {"rows": 1 << 40}, {"rows": None}, {"layer_prefix": "/"},
        {"layer_prefix": "model/layers."}, {"pattern": "a/b"}, {"pattern": None},
    ):  # fmt: skip
        fields: dict[str, Any] = {**batch.to_fields(), **change}
        if change == {"pattern": None}:
            continue  # the text None is a pattern that fits nothing
        with pytest.raises(BadRequest):
            HarvestBatch.from_fields(fields)
