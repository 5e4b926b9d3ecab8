"""What comes on top: two pipelines at once, and spot checks.

Per-call latency of two answers at once beside one alone, each over the same three nodes. Tokens per
second with spot checks at their default beside none, asked in turn, over two hops that two other
nodes hold as well: these do the checks.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mesh.cli.local_node import LocalNode, start_hearth
from mesh.pipeline.audit import NEWCOMER_SESSIONS
from tests.bench.noise import wait_for_idle

THIRDS = {"a": "0-2", "b": "3-5", "c": "6-7"}
HALVES_TWICE = {"a": "0-3", "b": "4-7", "c": "0-3", "d": "4-7"}
TOKENS = 200
ROUNDS = 7
SPOT_CHECKS = "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__SPOT_CHECK_PROBABILITY"
REPORTED_WITHIN_S = 10.0


def answer(asker: LocalNode, seed: int, hops: int) -> dict[str, Any]:
    """The timings of one greedy answer over that many nodes."""
    response = asker.post(
        "/v1/completions",
        {"model": "builtin", "prompt": [40 + seed + i for i in range(16)], "max_tokens": TOKENS,
         "temperature": 0, "ignore_eos": True},
    )  # fmt: skip
    response.raise_for_status()
    facts = response.json()["hearthnet"]
    nodes = {hop["node"] for hop in facts["route"]}
    assert len(nodes) == hops, f"the answer came over {nodes}"
    timings: dict[str, Any] = facts["timings"]
    return timings


def latency_ms(timings: dict[str, Any]) -> float:
    return float(timings["first_token_ms"] + (TOKENS - 1) / timings["tokens_per_second"] * 1e3)


def agreed(asker: LocalNode) -> int:
    """How many spot checks of this asker have ended well."""
    standings = [
        shard["standing"] or {}
        for peer in asker.get("/mesh/v1/peers")["peers"]
        for shard in peer["shards"]
    ]
    return sum(standing.get("checks", {}).get("agreed", 0) for standing in standings)


@contextlib.contextmanager
def hearth(
    serving: Mapping[str, str], askers: Mapping[str, dict[str, str]]
) -> Iterator[list[LocalNode]]:
    """Nodes that serve these layers, and askers with such environments; gives the askers."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:

        def make(node: str, layers: str, extra: dict[str, str]) -> LocalNode:
            flags = ("--layers", layers, "--threads", "1")
            return LocalNode(node, Path(name) / node, flags, {"OMP_NUM_THREADS": "1", **extra})

        nodes = [make(node, layers, {}) for node, layers in serving.items()]
        asking = [make(node, "none", extra) for node, extra in askers.items()]
        start_hearth([*nodes, *asking], stack)
        for each in asking:
            each.wait_ready()
            deadline = time.monotonic() + 60
            while len(
                {p["name"] for p in each.get("/mesh/v1/peers")["peers"] if p["shards"]}
            ) < len(serving):
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield asking


def two_pipelines() -> float:
    """Latency of two answers at once as a multiple of one alone; the median over rounds."""
    hops, slower = len(THIRDS), []
    with hearth(THIRDS, {"asker": {SPOT_CHECKS: "0"}}) as (asker,), ThreadPoolExecutor(2) as pool:
        answer(asker, 0, hops)
        for number in range(ROUNDS):
            wait_for_idle()
            alone = latency_ms(answer(asker, number, hops))
            both = pool.map(lambda seed: answer(asker, seed, hops), (number + 20, number + 120))
            slower.append(statistics.mean(map(latency_ms, both)) / alone)
    return statistics.median(slower)


def spot_checks() -> tuple[float, int]:
    """Speed with checks as a share of that without, and how many checks ended meanwhile."""
    hops, kept = len(set(HALVES_TWICE.values())), []
    with hearth(HALVES_TWICE, {"checking": {}, "trusting": {SPOT_CHECKS: "0"}}) as askers:
        checking, trusting = askers
        for number in range(2 * NEWCOMER_SESSIONS + 2):  # either copy of a half is new at first
            answer(checking, number, hops)
        answer(trusting, 0, hops)
        before = agreed(checking)
        for number in range(ROUNDS):
            wait_for_idle()
            with_checks = answer(checking, number + 20, hops)["tokens_per_second"]
            without = answer(trusting, number + 20, hops)["tokens_per_second"]
            kept.append(with_checks / without)
        deadline = time.monotonic() + REPORTED_WITHIN_S
        while (checks := agreed(checking) - before) <= 0:
            assert time.monotonic() < deadline, "no check ran: there is nothing to measure"
            time.sleep(0.1)
    return statistics.median(kept), checks


def measure() -> dict[str, Any]:
    """Ratios within each round; medians over rounds."""
    slower = two_pipelines()
    kept, checks = spot_checks()
    return {
        "two_pipelines_latency_ratio": round(slower, 3),
        "spot_checks_speed_ratio": round(kept, 3),
        "spot_checks_that_agreed": checks,
    }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
