"""Traces through a real shard process: socket pair, relay, links, the device's queue."""

from __future__ import annotations

import asyncio
import socket
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mesh.interventions.channel import SocketChannel
from mesh.interventions.relay import HopSessions, relay
from mesh.interventions.skeleton import job_model, load_skeleton
from mesh.pipeline.links import HopLinks
from mesh.types import RouteHop
from tests import secure
from tests.interventions.cases import CASES, GRADIENTS, Parts
from tests.interventions.worlds import SPLITS, checkpoint, equal, whole
from tests.mesh_e2e.spread import Spread, greedy, hugging_face, spread

VALUES = (
    "logits", "every_layer", "inside_layers", "edit_in_place", "edit_the_residual_in_place",
    "skip_batched", "out_of_order", "error_of_the_user", "wrong_shape", "barrier", "generate_iter",
    "generate_steered", "generate_beams", "source_recursive", "logit_lens",
    "modules_called_by_hand", "weights_read", "cache_everything", "session", "attentions",
)  # fmt: skip
GRADIENT_CASES = ("at_boundaries", "of_the_residual", "edited", "across_a_session", "batched")


@asynccontextmanager
async def shards(family: str, hops: int, cache_dir: Path) -> AsyncIterator[Spread]:
    held = [layers for _, layers in SPLITS[hops]]
    directory = Path((await asyncio.to_thread(checkpoint, family)).directory)
    async with spread(directory, held, cache_dir) as mesh:
        yield mesh


async def run_job(mesh: Spread, family: str, hops: int, job: Callable[[Parts], Any]) -> Any:
    """A job in a thread of its own, as it would be in a process of its own."""
    hosted = {h.descriptor.layers: h.descriptor for h in mesh.host.shards.values()}
    route = [RouteHop(hosted[held], run) for run, held in SPLITS[hops]]
    lines = HopLinks(secure.dial)
    sessions = await HopSessions.open(route, lines)
    ours, theirs = socket.socketpair()
    passing = asyncio.create_task(relay(ours, sessions), name="relay")

    def work() -> Any:
        torch.set_num_threads(1)
        with theirs, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            skeleton = load_skeleton(checkpoint(family), dtype=torch.float32)
            layers = [run for run, _ in SPLITS[hops]]
            return job(Parts(job_model(skeleton, SocketChannel(theirs), layers, print)))

    try:
        return await asyncio.to_thread(work)
    finally:
        await asyncio.wait_for(passing, 10)
        sessions.close()
        await lines.close()


def on_one_machine(family: str, job: Callable[[Parts], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return job(Parts(whole(family)))


@pytest.mark.parametrize(("family", "hops"), [("llama", 3), ("gpt2", 2)])
async def test_real_shards_give_the_numbers_of_one_machine(
    family: str, hops: int, tmp_path: Path
) -> None:
    def job(parts: Parts) -> dict[str, Any]:
        found = {name: CASES[name](parts) for name in VALUES}
        return found | {name: GRADIENTS[name](parts) for name in GRADIENT_CASES}

    async with shards(family, hops, tmp_path) as mesh:
        found = await run_job(mesh, family, hops, job)
    expected = await asyncio.to_thread(on_one_machine, family, job)
    for name, value in expected.items():
        equal(found[name], value, 0.0 if name in VALUES else 1e-4)


async def test_chat_and_interventions_do_not_disturb_each_other(tmp_path: Path) -> None:
    prompt = list(range(5, 45))
    manifest = await asyncio.to_thread(checkpoint, "llama")
    expected_ids, _ = await asyncio.to_thread(hugging_face, Path(manifest.directory), prompt, 12)
    chats = 0

    async def chat(mesh: Spread, done: asyncio.Event) -> None:
        nonlocal chats
        while not done.is_set() or not chats:
            answer = await mesh.generate(greedy(prompt, 12, f"r{chats}"))
            assert list(answer.token_ids) == expected_ids
            chats += 1

    def job(parts: Parts) -> list[Any]:
        return [CASES[name](parts) for name in ("generate_steered", "cache_everything") * 3]

    async with shards("llama", 2, tmp_path) as mesh:
        await mesh.use([held for _, held in SPLITS[2]])
        done = asyncio.Event()
        chatting = asyncio.create_task(chat(mesh, done), name="chat")
        jobs = await asyncio.gather(*(run_job(mesh, "llama", 2, job) for _ in range(2)))
        done.set()
        await chatting
    expected = await asyncio.to_thread(on_one_machine, "llama", job)
    for found in jobs:
        equal(found, expected, 0.0)
