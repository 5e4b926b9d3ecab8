"""What spot checks cost a generation, in percent of its time.

Two measures. Within the answers of one asker: how much longer than others those tokens take during
which a check is under way; precise, because both kinds alternate within a second. And tokens per
second with checks at their default as a share of that without, two askers of one process taking
turns; this sees what every token costs as well, and a noise of some percent. The hosts that check
are machines of their own, so they have a core of their own here, on which a process of the lowest
priority computes when there is nothing to check: the cores of one machine share caches and power,
and another machine that begins to compute would slow nobody.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh.config.sections import DistributedInferenceSection
from mesh.models.builtin import checkpoint_dir
from mesh.pipeline.engine import Engine
from mesh.pipeline.watch.spot_checks import NEWCOMER_SESSIONS
from mesh.shard.supervisor import ShardSupervisor
from mesh.types import Done, GenerationRequest, SamplingParams, TokenDelta
from tests import secure
from tests.bench.mesh_speed import pin
from tests.chaos.lab import MODEL, Lab, open_lab, port_of

ROUNDS, TOKENS = 80, 200
PAUSE_S, IMPORT_S = 0.2, 5.0
HALVES = ("0-3", "4-7")
_IDLE_WORK = """
import os, torch
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
torch.set_num_threads(1)
a = torch.ones(256, 256)
while True:
    a @ a
"""


def _agreed(engine: Engine) -> int:
    return sum(row["checks"]["agreed"] for row in engine.oversight.rows())


@dataclass(frozen=True, slots=True)
class _Answer:
    """Tokens per second, and each token's milliseconds, apart for those under a check."""

    speed: float
    alone_ms: list[float]
    checked_ms: list[float]

    @property
    def cost(self) -> float:
        """The share of the time that was lost to checks."""
        usual = statistics.median(self.alone_ms)
        return sum(ms - usual for ms in self.checked_ms) / sum(self.alone_ms + self.checked_ms)


async def _answer(engine: Engine, number: int) -> _Answer:
    """One answer, after the checks of the last have ended."""
    await asyncio.sleep(PAUSE_S)
    request = GenerationRequest(
        f"bench-{number}",
        MODEL,
        prompt_ids=tuple(40 + number + i for i in range(16)),
        sampling=SamplingParams(max_tokens=TOKENS, ignore_eos=True),
    )
    times: dict[bool, list[float]] = {False: [], True: []}
    before: tuple[float, bool, int] | None = None
    async for frame in engine.chat(request):
        if isinstance(frame, TokenDelta):
            now = (time.perf_counter(), engine.spot_checks.running > 0, _agreed(engine))
            if before is not None:
                checked = before[1] or now[1] or before[2] != now[2]
                times[checked].append((now[0] - before[0]) * 1e3)
            before = now
        elif isinstance(frame, Done):
            nodes = [hop.shard.node_name for hop in frame.route]
            assert nodes == ["serving-0", "serving-1"], "the answer came over other hosts"
            speed = frame.tokens_per_second
    return _Answer(speed, times[False], times[True])


async def _rounds(checking: Engine, trusting: Engine) -> tuple[list[float], list[float]]:
    """Of each round: speed with checks as a share of that without, and what checks cost."""
    kept, costs = [], []
    for number in range(ROUNDS):
        turns = (checking, trusting) if number % 2 else (trusting, checking)
        told = {engine: await _answer(engine, number) for engine in turns}
        kept.append(told[checking].speed / told[trusting].speed)
        costs.append(told[checking].cost)
    return kept, costs


async def _measure(directory: Path) -> dict[str, Any]:
    probability = DistributedInferenceSection().spot_check_probability
    loads = (
        {"directory": str(checkpoint_dir()), "model_id": MODEL, "layers": half, "dtype": "fp32"}
        for half in HALVES
    )
    async with open_lab(directory) as lab, secure.hosting(directory, *loads) as replicas:
        _place(lab, replicas)
        shards = [
            lab.advertise(f"{name}-{number}", half, port)
            for name, port in (("serving", lab.port), ("spare", port_of(replicas)))
            for number, half in enumerate(HALVES)
        ]
        async with (
            lab.asker(shards, spot_checks=probability, stall_limit_s=30.0) as checking,
            lab.asker(shards, stall_limit_s=30.0) as trusting,
        ):
            with _busy_core(1):
                for number in range(2 * NEWCOMER_SESSIONS):  # every host is new at first
                    await _answer(checking, number)
                    await _answer(trusting, number)
                before = _agreed(checking)
                kept, costs = await _rounds(checking, trusting)
            checks = _agreed(checking) - before
    assert checks > 0, "no check ran: there is nothing to measure"
    return {
        "probability": probability,
        "checks_per_answer": round(checks / ROUNDS, 1),
        "cost_percent": round(100 * statistics.mean(costs), 2),
        "speed_ratio_quartiles": [round(value, 3) for value in statistics.quantiles(kept, n=4)],
        "rounds": ROUNDS,
    }


@contextmanager
def _busy_core(core: int) -> Iterator[None]:
    """A process that computes on `core` whenever nobody else wants to."""
    process = subprocess.Popen([sys.executable, "-c", _IDLE_WORK])
    try:
        time.sleep(IMPORT_S)
        pin(process.pid, core)
        yield
    finally:
        process.kill()
        process.wait(10)


def _place(lab: Lab, replicas: ShardSupervisor) -> None:
    """Asker and hops on one core, so that all their work counts; who checks on the other."""
    pin(os.getpid(), 0)  # first, for it takes its children with it
    for host, core in ((lab.host, 0), (replicas, 1)):
        assert host.pid is not None
        pin(host.pid, core)


def measure() -> dict[str, Any]:
    """What checks cost, the mean over answers; the speed beside that without, over rounds."""
    with tempfile.TemporaryDirectory(prefix="hearthnet-bench-") as name:
        return asyncio.run(_measure(Path(name)))


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
