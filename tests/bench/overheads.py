"""What comes on top: two pipelines at once, and spot checks.

Three nodes hold the built-in model twice over. Per-call latency of two answers at once beside one
alone; tokens per second with spot checks at their default beside none, asked in turn.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import threading
from pathlib import Path
from typing import Any

from mesh.cli.local_node import LocalNode, start_hearth
from tests.bench.noise import wait_for_idle

SERVING = (("a", "0-3"), ("b", "4-7"), ("c", "0-7"))
TOKENS = 200
ROUNDS = 7
SPOT_CHECKS = "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__SPOT_CHECK_PROBABILITY"


def answer(asker: LocalNode, seed: int) -> dict[str, Any]:
    """The timings of one greedy answer."""
    response = asker.post(
        "/v1/completions",
        {"model": "builtin", "prompt": [40 + seed + i for i in range(16)], "max_tokens": TOKENS,
         "temperature": 0, "ignore_eos": True},
    )  # fmt: skip
    response.raise_for_status()
    timings: dict[str, Any] = response.json()["hearthnet"]["timings"]
    return timings


def latency_ms(timings: dict[str, Any]) -> float:
    return float(timings["first_token_ms"] + (TOKENS - 1) / timings["tokens_per_second"] * 1e3)


def together(asker: LocalNode, seed: int) -> float:
    """The mean latency of two answers at once."""
    results: list[float] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(latency_ms(answer(asker, seed + n))))
        for n in (0, 100)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statistics.mean(results)


def measure() -> dict[str, Any]:
    """Ratios within each round; medians over rounds."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        root = Path(name)

        def make(node: str, layers: str, **extra: str) -> LocalNode:
            flags = ("--layers", layers, "--threads", "1")
            return LocalNode(node, root / node, flags, {"OMP_NUM_THREADS": "1", **extra})

        checking = make("checking", "none")
        trusting = make("trusting", "none", **{SPOT_CHECKS: "0"})
        start_hearth([*(make(*serving) for serving in SERVING), checking, trusting], stack)
        for asker in (checking, trusting):
            asker.wait_ready()
            answer(asker, 0)
        slower, kept = [], []
        for number in range(ROUNDS):
            wait_for_idle()
            alone = latency_ms(answer(trusting, number))
            slower.append(together(trusting, number + 10) / alone)
            with_checks = answer(checking, number + 20)["tokens_per_second"]
            without = answer(trusting, number + 20)["tokens_per_second"]
            kept.append(with_checks / without)
    return {
        "two_pipelines_latency_ratio": round(statistics.median(slower), 3),
        "spot_checks_speed_ratio": round(statistics.median(kept), 3),
    }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
