"""Attacks as real jobs: none escapes, each ends as an error or harmlessly, the runner lives on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
from nnsight.modeling.transformers import TransformersModel

from mesh.errors import JobFailed
from mesh.interventions.jail.limits import JobLimits
from tests.interventions.cases import CASES, Parts
from tests.interventions.jail.hostile_bodies import DEEDS, WASTE
from tests.interventions.jail.trapped import TrapField
from tests.interventions.jobs import hostile_jobs
from tests.interventions.jobworld import Bench, as_client, bench, request_of, shards
from tests.interventions.worlds import equal

BODIES = {**DEEDS, **WASTE}
SAMPLE = [
    *list(DEEDS)[::5],
    "time/loop_that_catches_everything", "time/endless_printing", "space/tensor",
    "space/fork_bomb", "space/huge_result",
]  # fmt: skip
LIMITS = JobLimits(
    wall_s=3.0, cpu_s=3, memory_bytes=512 << 20, result_bytes=1 << 20, log_bytes=1 << 16
)

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Bench]:
    async with shards(["llama"], tmp_path) as host, bench(host, limits=LIMITS) as running:
        yield running


async def outcome(
    here: Bench, request: bytes, *, trusted: bool, compress: bool
) -> tuple[bytes, str]:
    """What a job gave back, and what was said when it gave nothing."""
    here.trusted = trusted
    here.lines.clear()
    begun = time.monotonic()
    try:
        return await here.run(request, here.place("llama", 1), compress=compress), ""
    except JobFailed as error:
        return b"", str(error)
    finally:
        assert time.monotonic() - begun < 120


async def escapes(here: Bench, names: Iterable[str], *, trusted: bool) -> dict[str, str]:
    """The bodies that got through as jobs, and how; with a trusted key each must have begun."""
    field, found = await asyncio.to_thread(TrapField), {}
    try:
        for name in names:
            field.reset()
            told = {**field.traps()}
            request = await asyncio.to_thread(
                request_of,
                lambda model, name=name, told=told: hostile_jobs.trace(model, BODIES[name], told),
                compress=False,
            )
            result, said = await outcome(here, request, trusted=trusted, compress=False)
            how = field.escaped(result, said.encode(), here.lines)
            if trusted and "begun" not in here.lines:
                how += f"; never began: {said}"
            if not result and not said:
                how += "; ended without a word"
            if how:
                found[name] = how
    finally:
        await asyncio.to_thread(field.close)
    return found


async def payload_escapes(here: Bench) -> dict[str, str]:
    field, found = await asyncio.to_thread(TrapField), {}
    try:
        for trusted in (True, False):
            for name in hostile_jobs.payloads(field.traps()):
                field.reset()
                request = hostile_jobs.payloads(field.traps())[name]
                result, said = await outcome(here, request, trusted=trusted, compress=False)
                how = field.escaped(result, b"", here.lines)
                if result or not said or how:
                    found[f"{name} {trusted}"] = how or "gave a result"
        for name, request in (await asyncio.to_thread(hostile_jobs.bombs)).items():
            result, said = await outcome(here, request, trusted=False, compress=True)
            if result or not said:
                found[name] = said
    finally:
        await asyncio.to_thread(field.close)
    return found


def test_there_are_enough_attacks() -> None:
    field = TrapField()
    try:
        payloads = len(hostile_jobs.payloads(field.traps()))
    finally:
        field.close()
    assert 2 * payloads + len(SAMPLE) >= 80
    assert len(BODIES) >= 150


@pytest.mark.slow
async def test_attacks_as_jobs(here: Bench) -> None:
    assert await payload_escapes(here) == {}
    assert await escapes(here, SAMPLE, trusted=True) == {}
    assert await escapes(here, SAMPLE[:10], trusted=False) == {}
    await _honest_job(here)


@pytest.mark.chaos
async def test_the_whole_battery_as_jobs(here: Bench) -> None:
    assert await escapes(here, BODIES, trusted=True) == {}
    assert await escapes(here, BODIES, trusted=False) == {}
    await _honest_job(here)


async def _honest_job(here: Bench) -> None:
    """The runner and the shards are as they were."""
    here.trusted = False
    (jail,) = here.runner.jails.live
    assert jail.alive
    assert jail.running == 0
    first = await as_client(here, "llama", 3, _logits)
    second = await as_client(here, "llama", 1, _logits)
    equal(first, second, 0.0)


def _logits(model: TransformersModel) -> Any:
    return CASES["logits"](Parts(model))
