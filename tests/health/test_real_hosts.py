"""Spot checks and bounds over real shard processes, real sockets and the built-in model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mesh.config import Config
from mesh.discovery.advertisement import Advertisement
from mesh.errors import NoRoute
from mesh.models.local import find_local_models
from mesh.pipeline.checkpoint import load_asker
from mesh.pipeline.commands import AskerOptions, EngineSettings, Offer, RouteLimits
from mesh.pipeline.engine import Engine
from mesh.pipeline.watch.sanity import Envelope
from mesh.shard.device import DTYPES
from mesh.shard.supervisor import ShardSupervisor
from mesh.types import (
    Done,
    GenerationRequest,
    LayerRange,
    ModelId,
    NodeId,
    RouteHop,
    SamplingParams,
)
from mesh.wire.messages import Hello
from tests import secure
from tests.fakes import no_judge
from tests.interventions.tap_client import RawClient, in_thread
from tests.interventions.weight_attacks import PROTOCOL, Attacker, Exchange

TOKENS = 60
PROMPTS = ["The fox", "Once upon a time"]


async def no_home() -> list[RouteHop]:
    raise NoRoute("there is no home.", fix="None.")


@asynccontextmanager
async def asker(
    cache: Path, *, dtype: str = "fp32", **settings: Any
) -> AsyncIterator[tuple[Engine, ModelId, list[ShardSupervisor]]]:
    """An asker of the built-in model in two halves, each held by two hosts."""
    (model,) = await asyncio.to_thread(lambda: find_local_models(Config(), cache))
    middle = model.total_layers // 2
    loads = [
        {"directory": model.directory, "model_id": model.model_id, "layers": str(span),
         "dtype": dtype, "advertise_host": "127.0.0.1"}
        for span in (LayerRange(0, middle), LayerRange(middle, model.total_layers))
    ]  # fmt: skip
    async with AsyncExitStack() as stack:
        hosts = []
        for node in ("attic", "kitchen"):
            hello = Hello(node, node, "tensors", "test")
            hosting = secure.hosting(cache, *loads, hello=hello)
            hosts.append(await stack.enter_async_context(hosting))
        options = AskerOptions("fp32", "cpu", 1, cache)
        ends, _ = await asyncio.to_thread(
            load_asker, Path(model.directory), model.model_id, options
        )
        engine = Engine(
            ends,
            NodeId("asker"),
            EngineSettings(RouteLimits(16, False), 30.0, "fp16", str(cache), False, 99, **settings),
            no_home,
            no_judge,
            secure.dial,
        )
        engine.shards.replace(
            [
                Offer(Advertisement(hosted.descriptor, hosted.health))
                for each in hosts
                for hosted in each.shards.values()
            ]
        )
        yield engine, model.model_id, hosts
        await engine.close()


async def answer(engine: Engine, model: ModelId, prompt: str) -> Done:
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    request = GenerationRequest(prompt, model, prompt=prompt, sampling=sampling)
    async for frame in engine.chat(request):
        if isinstance(frame, Done):
            return frame
    raise AssertionError("the stream did not end")


@pytest.mark.slow
async def test_honest_hosts_are_never_accused_with_halves_on_the_wire(tmp_path: Path) -> None:
    async with asker(tmp_path, spot_check_probability=1.0) as (engine, model, _):
        for prompt in PROMPTS:
            done = await answer(engine, model, prompt)
            assert done.failovers == 0
        await engine.spot_checks.settled()
        assert engine.oversight.take_events() == []
        checks = [row["checks"] for row in engine.oversight.rows()]
        agreed = sum(count.get("agreed", 0) for count in checks)
        print(f"\n{agreed} checks over {len(PROMPTS) * TOKENS * 2} steps of hops, all agreed")
        assert agreed > 20
        assert all(set(count) == {"agreed"} for count in checks if count)
        assert engine.oversight.envelope.is_known
        weights = engine.model.weights_sha256
        assert (await asyncio.to_thread(Envelope.read, tmp_path, weights)).is_known


async def attack(host: ShardSupervisor, width: int, dtype: torch.dtype) -> None:
    """Everything that a job can say to change the weights of the host's shards, once each."""
    for hosted in host.shards.values():
        span = hosted.descriptor.layers
        client = RawClient(hosted.descriptor)
        for deed in PROTOCOL.values():
            session = await client.open(span)
            await in_thread(session, partial(_do, deed, span.start, width, dtype))
            session.close()
        await client.close()


def _do(
    deed: Callable[[Attacker], None],
    layer: int,
    width: int,
    dtype: torch.dtype,
    exchange: Exchange,
) -> None:
    deed(Attacker(exchange, layer, width, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
async def test_attacks_on_weights_change_no_answer_and_leave_their_host_above_suspicion(
    dtype: str, tmp_path: Path
) -> None:
    """Plain kernels, whose weights chat and jobs share, and packed ones."""
    checked = asker(tmp_path, dtype=dtype, spot_check_probability=1.0)
    async with checked as (engine, model, hosts):
        before = [await answer(engine, model, prompt) for prompt in PROMPTS]
        attacking = asyncio.create_task(attack(hosts[0], engine.model.hidden_size, DTYPES[dtype]))
        during = []
        while not attacking.done():
            during += [await answer(engine, model, prompt) for prompt in PROMPTS]
        await attacking
        after = [await answer(engine, model, prompt) for prompt in PROMPTS]
        await engine.spot_checks.settled()
        said = [done.token_ids for done in before]
        rounds = len(during) // len(said) + 1
        assert [done.token_ids for done in (*during, *after)] == said * rounds
        assert sum(done.failovers for done in (*before, *during, *after)) == 0
        assert engine.oversight.take_events() == []
        for host in hosts:
            assert not host.failed
            assert len(host.shards) == 2
