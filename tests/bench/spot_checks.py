"""What spot checks cost a generation: tokens per second with them at their default beside without.

Two askers of one process take turns, one with checks and one without, over the same two hops; two
processes of the same code would differ by up to 5 %. The hosts that check are machines of their
own, so they have a core of their own here. The cores of one machine share caches and power, though:
what one does slows the other, which no other machine would. So that core never rests, in either
turn: when nothing is to be checked, a process of the lowest priority computes on it.
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
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from mesh.models.builtin import checkpoint_dir
from mesh.pipeline.audit import NEWCOMER_SESSIONS
from mesh.pipeline.engine import Engine
from mesh.sections import DistributedInferenceSection
from mesh.shard.hosting import HostSpec, ShardHost
from tests import secure
from tests.bench.mesh_speed import pin
from tests.bench.noise import Meter
from tests.chaos.lab import MODEL, Lab, ask, open_lab, port_of

ROUNDS, TOKENS = 80, 200
QUIET, PAUSE_S, IMPORT_S = 0.15, 0.2, 5.0
HALVES = ("0-3", "4-7")
_IDLE_WORK = """
import os, torch
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
torch.set_num_threads(1)
a = torch.ones(256, 256)
while True:
    a @ a
"""


@asynccontextmanager
async def _replicas(directory: Path) -> AsyncIterator[ShardHost]:
    """A second shard process with the same halves."""
    loads = tuple(
        {"directory": str(checkpoint_dir()), "model_id": MODEL, "layers": half, "dtype": "fp32"}
        for half in HALVES
    )
    host = ShardHost(HostSpec(secure.start_command(directory), loads), lambda: None)
    host.start()
    try:
        await host.wait_settled()
        yield host
    finally:
        await host.stop()


def _agreed(engine: Engine) -> int:
    return sum(row["checks"]["agreed"] for row in engine.oversight.rows())


async def _speed(engine: Engine, number: int, own: list[int]) -> tuple[float, float]:
    """Tokens per second of one answer, and what share of a core others used meanwhile."""
    await asyncio.sleep(PAUSE_S)  # the last answer's checks end
    meter = Meter(own)
    told = await ask(engine, [40 + number + i for i in range(16)], TOKENS)
    assert told.done is not None, told.error
    assert told.route() == ["serving-0", "serving-1"], "the answer came over other hosts"
    return told.done.tokens_per_second, meter.foreign()


async def _rounds(checking: Engine, trusting: Engine, own: list[int]) -> list[float]:
    """Speed with checks as a share of that without, of each quiet round."""
    kept = []
    for number in range(ROUNDS):
        turns = (checking, trusting) if number % 2 else (trusting, checking)
        told = {engine: await _speed(engine, number, own) for engine in turns}
        if max(foreign for _, foreign in told.values()) < QUIET:
            kept.append(told[checking][0] / told[trusting][0])
    return kept


async def _measure(directory: Path) -> dict[str, Any]:
    probability = DistributedInferenceSection().spot_check_probability
    async with open_lab(directory) as lab, _replicas(directory) as replicas:
        own = _place(lab, replicas)
        shards = [
            lab.advertise(f"{name}-{number}", half, port)
            for name, port in (("serving", lab.port), ("spare", port_of(replicas)))
            for number, half in enumerate(HALVES)
        ]
        async with (
            lab.asker(shards, spot_checks=probability, stall_limit_s=30.0) as checking,
            lab.asker(shards, stall_limit_s=30.0) as trusting,
        ):
            with _busy_core(1) as pid:
                own.append(pid)
                for number in range(2 * NEWCOMER_SESSIONS):  # every host is new at first
                    await _speed(checking, number, own)
                    await _speed(trusting, number, own)
                before = _agreed(checking)
                kept = await _rounds(checking, trusting, own)
            checks = _agreed(checking) - before
    assert checks > 0, "no check ran: there is nothing to measure"
    low, _, high = statistics.quantiles(kept, n=4)
    return {
        "probability": probability,
        "speed_ratio": round(statistics.median(kept), 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "quiet_rounds": len(kept),
        "checks_that_agreed": checks,
    }


@contextmanager
def _busy_core(core: int) -> Iterator[int]:
    """A process that computes on `core` whenever nobody else wants to; gives its id."""
    process = subprocess.Popen([sys.executable, "-c", _IDLE_WORK])
    try:
        time.sleep(IMPORT_S)
        pin(process.pid, core)
        yield process.pid
    finally:
        process.kill()
        process.wait(10)


def _place(lab: Lab, replicas: ShardHost) -> list[int]:
    """Asker and hops on one core, so that all their work counts, who checks on the other; ids."""
    pin(os.getpid(), 0)  # first, for it takes its children with it
    pids = []
    for host, core in ((lab.host, 0), (replicas, 1)):
        assert host._child is not None
        pin(host._child.pid, core)
        pids.append(host._child.pid)
    return pids


def measure() -> dict[str, Any]:
    """Ratios within each round; the median and quartiles over rounds."""
    with tempfile.TemporaryDirectory(prefix="hearthnet-bench-") as name:
        return asyncio.run(_measure(Path(name)))


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
