"""Two answers at once beside one alone, over the same three nodes: latency per answer."""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mesh.cli.local_node import LocalNode, start_hearth
from tests.bench.noise import wait_for_idle

LAYERS = {"a": "0-2", "b": "3-5", "c": "6-7", "asker": "none"}
TOKENS = 200
ROUNDS = 7
NO_SPOT_CHECKS = {
    "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__SPOT_CHECK_PROBABILITY": "0",
    "OMP_NUM_THREADS": "1",
}


def latency_ms(asker: LocalNode, seed: int) -> float:
    """How long a greedy answer over all three takes."""
    response = asker.post(
        "/v1/completions",
        {"model": "builtin", "prompt": [40 + seed + i for i in range(16)], "max_tokens": TOKENS,
         "temperature": 0, "ignore_eos": True, "hearthnet": {"draft": False}},
    )  # fmt: skip
    response.raise_for_status()
    facts = response.json()["hearthnet"]
    assert len({hop["node"] for hop in facts["route"]}) == 3, facts["route"]
    timings = facts["timings"]
    return float(timings["first_token_ms"] + (TOKENS - 1) / timings["tokens_per_second"] * 1e3)


def measure() -> dict[str, Any]:
    """Latency of two at once as a multiple of one alone; the median over rounds."""
    slower = []
    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
        nodes = [
            LocalNode(
                name, Path(root) / name, ("--layers", layers, "--threads", "1"), NO_SPOT_CHECKS
            )
            for name, layers in LAYERS.items()
        ]
        start_hearth(nodes, stack)
        asker, pool = nodes[-1], stack.enter_context(ThreadPoolExecutor(2))
        asker.wait_ready()
        latency_ms(asker, 0)
        for number in range(ROUNDS):
            wait_for_idle()
            alone = latency_ms(asker, number)
            both = pool.map(lambda seed: latency_ms(asker, seed), (number + 20, number + 120))
            slower.append(statistics.mean(both) / alone)
    return {"latency_ratio": round(statistics.median(slower), 3), "rounds": ROUNDS}


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
