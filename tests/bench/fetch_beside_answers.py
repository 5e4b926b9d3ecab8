"""What a fetch of weights takes from an answer that is being given at the same time.

Two daemons hold half of a model each and a third asks them; a fourth fetches the model's weights
from both, over and over, while one answer after the other is generated. Windows with and without
the fetch alternate; what a window lost is counted against the windows before and after it. Once all
processes share the machine's cores, and once the fetchers have a core of their own, as on machines
that have one to spare. Of what is lost, `wait_for_idle` and medians keep out only what others take.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from mesh.cli.local_node import LocalNode, start_hearth
from tests.bench.mesh_speed import SHAPES, pin
from tests.bench.noise import wait_for_idle
from tests.checkpoints import make_large_checkpoint

ROUNDS = 5
WINDOW_S = 5.0
SETTLE_S = 1.5
"""Cut off the beginning of each window: a fetch begins, or what it left is cleared away."""
_SHAPE = "0.16B"
_TOKENS = 400


@dataclass
class Answers:
    """One answer after the other, and when each token came."""

    asker: LocalNode
    times: list[float] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._ask_all, name="answers")
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def rate(self, begin: float, end: float) -> float:
        """Tokens per second between two times, by the gaps between tokens of one answer."""
        gaps = [
            after - before
            for before, after in itertools.pairwise(self.times)
            if begin <= before and after <= end
        ]
        return len(gaps) / sum(gaps)

    def _ask_all(self) -> None:
        rng = random.Random(0)
        prompt = [rng.randrange(3, 30000) for _ in range(16)]  # one whose answer has words
        headers = {"Authorization": f"Bearer {self.asker.record.api_key}"}
        with httpx.Client(headers=headers, trust_env=False, timeout=60) as client:
            while not self._stop.is_set():
                body = {
                    "model": "bench", "prompt": prompt, "max_tokens": _TOKENS,
                    "temperature": 0, "ignore_eos": True, "stream": True,
                    "hearthnet": {"draft": False},
                }  # fmt: skip
                with client.stream("POST", f"{self.asker.url}/v1/completions", json=body) as said:
                    said.raise_for_status()
                    for line in said.iter_lines():
                        if line.startswith("data: {"):
                            self.times.append(time.perf_counter())
                        if self._stop.is_set():
                            return


@dataclass
class Fetches:
    """The taker fetches everything, drops it and begins anew."""

    taker: LocalNode
    fetched_bytes: int = 0

    def run(self, until: float) -> None:
        while time.perf_counter() < until:
            pull = self._post("pull", {"model": "bench"})["pull"]
            state = "running"
            while state == "running" and time.perf_counter() < until:
                time.sleep(0.2)
                state = self.taker.get(f"/mesh/v1/weights/pulls/{pull}")["state"]
            if state == "running":
                self._post(f"pulls/{pull}/cancel", {})
            held = self.taker.get("/mesh/v1/weights")["models"]
            self.fetched_bytes += sum(model["here_bytes"] for model in held)
            if held:
                with contextlib.suppress(httpx.HTTPStatusError):  # nothing was kept of it
                    self._post("remove", {"model": "bench"})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        for _ in range(50):
            response = self.taker.post(f"/mesh/v1/weights/{path}", body)
            if response.status_code != httpx.codes.CONFLICT:  # a fetch that is just ending
                break
            time.sleep(0.1)
        response.raise_for_status()
        return response.json()


def house(directory: Path, root: Path, stack: contextlib.ExitStack) -> list[LocalNode]:
    """First, second, asker and taker, all of them ready."""
    half, threads = SHAPES[_SHAPE] // 2, max(1, (os.cpu_count() or 1) // 2)
    environment = {"OMP_NUM_THREADS": str(threads)}
    common = ("--model", f"{directory}=bench", "--dtype", "bf16", "--threads", str(threads))
    spans = (f"0-{half - 1}", f"{half}-{SHAPES[_SHAPE] - 1}", "none")
    nodes = [
        LocalNode(name, root / name, (*common, "--layers", span), environment)
        for name, span in zip(("first", "second", "asker"), spans, strict=True)
    ]
    apart = {"HEARTHNET_MODELS_DIR": str(root / "fetched")}
    nodes.append(LocalNode("taker", root / "taker", ("--layers", "none"), apart))
    start_hearth(nodes, stack)
    for node in nodes[:3]:
        node.wait_ready()
    nodes[3].wait_up()
    while not nodes[3].get("/mesh/v1/weights")["neighbours"]:
        time.sleep(0.2)
    return nodes


def keep_apart(nodes: list[LocalNode]) -> None:
    """The fetchers on the last core, everything else on the others."""
    last = (os.cpu_count() or 1) - 1
    for node in nodes:
        assert node.process is not None
        daemon = psutil.Process(node.process.pid)
        fetcher = _fetcher(node)
        for each in [daemon, *daemon.children(recursive=True)]:
            if each.pid == fetcher:
                pin(each.pid, last)
                continue
            for thread in each.threads():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, set(range(max(1, last))))


def windows(nodes: list[LocalNode]) -> dict[str, Any]:
    """What was lost, and how fast the weights came meanwhile."""
    answers, fetches = Answers(nodes[2]), Fetches(nodes[3])
    wait_for_idle()
    rates: list[float] = []
    with answers.running():
        time.sleep(SETTLE_S)
        for number in range(2 * ROUNDS + 1):
            begin = time.perf_counter()
            end = begin + SETTLE_S + WINDOW_S
            if number % 2:
                fetches.run(end)
            else:
                time.sleep(SETTLE_S + WINDOW_S)
            rates.append(answers.rate(begin + SETTLE_S, end))
    quiet = rates[::2]
    lost = [
        1 - beside / ((before + after) / 2)
        for beside, before, after in zip(rates[1::2], quiet[:-1], quiet[1:], strict=True)
    ]
    seconds = ROUNDS * (SETTLE_S + WINDOW_S)
    return {
        "tokens_per_s": round(statistics.median(quiet), 1),
        "tokens_per_s_beside": round(statistics.median(rates[1::2]), 1),
        "lost": round(statistics.median(lost), 3),
        "lost_each": [round(each, 3) for each in sorted(lost)],
        "fetched_MB_s": round(fetches.fetched_bytes / seconds / 1e6, 1),
    }


def _fetcher(node: LocalNode) -> int:
    rows = node.get("/mesh/v1/status")["processes"]
    return next((row["pid"] for row in rows if row["name"] == "the fetcher"), 0)


def measure() -> dict[str, Any]:
    """See the module."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        root = Path(name)
        nodes = house(make_large_checkpoint(root / "model", _SHAPE), root, stack)
        shared = windows(nodes)
        keep_apart(nodes)
        return {"cores": os.cpu_count(), "shared": shared, "apart": windows(nodes)}


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
