"""Runs hostile bodies one after the other in a jail and says which of them got through."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from mesh.interventions.jail.job import Jail, JailedJob
from mesh.interventions.jail.limits import Ending, JobLimits
from tests.interventions.jail.hostile_bodies import DEEDS, WASTE
from tests.interventions.jail.trapped import TrapField

RUN = "tests.interventions.jail.runner:run"
WARM = "tests.interventions.jail.runner:warm"
BODIES = {**DEEDS, **WASTE}
MEMORY_BYTES = 512 << 20
DEED_LIMITS = JobLimits(
    wall_s=3.0, cpu_s=3, memory_bytes=MEMORY_BYTES, result_bytes=1 << 20, open_files=64
)
WASTE_LIMITS = JobLimits(
    wall_s=0.6, cpu_s=3, memory_bytes=MEMORY_BYTES, result_bytes=1 << 20, open_files=64
)
UNBOUNDED = re.compile(r"kill\(-1\b|while[^\n]*:[^#]*\bfork\(")
"""Signals to everybody, and processes that are made without end."""
_PATIENCE_S = 5.0
_MOST_KEPT = 1 << 20


@asynccontextmanager
async def jail(without: str = "", *, namespaces: bool, max_jobs: int = 4) -> AsyncIterator[Jail]:
    """A jail that has imported torch; `without` names the walls to leave out."""
    started = await Jail.start(WARM, without, namespaces=namespaces, max_jobs=max_jobs)
    try:
        yield started
    finally:
        await started.stop()


async def read_all(job: JailedJob) -> bytes:
    """What the job sends until it ends; the beginning of it is kept."""
    loop, kept = asyncio.get_running_loop(), b""
    with contextlib.suppress(ConnectionError):
        while chunk := await loop.sock_recv(job.channel, 1 << 16):
            kept += chunk[: _MOST_KEPT - len(kept)]
    return kept


async def escape(cell: Jail, field: TrapField, name: str) -> str:
    """Run one body; how it got through, or nothing. A body that never began got through, too.

    Raises ValueError for one that would take the machine with it if its walls failed.
    """
    if unbounded := UNBOUNDED.search(BODIES[name]):
        raise ValueError(f"{name} does without a bound: {unbounded[0]!r}")
    field.reset()
    lines: list[str] = []
    limits = WASTE_LIMITS if name in WASTE else DEED_LIMITS
    begun_s = time.monotonic()
    job = await cell.start_job(
        RUN, field.payload(BODIES[name]), trusted=True, limits=limits, on_text=lines.append
    )
    async with job:
        reading = asyncio.create_task(read_all(job), name="read-channel")
        outcome = await job.outcome()
        took_s = time.monotonic() - begun_s
        async with asyncio.timeout(5):
            sent = await reading
    if not sent.startswith(b"begun\n"):
        return f"never began: {outcome.text}"
    if took_s > limits.wall_s + _PATIENCE_S:
        return f"ended only after {took_s:.1f} s"
    if name.startswith("space/") and outcome.peak_memory_bytes > MEMORY_BYTES + _base_bytes(cell):
        return f"took {outcome.peak_memory_bytes >> 20} MiB"
    if outcome.ending is Ending.FINISHED and name == "space/huge_result":
        return "the result was too large"
    return field.escaped(outcome.result, sent, lines)


def _base_bytes(cell: Jail) -> int:
    return 400 << 20  # what the warmed parent itself occupies, and then some


async def escapes(cell: Jail, names: Iterable[str]) -> dict[str, str]:
    """Run the bodies; those that got through, and how."""
    field = await asyncio.to_thread(TrapField)
    try:
        found = {name: await escape(cell, field, name) for name in names}
    finally:
        await asyncio.to_thread(field.close)
    return {name: how for name, how in found.items() if how}
