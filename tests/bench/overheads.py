"""What comes on top: two pipelines at once, and spot checks.

Per-call latency of two answers at once beside one alone, each over the same three nodes. Tokens per
second with spot checks at their default beside none, asked in turn, over two hops that two other
nodes hold as well: these do the checks. They are machines of their own, so they get a core of their
own: what is measured is what checks cost a generation, not what else could run on its core. Two
processes of the same code differ by up to 5 %, more than checks cost; so several askers of either
kind take turns, and how far two askers without checks are apart is reported too.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from mesh.cli.local_node import LocalNode, start_hearth
from mesh.pipeline.audit import NEWCOMER_SESSIONS
from tests.bench.mesh_speed import pin
from tests.bench.noise import wait_for_idle

THIRDS = {"a": "0-2", "b": "3-5", "c": "6-7"}
HALVES_TWICE = {"a": "0-3", "b": "4-7", "c": "0-3", "d": "4-7"}
TOKENS = 200
ROUNDS = 7
PAIRS, CHECKED_ROUNDS = 3, 30
SPOT_CHECKS = "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__SPOT_CHECK_PROBABILITY"
REPORTED_WITHIN_S = 10.0


def answer(asker: LocalNode, seed: int) -> tuple[dict[str, Any], set[str]]:
    """The timings of one greedy answer, and the nodes that it came over."""
    response = asker.post(
        "/v1/completions",
        {"model": "builtin", "prompt": [40 + seed + i for i in range(16)], "max_tokens": TOKENS,
         "temperature": 0, "ignore_eos": True},
    )  # fmt: skip
    response.raise_for_status()
    facts = response.json()["hearthnet"]
    return facts["timings"], {hop["node"] for hop in facts["route"]}


def latency_ms(asker: LocalNode, seed: int) -> float:
    """How long an answer over all of `THIRDS` takes."""
    timings, nodes = answer(asker, seed)
    assert nodes == set(THIRDS), f"the answer came over {nodes}"
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
    """Nodes that serve these layers, and askers with such environments; gives both, in order."""
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
        yield [*nodes, *asking]


def two_pipelines() -> float:
    """Latency of two answers at once as a multiple of one alone; the median over rounds."""
    slower = []
    with hearth(THIRDS, {"asker": {SPOT_CHECKS: "0"}}) as nodes, ThreadPoolExecutor(2) as pool:
        asker = nodes[-1]
        latency_ms(asker, 0)
        for number in range(ROUNDS):
            wait_for_idle()
            alone = latency_ms(asker, number)
            both = pool.map(lambda seed: latency_ms(asker, seed), (number + 20, number + 120))
            slower.append(statistics.mean(both) / alone)
    return statistics.median(slower)


def spot_checks() -> dict[str, Any]:
    """Speed with checks as a share of that without, in which noise, and how many checks ended."""
    checking: dict[str, dict[str, str]] = {f"checking-{number}": {} for number in range(PAIRS)}
    trusting = {f"trusting-{number}": {SPOT_CHECKS: "0"} for number in range(PAIRS)}
    with hearth(HALVES_TWICE, {**checking, **trusting}) as nodes:
        askers = nodes[len(HALVES_TWICE) :]
        for number in range(2 * NEWCOMER_SESSIONS + 2):  # either copy of a half is new at first
            for asker in askers[:PAIRS]:
                answer(asker, number)
        for asker in askers[PAIRS:]:
            _, serving = answer(asker, 0)
        for node in nodes:
            assert node.process is not None
            pin(node.process.pid, int(node.name in HALVES_TWICE.keys() - serving))
        before = sum(map(agreed, askers))
        rounds = list(islice(_rounds(askers, serving), CHECKED_ROUNDS))
        assert len(rounds) > CHECKED_ROUNDS // 2, "the answers came over other nodes"
        deadline = time.monotonic() + REPORTED_WITHIN_S
        while (checks := sum(map(agreed, askers)) - before) <= 0:
            assert time.monotonic() < deadline, "no check ran: there is nothing to measure"
            time.sleep(0.1)
    kept = [
        sum(speeds[name] for name in checking) / sum(speeds[name] for name in trusting)
        for speeds in rounds
    ]
    alike = {name: statistics.median(speeds[name] for speeds in rounds) for name in trusting}
    return {
        "spot_checks_speed_ratio": round(statistics.median(kept), 3),
        "slowest_to_fastest_without": round(min(alike.values()) / max(alike.values()), 3),
        "spot_checks_that_agreed": checks,
        "rounds": len(rounds),
    }


def _rounds(askers: Sequence[LocalNode], serving: set[str]) -> Iterator[dict[str, float]]:
    """Tokens per second by asker, where all came over the `serving` nodes; starts with another."""
    for number in range(2 * CHECKED_ROUNDS):
        wait_for_idle()
        first = number % len(askers)
        told = {
            asker.name: answer(asker, number + 20) for asker in (*askers[first:], *askers[:first])
        }
        if all(nodes == serving for _, nodes in told.values()):
            yield {name: timings["tokens_per_second"] for name, (timings, _) in told.items()}


def measure() -> dict[str, Any]:
    """Ratios within each round; medians over rounds."""
    slower = two_pipelines()
    return {"two_pipelines_latency_ratio": round(slower, 3), **spot_checks()}


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
