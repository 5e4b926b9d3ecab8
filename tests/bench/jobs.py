"""What a job costs beside what it does: its start, a trace without taps, each tap, each layer read.

Everything is real: the jail, the relay, links over TLS, a shard process; the chat it is compared
with goes over the same shards. The model is tiny, so that what is measured is not arithmetic.
"""

# ruff: noqa: F841 - names of a trace are what comes back from its job

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nnsight
import torch
from nnsight.modeling.transformers import TransformersModel

from mesh.pipeline.checkpoint import load_asker
from mesh.pipeline.commands import AskerOptions
from mesh.shard.supervisor import ShardSupervisor
from mesh.types import ModelId
from tests.interventions.jobworld import (
    ROUTES,
    Bench,
    bench,
    loaded,
    request_of,
    shards,
)
from tests.interventions.worlds import checkpoint
from tests.mesh_e2e.spread import Spread, greedy

IDS = list(range(5, 69))
ROUNDS = 40
NEW_TOKENS = 32
HOPS = 3


def empty(model: TransformersModel) -> None:
    with model.session():
        done = nnsight.save(1)


def one_trace(model: TransformersModel) -> None:
    with model.trace(torch.tensor([IDS])):
        logits = model.output.logits[:, -1].save()


def many(model: TransformersModel) -> None:
    """Times inside one job, in milliseconds, by what its traces do."""
    with model.session():
        import time

        taken = nnsight.save({"no_taps": [], "one_tap": [], "six_taps": [], "every_layer": []})
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            with model.trace(torch.tensor([IDS])):
                out = model.output.logits
            taken["no_taps"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            with model.trace(torch.tensor([IDS])):
                a = model.model.layers[2].mlp.output[:, -1:]
                out = model.output.logits
            taken["one_tap"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            with model.trace(torch.tensor([IDS])):
                for layer in model.model.layers:
                    layer.mlp.output[:, -1:] *= 1.5
                out = model.output.logits
            taken["six_taps"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            with model.trace(torch.tensor([IDS])):
                seen = [layer.output for layer in model.model.layers]
                out = model.output.logits
            taken["every_layer"].append(time.perf_counter() - begun)


def generating(model: TransformersModel) -> None:
    with model.session():
        import time

        taken = nnsight.save([])
        for _ in range(5):
            begun = time.perf_counter()
            with model.generate(
                torch.tensor([IDS]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
                do_sample=False,
            ) as tracer:  # fmt: skip
                ids = tracer.result
            taken.append((time.perf_counter() - begun) / NEW_TOKENS)


async def _job_ms(here: Bench, trace: Callable[[TransformersModel], None]) -> list[float]:
    request = await asyncio.to_thread(request_of, trace)
    place = here.place("llama", HOPS)
    taken = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        await here.run(request, place)
        taken.append((time.perf_counter() - begun) * 1e3)
    return taken


async def _inside(here: Bench, trace: Callable[[TransformersModel], None]) -> Any:
    request = await asyncio.to_thread(request_of, trace)
    return loaded(await here.run(request, here.place("llama", HOPS)))["taken"]


async def _chat(host: ShardSupervisor, cache_dir: Path) -> dict[str, float]:
    """Milliseconds of the same forward, and per token of the same generation, in chat."""
    directory = Path(checkpoint("llama").directory)
    options = AskerOptions("fp32", "cpu", 1, cache_dir)
    model, _ = await asyncio.to_thread(load_asker, directory, ModelId("llama"), options)
    mesh = Spread(model, host, ModelId("llama"))
    await mesh.use(ROUTES[HOPS])
    forwards, tokens = [], []
    # Each prompt begins differently, or only the last token of it would be computed.
    for number in range(ROUNDS):
        begun = time.perf_counter()
        await mesh.generate(greedy([100 + number, *IDS[1:]], 1, f"f{number}"))
        forwards.append((time.perf_counter() - begun) * 1e3)
    for number in range(5):
        begun = time.perf_counter()
        await mesh.generate(greedy([200 + number, *IDS[1:]], NEW_TOKENS, f"t{number}"))
        tokens.append((time.perf_counter() - begun) * 1e3 / NEW_TOKENS)
    await mesh.close()
    return {"forward_ms": statistics.median(forwards), "token_ms": statistics.median(tokens)}


async def _measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        async with shards(["llama"], Path(directory)) as host, bench(host) as here:
            begun = time.perf_counter()
            await _inside(here, generating)
            cold_s = time.perf_counter() - begun
            traces = await _inside(here, many)
            token_ms = statistics.median(await _inside(here, generating)) * 1e3
            start, whole = await _job_ms(here, empty), await _job_ms(here, one_trace)
            chat = await _chat(host, Path(directory))
    ms = {name: statistics.median(values) * 1e3 for name, values in traces.items()}
    return {
        "first_job_with_a_cold_jail_s": round(cold_s, 1),
        "empty_job_ms": _p(start),
        "job_with_one_trace_ms": _p(whole),
        "trace_without_taps_ms": round(ms["no_taps"], 2),
        "trace_without_taps_to_chat": round(ms["no_taps"] / chat["forward_ms"], 2),
        "generated_token_to_chat": round(token_ms / chat["token_ms"], 2),
        "one_tap_adds_ms": round(ms["one_tap"] - ms["no_taps"], 2),
        "each_of_six_taps_adds_ms": round((ms["six_taps"] - ms["no_taps"]) / 6, 2),
        "each_layer_read_adds_ms": round((ms["every_layer"] - ms["no_taps"]) / 6, 2),
        "chat": {name: round(value, 2) for name, value in chat.items()},
    }


def _p(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100)
    return {"p50": round(cuts[49], 1), "p95": round(cuts[94], 1)}


def measure() -> dict[str, Any]:
    """Milliseconds on this machine over three hops; the ``..._to_chat`` ratios travel."""
    return asyncio.run(_measure())
