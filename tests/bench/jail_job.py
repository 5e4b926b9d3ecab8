"""What the jail costs: starting it, a job that does nothing, a traced job, the inner fence."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import torch

from mesh.interventions.jail.job import Jail
from mesh.interventions.jail.limits import JobLimits
from tests.interventions.jail import test_policy, toy_model
from tests.interventions.jail.processes import warmed_parent

EMPTY = "tests.interventions.jail.fenced:empty"
JOBS = 60


async def _times_ms(jail: Jail, entry: str, payload: bytes) -> list[float]:
    taken = []
    for _ in range(JOBS):
        begun_s = time.perf_counter()
        async with await jail.start_job(
            entry, payload, trusted=True, limits=JobLimits(wall_s=10)
        ) as job:
            outcome = await job.outcome()
        taken.append((time.perf_counter() - begun_s) * 1e3)
        assert outcome.ending == "finished", outcome.text
    return taken


def _trace_here_ms() -> float:
    """The same body in this process, which is what a job adds to."""
    taken = []
    model = toy_model.model()
    for _ in range(JOBS):
        begun_s = time.perf_counter()
        with model.trace(torch.ones(2, 3, 8)):
            model.layers[1].output.save()
        taken.append((time.perf_counter() - begun_s) * 1e3)
    return statistics.median(taken)


async def _measure() -> dict[str, Any]:
    begun_s = time.perf_counter()
    jail = await Jail.start(test_policy.WARM, namespaces=False)
    start_s = time.perf_counter() - begun_s
    payload = test_policy.payload_of("read_output")
    try:
        parent = warmed_parent()
        empty = await _times_ms(jail, EMPTY, b"")
        traced = await _times_ms(jail, test_policy.RUN, b"t" + payload)
        fenced = await _times_ms(jail, test_policy.RUN, b"u" + payload)
        resident_mb = parent.memory_info().rss >> 20
    finally:
        await jail.stop()
    here_ms = _trace_here_ms()
    beside_ms = statistics.median(traced) - here_ms
    return {
        "start_and_examine_s": round(start_s, 2),
        "parent_resident_mb": resident_mb,
        "empty_job_ms": {"p50": _p(empty, 50), "p95": _p(empty, 95)},
        "traced_job_ms": {"p50": _p(traced, 50), "p95": _p(traced, 95)},
        "trace_alone_ms": round(here_ms, 2),
        "job_beside_the_trace_ms": round(beside_ms, 1),
        "fenced_job_ms": {"p50": _p(fenced, 50), "p95": _p(fenced, 95)},
        "fenced_to_traced": round(statistics.median(fenced) / statistics.median(traced), 2),
    }


def _p(values: list[float], percent: int) -> float:
    return round(statistics.quantiles(values, n=100)[percent - 1], 1)


def measure() -> dict[str, Any]:
    """Milliseconds on this machine; `fenced_to_traced` is the ratio that travels."""
    return asyncio.run(_measure())
