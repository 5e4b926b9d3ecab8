"""What spot checks cost a generation: tokens per second with them at their default beside without.

Two askers of one process take turns, one with checks and one without, over the same two hops; what
differs is the checks alone (two processes of the same code differ by up to 5 %). The hosts that
check are machines of their own, so they have a core of their own here.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mesh.models.builtin import checkpoint_dir
from mesh.pipeline.audit import NEWCOMER_SESSIONS
from mesh.pipeline.engine import Engine
from mesh.sections import DistributedInferenceSection
from mesh.shard.hosting import HostSpec, ShardHost
from tests import secure
from tests.bench.mesh_speed import pin
from tests.bench.noise import wait_for_idle
from tests.chaos.lab import MODEL, Lab, ask, open_lab, port_of

ROUNDS, TOKENS = 100, 200
HALVES = ("0-3", "4-7")


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


async def _speed(engine: Engine, number: int) -> float:
    """Tokens per second of one answer, which nothing else disturbs."""
    await asyncio.to_thread(wait_for_idle)
    told = await ask(engine, [40 + number + i for i in range(16)], TOKENS)
    assert told.done is not None, told.error
    assert told.route() == ["serving-0", "serving-1"], "the answer came over other hosts"
    return told.done.tokens_per_second


async def _measure(directory: Path) -> dict[str, Any]:
    probability = DistributedInferenceSection().spot_check_probability
    async with open_lab(directory) as lab, _replicas(directory) as replicas:
        _place(lab, replicas)
        shards = [
            lab.advertise(f"{name}-{number}", half, port)
            for name, port in (("serving", lab.port), ("spare", port_of(replicas)))
            for number, half in enumerate(HALVES)
        ]
        patient = {"stall_limit_s": 30.0}
        async with (
            lab.asker(shards, spot_checks=probability, **patient) as checking,
            lab.asker(shards, **patient) as trusting,
        ):
            for number in range(2 * NEWCOMER_SESSIONS):  # every host is new at first
                await _speed(checking, number)
                await _speed(trusting, number)
            before, kept = _agreed(checking), []
            for number in range(ROUNDS):
                turns = (checking, trusting) if number % 2 else (trusting, checking)
                speeds = {engine: await _speed(engine, number) for engine in turns}
                kept.append(speeds[checking] / speeds[trusting])
            checks = _agreed(checking) - before
    assert checks > 0, "no check ran: there is nothing to measure"
    low, _, high = statistics.quantiles(kept, n=4)
    return {
        "probability": probability,
        "speed_ratio": round(statistics.median(kept), 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "rounds": len(kept),
        "checks_that_agreed": checks,
    }


def _place(lab: Lab, replicas: ShardHost) -> None:
    """Asker and hops on one core, so that all their work counts; who checks on the other."""
    for host, core in ((lab.host, 0), (replicas, 1)):
        assert host._child is not None
        pin(host._child.pid, core)
    pin(os.getpid(), 0)


def measure() -> dict[str, Any]:
    """Ratios within each round; the median and quartiles over rounds."""
    with tempfile.TemporaryDirectory(prefix="hearthnet-bench-") as name:
        return asyncio.run(_measure(Path(name)))


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
