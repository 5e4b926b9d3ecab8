"""Loading half of the 0.16B model from a warm page cache: reading, packing, checking, describing.

Each time in a process that does nothing else and has imported what a shard process imports.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bench.noise import wait_for_idle
from tests.checkpoints import make_large_checkpoint

AGAIN = 3
PROCESSES = 5


def measure() -> dict[str, Any]:
    """Milliseconds of the first load in a process and of those after it; medians, by format.

    ``weights`` is what the weights take in MB, ``grown_mb`` by how much the process has grown. What
    is in few bits was rounded by an earlier process.
    """
    found = {}
    with tempfile.TemporaryDirectory() as name:
        checkpoint = make_large_checkpoint(Path(name) / "model", "0.16B")
        for wanted in ("bf16", "fp32", "int8", "int4"):
            _in_child(checkpoint, wanted)  # hashes the checkpoint, and rounds it
            samples = []
            for _ in range(PROCESSES):
                wait_for_idle()
                samples.append(_in_child(checkpoint, wanted))
            found[wanted] = {key: statistics.median(s[key] for s in samples) for key in samples[0]}
    return found


def _in_child(checkpoint: Path, wanted: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.bench.load_speed", str(checkpoint), wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _loads(directory: Path, form: str) -> dict[str, float]:
    # Not above: only the child is to have these, and as a shard process has them.
    from mesh.processes.lean import import_modelling

    import_modelling()

    import gc

    import psutil
    import torch

    import mesh.shard.process  # noqa: F401 - what a shard process has imported
    from mesh.shard.commands import ShardRequest
    from mesh.shard.load_plan import HostedOn, plan_shard
    from mesh.shard.loading import load_shard
    from mesh.types import Endpoint, LayerRange, ModelId, NodeId

    torch.set_num_threads(1)
    gc.freeze()
    place = HostedOn(NodeId("here"), "here", Endpoint("ws://here"), torch.device("cpu"), 1)
    plain = ShardRequest(
        directory, ModelId("model"), LayerRange(0, 6), cache_dir=directory / "cache"
    )
    is_rounded = form.startswith("int")
    wanted = replace(plain, quant=form) if is_rounded else replace(plain, dtype=form)
    plan = plan_shard(wanted, place)
    before = psutil.Process().memory_full_info().uss
    loaded = load_shard(plan)
    grown_mb = (psutil.Process().memory_full_info().uss - before) / 2**20
    runtime = loaded.load()
    again = sorted(load_shard(plan_shard(wanted, place)).load_ms for _ in range(AGAIN))
    return {
        "first_ms": round(loaded.load_ms, 1),
        "again_ms": round(again[AGAIN // 2], 1),
        "weights_mb": round(runtime.weight_bytes / 2**20, 1),
        "grown_mb": round(grown_mb, 1),
    }


if __name__ == "__main__":
    print(json.dumps(_loads(Path(sys.argv[1]), sys.argv[2])))
