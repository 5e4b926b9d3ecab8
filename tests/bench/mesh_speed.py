"""Two shards on loopback, one core each, beside Hugging Face generate on one core, alternating.

Every sample waits for an idle machine and records what share of a core others used meanwhile;
whose turn is first alternates. Ratios are taken within a round; medians over rounds are reported.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from mesh.cli.local_node import LocalNode, start_hearth
from tests.bench.noise import Meter, wait_for_idle
from tests.checkpoints import make_large_checkpoint

SHAPES = {"0.16B": 12, "qwen0.5B": 24}
ROUNDS = 5
DECODE_PROMPT, DECODE_TOKENS = 32, 64
PREFILL_PROMPT = 512


def pin(pid: int, core: int) -> None:
    """Every thread of a process and of its children on one core."""
    process = psutil.Process(pid)
    for each in [process, *process.children(recursive=True)]:
        for thread in each.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, {core})


class Reference:
    """The Hugging Face process."""

    def __init__(self, directory: Path, dtype: str, core: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.reference", str(directory), dtype],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._line()
        pin(self.process.pid, core)

    def run(self, ids: list[int], count: int) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([ids, count]) + "\n")
        self.process.stdin.flush()
        result: dict[str, float] = json.loads(self._line())
        return result

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


def mesh_run(asker: LocalNode, ids: list[int], count: int) -> dict[str, Any]:
    response = asker.post(
        "/v1/completions",
        {"model": "bench", "prompt": ids, "max_tokens": count, "temperature": 0,
         "ignore_eos": True, "hearthnet": {"draft": False}},
    )  # fmt: skip
    response.raise_for_status()
    facts: dict[str, Any] = response.json()["hearthnet"]["timings"]
    return facts


def start_halves(
    layers: int,
    root: Path,
    common: tuple[str, ...],
    stack: contextlib.ExitStack,
    environment: Mapping[str, str] | None = None,
    asker_threads: str = "1",
) -> list[LocalNode]:
    """Two nodes with half of the layers and one core each, and one with none that asks them, ready;
    `common` are flags of all three."""
    half = layers // 2
    spans = (
        ("first", f"0-{half - 1}", "1"),
        ("second", f"{half}-{layers - 1}", "1"),
        ("asker", "none", asker_threads),
    )
    nodes = [
        LocalNode(
            name,
            root.with_name(f"{root.name}-{name}"),
            (*common, "--layers", span, "--threads", threads),
            {**(environment or {}), "OMP_NUM_THREADS": threads},
        )
        for name, span, threads in spans
    ]
    start_hearth(nodes, stack)
    for node in nodes:
        node.wait_ready()
    for node, core in zip(nodes[:2], (0, 1), strict=True):
        assert node.process is not None
        pin(node.process.pid, core)
    return nodes


def measure_one(shape: str, dtype: str, directory: Path, root: Path) -> dict[str, Any]:
    common = ("--model", f"{directory}=bench", "--dtype", dtype)
    with contextlib.ExitStack() as stack:
        nodes = start_halves(SHAPES[shape], root / f"{shape}-{dtype}", common, stack)
        reference = Reference(directory, dtype, 0)
        stack.callback(reference.close)
        return {
            "shape": shape,
            "dtype": dtype,
            **_rounds(nodes[2], reference, _pids(nodes, reference)),
            "shards": [_shard_facts(node) for node in nodes[:2]],
        }


def _pids(nodes: list[LocalNode], reference: Reference) -> list[int]:
    pids = [reference.process.pid]
    for node in nodes:
        assert node.process is not None
        daemon = psutil.Process(node.process.pid)
        pids += [daemon.pid, *(child.pid for child in daemon.children(recursive=True))]
    return pids


def _rounds(asker: LocalNode, reference: Reference, pids: list[int]) -> dict[str, Any]:
    rng = random.Random(0)
    rows: dict[str, list[float]] = defaultdict(list)
    mesh_run(asker, [rng.randrange(3, 30000) for _ in range(8)], 4)  # wire dtype, warm-up
    for number in range(ROUNDS):
        prompt = [rng.randrange(3, 30000) for _ in range(DECODE_PROMPT)]
        long = [rng.randrange(3, 30000) for _ in range(PREFILL_PROMPT)]
        samples: list[Callable[[], dict[str, float]]] = [
            partial(_ours, asker, prompt, long),
            partial(_theirs, reference, prompt, long),
        ]
        for sample in samples if number % 2 == 0 else reversed(samples):
            rows["busy"].append(not wait_for_idle())
            meter = Meter(pids)
            for key, value in sample().items():
                rows[key].append(value)
            rows["foreign"].append(meter.foreign())
    ratios = {
        f"{kind}_ratio": statistics.median(
            ours / theirs for ours, theirs in zip(rows[kind], rows[f"{kind}_hf"], strict=True)
        )
        for kind in ("decode", "prefill")
    }
    busy = sum(rows.pop("busy"))
    medians = {key: round(statistics.median(values), 3) for key, values in rows.items()}
    return {**medians, **ratios, "samples_on_a_busy_machine": busy}


def _ours(asker: LocalNode, prompt: list[int], long: list[int]) -> dict[str, float]:
    facts = mesh_run(asker, prompt, DECODE_TOKENS)
    hops = facts["hops"]
    # To the asker and back: two messages for each shard, each of them a hop.
    computing = sum(hop["compute_p50_ms"] for hop in hops)
    first_token_ms = mesh_run(asker, long, 1)["first_token_ms"]
    return {
        "decode": facts["tokens_per_second"],
        "prefill": PREFILL_PROMPT / first_token_ms * 1e3,
        "compute_ms": computing / len(hops),
        "overhead_ms": (sum(hop["p50_ms"] for hop in hops) - computing) / 2 / len(hops),
    }


def _theirs(reference: Reference, prompt: list[int], long: list[int]) -> dict[str, float]:
    decode = reference.run(prompt, DECODE_TOKENS)
    prefill = reference.run(long, 2)
    return {
        "decode_hf": decode["tok_s"],
        "prefill_hf": PREFILL_PROMPT / prefill["first_token_ms"] * 1e3,
    }


def _shard_facts(node: LocalNode) -> dict[str, Any]:
    shard = node.get("/mesh/v1/status")["shards"][0]
    facts = shard["facts"]
    return {
        "layers": shard["layers"],
        "load_ms": round(facts["load_ms"], 1),
        "bytes_read_mb": round(facts["bytes_read"] / 2**20, 1),
        "rss_mb": round(facts["rss_mb"], 1),
        "kv_mb": round(facts["kv_mb"], 1),
        "beyond_weights_and_kv_mb": round(
            facts["rss_mb"] - shard["vram_required_mb"] - facts["kv_mb"], 1
        ),
    }


def measure() -> dict[str, Any]:
    """Every shape and dtype; see the keys of the rows."""
    results = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for shape in SHAPES:
            directory = make_large_checkpoint(root / shape, shape)
            results += [measure_one(shape, dtype, directory, root) for dtype in ("bf16", "fp32")]
    return {"mesh_speed": results}


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
