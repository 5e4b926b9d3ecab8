"""What a fetch of weights takes from an answer that is being given at the same time.

Two daemons hold half of a model each and a third asks them; a fourth has the weights of another
model. While one answer after the other is generated, short windows with and without a fetch
alternate; what a window lost is counted against those before and after it. First all processes
share all cores, shards compute with a thread on each, and the asker fetches the other model. Then
fetchers have the last core and answers the others, as where one is to spare, and the fourth node
fetches the answering model from both shards. The CPU seconds of the fetchers tell what of the loss
they can have taken themselves.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from mesh.cli.local_node import LocalNode, start_hearth
from tests.bench.mesh_speed import SHAPES, pin
from tests.bench.noise import wait_for_idle
from tests.checkpoints import make_large_checkpoint

ROUNDS = 11
WINDOW_S = 3.0
SETTLE_S = 0.7
"""Cut off the beginning of each window: a fetch begins, or what it left is cleared away."""
_SHAPE = "qwen0.5B"
_TOKENS = 1000


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
        # Told with its log-probability, a token without a word of its own is told as well.
        prompt = [rng.randrange(3, 30000) for _ in range(16)]
        headers = {"Authorization": f"Bearer {self.asker.record.api_key}"}
        with httpx.Client(headers=headers, trust_env=False, timeout=60) as client:
            while not self._stop.is_set():
                body = {
                    "model": "bench", "prompt": prompt, "max_tokens": _TOKENS,
                    "temperature": 0, "ignore_eos": True, "stream": True, "logprobs": 0,
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
    """The taker fetches, goes on where it was cut off, and begins anew once it has everything."""

    taker: LocalNode
    model: str

    def run(self, until: float) -> None:
        while time.perf_counter() < until:
            pull = self._post("pull", {"model": self.model})["pull"]
            # Asked once: each question is work for the node, and for whoever asks.
            time.sleep(max(0.0, until - time.perf_counter()))
            if self.taker.get(f"/mesh/v1/weights/pulls/{pull}")["state"] == "running":
                self._post(f"pulls/{pull}/cancel", {})
            else:
                self._post("remove", {"model": self.model})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        for _ in range(50):
            response = self.taker.post(f"/mesh/v1/weights/{path}", body)
            if response.status_code != httpx.codes.CONFLICT:  # a fetch that is just ending
                break
            time.sleep(0.1)
        response.raise_for_status()
        return response.json()


def house(
    directory: Path, root: Path, threads: int, stack: contextlib.ExitStack
) -> list[LocalNode]:
    """First, second, asker and the one with another model, all of them ready."""
    half = SHAPES[_SHAPE] // 2
    environment = {"OMP_NUM_THREADS": str(threads)}
    common = ("--model", f"{directory}=bench", "--dtype", "bf16", "--threads", str(threads))
    spans = (f"0-{half - 1}", f"{half}-{SHAPES[_SHAPE] - 1}", "none")
    nodes = [
        LocalNode(name, root / name, (*common, "--layers", span), environment | own(root, name))
        for name, span in zip(("first", "second", "asker"), spans, strict=True)
    ]
    other = ("--model", f"{directory.with_name('other')}=other", "--layers", "none")
    nodes.append(LocalNode("fourth", root / "fourth", other, own(root, "fourth")))
    start_hearth(nodes, stack)
    for node in nodes[:3]:
        node.wait_ready()
    nodes[3].wait_up()
    for node, model in ((nodes[2], "other"), (nodes[3], "bench")):
        while model not in {row["id"] for row in node.get("/mesh/v1/weights")["neighbours"]}:
            time.sleep(0.2)
    return nodes


def own(root: Path, name: str) -> dict[str, str]:
    """A place of its own for what it fetches."""
    return {"HEARTHNET_MODELS_DIR": str(root / f"fetched-{name}")}


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


@dataclass
class Window:
    """Tokens a second, and the cores that fetchers and all other processes of the nodes took."""

    tokens_per_s: float
    fetcher_cores: float
    other_cores: float


def windows(nodes: list[LocalNode], fetches: Fetches) -> dict[str, Any]:
    """What was lost, and how fast the weights came meanwhile."""
    answers = Answers(nodes[2])
    rows: list[Window] = []
    sent = _sent_bytes(nodes)
    with answers.running():
        time.sleep(2 * SETTLE_S)
        for number in range(2 * ROUNDS + 1):
            begin, used = time.perf_counter(), _used_s(nodes)
            end = begin + SETTLE_S + WINDOW_S
            if number % 2:
                fetches.run(end)
            else:
                time.sleep(SETTLE_S + WINDOW_S)
            took_s = time.perf_counter() - begin
            cores = [(now - then) / took_s for now, then in zip(_used_s(nodes), used, strict=True)]
            rows.append(Window(answers.rate(begin + SETTLE_S, end), *cores))
    moved = _sent_bytes(nodes) - sent
    quiet, beside = rows[::2], rows[1::2]
    around = list(itertools.pairwise(quiet))

    def median(of: Callable[[Window], float], taken: list[Window]) -> float:
        return round(statistics.median(map(of, taken)), 3)

    def lost(now: Window, before: Window, after: Window) -> float:
        return 1 - 2 * now.tokens_per_s / (before.tokens_per_s + after.tokens_per_s)

    losses = [lost(now, *pair) for now, pair in zip(beside, around, strict=True)]
    nothing = [lost(quiet[i], quiet[i - 1], quiet[i + 1]) for i in range(1, len(quiet) - 1)]
    return {
        "tokens_per_s": median(lambda row: row.tokens_per_s, quiet),
        "tokens_per_s_beside": median(lambda row: row.tokens_per_s, beside),
        "lost": round(statistics.median(losses), 3),
        "lost_each": [round(each, 3) for each in sorted(losses)],
        "lost_without_fetch": round(statistics.median(nothing), 3),
        "fetched_MB_s": round(moved / ROUNDS / (SETTLE_S + WINDOW_S) / 1e6, 1),
        "fetcher_cores": median(lambda row: row.fetcher_cores, beside),
        "fetcher_cores_at_rest": median(lambda row: row.fetcher_cores, quiet),
        "other_cores": median(lambda row: row.other_cores, beside),
        "other_cores_at_rest": median(lambda row: row.other_cores, quiet),
    }


def _used_s(nodes: list[LocalNode]) -> tuple[float, float]:
    """CPU seconds of the fetchers, and of all other processes of the nodes."""
    fetchers, others = 0.0, 0.0
    for node in nodes:
        assert node.process is not None
        daemon, fetcher = psutil.Process(node.process.pid), _fetcher(node)
        for each in [daemon, *daemon.children(recursive=True)]:
            times = each.cpu_times()
            if each.pid == fetcher:
                fetchers += times.user + times.system
            else:
                others += times.user + times.system
    return fetchers, others


def _sent_bytes(nodes: list[LocalNode]) -> int:
    return sum(node.get("/mesh/v1/weights")["sent_bytes"] for node in nodes)


def _fetcher(node: LocalNode) -> int:
    rows = node.get("/mesh/v1/status")["processes"]
    return next((row["pid"] for row in rows if row["name"] == "the fetcher"), 0)


def measure() -> dict[str, Any]:
    """See the module."""
    cores = os.cpu_count() or 1
    measured: dict[str, Any] = {"cores": cores, "flags": _flags()}
    with tempfile.TemporaryDirectory() as name:
        directory = make_large_checkpoint(Path(name) / "model", _SHAPE)
        make_large_checkpoint(Path(name) / "other", "0.16B")
        for way, threads in (("shared", cores), ("apart", max(1, cores - 1))):
            with contextlib.ExitStack() as stack:
                nodes = house(directory, Path(name) / way, threads, stack)
                fetches = Fetches(nodes[2], "other")
                if way == "apart":
                    fetches = Fetches(nodes[3], "bench")
                    fetches.run(time.perf_counter() + 1.0)  # whom nobody has asked is at rest
                    keep_apart(nodes)
                wait_for_idle()
                measured[way] = windows(nodes, fetches)
    return measured


def _flags() -> list[str]:
    """Of the CPU, those that decide how fast it computes."""
    text = Path("/proc/cpuinfo").read_text(encoding="ascii")
    words = {
        word for line in text.splitlines() if line.startswith("flags") for word in line.split()
    }
    return sorted(words & {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "avx_vnni"})


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
