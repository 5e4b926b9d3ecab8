"""Many jobs at once: nobody gets anybody else's values, and nothing piles up."""

# ruff: noqa: F841 - names of a trace are what comes back from its job

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from nnsight.modeling.transformers import TransformersModel

from tests.interventions.jobworld import Bench, bench, loaded, request_of, shards
from tests.interventions.worlds import equal, whole

CLIENTS, JOBS_EACH = 8, 25
_GROWTH_BYTES = 64 << 20

pytestmark = pytest.mark.timeout(900)


def request_for(number: int) -> bytes:
    """A job whose values are its own."""
    factor = 1.0 + number / 100

    def trace(model: TransformersModel) -> None:
        with model.trace(torch.tensor([[5 + number, 7, 9]])):
            model.model.layers[2].output[:] *= factor
            mine = model.model.layers[4].output.save()
            who = (factor * torch.ones(1)).save()

    return request_of(trace)


def expected(number: int) -> dict[str, Any]:
    factor = 1.0 + number / 100
    model = whole("llama")
    with model.trace(torch.tensor([[5 + number, 7, 9]])):
        model.model.layers[2].output[:] *= factor
        mine = model.model.layers[4].output.save()
    return {"mine": mine, "who": factor * torch.ones(1)}


Prepared = list[tuple[bytes, dict[str, Any]]]


async def _client(here: Bench, jobs: Prepared) -> None:
    for number, (request, values) in enumerate(jobs):
        saved = loaded(await here.run(request, here.place("llama", number % 3 + 1)))
        equal(saved, values, 0.0)


@pytest.mark.chaos
async def test_two_hundred_jobs_of_eight_clients_do_not_mix(tmp_path: Path) -> None:
    async with (
        shards(["llama"], tmp_path, max_tap_sessions=CLIENTS) as host,
        bench(host, max_running=CLIENTS) as here,
    ):
        # By one thread: neither nnsight's tracing nor the model it traces is for several.
        jobs = await asyncio.to_thread(
            lambda: [(request_for(n), expected(n)) for n in range(CLIENTS * JOBS_EACH)]
        )
        await _client(here, jobs[:2])
        assert host._child is not None
        watched = [psutil.Process(), psutil.Process(host._child.pid)]
        before = [process.memory_info().rss for process in watched]
        await asyncio.gather(*(_client(here, jobs[c::CLIENTS]) for c in range(CLIENTS)))
        after = [process.memory_info().rss for process in watched]
        assert all(b - a < _GROWTH_BYTES for a, b in zip(before, after, strict=True))
        (jail,) = here.runner._jails._jails.values()
        assert jail.running == 0
        assert here.jobs == 2 + CLIENTS * JOBS_EACH
