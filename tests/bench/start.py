"""What a node costs to start and to leave running; ``python -m tests.bench.start`` samples once.

A node that has been started before holds the built-in model alone and is asked at once. Processor
seconds are those of the daemon and of all that it started, living and ended. To compare two
revisions, take samples of their working trees in turn.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from mesh.cli.local_node import LocalNode
from mesh.errors import InternalError
from tests.bench.noise import wait_for_idle

SAMPLES = 3
HELPS = 5
SETTLE_S = 5.0
IDLE_S = 20.0
_LIMIT_S = 120.0
_FLAGS = ("--threads", "1")
_ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": ""}
"""As ever after a first start: Python finds what it has compiled."""
_POLL_S = 0.02
_ASK = {
    "model": "builtin",
    "messages": [{"role": "user", "content": "What is hearthnet?"}],
    "max_tokens": 1,
    "temperature": 0,
}


def measure() -> dict[str, float]:
    """Medians of a few samples."""
    samples = [sample() for _ in range(SAMPLES)]
    return {name: statistics.median(each[name] for each in samples) for name in samples[0]}


def sample() -> dict[str, float]:
    """Seconds of processor and of wall clock, MB of PSS, and percent of a core."""
    wait_for_idle()
    found = {"help_cpu_s": _help_cpu_s()}
    with tempfile.TemporaryDirectory() as name:
        state = Path(name) / "node"
        with LocalNode("kitchen", state, _FLAGS, _ENVIRONMENT) as node:
            node.wait_ready()
        wait_for_idle()
        begun_s = time.perf_counter()
        with LocalNode("kitchen", state, _FLAGS, _ENVIRONMENT) as node:
            node.wait_up()
            found["api_wall_s"] = time.perf_counter() - begun_s
            _first_token(node)
            found["first_token_wall_s"] = time.perf_counter() - begun_s
            found["first_token_cpu_s"] = sum(_cpu_s(node).values())
            found |= _at_rest(node)
            found |= _killed(node)
    return {name: round(value, 3) for name, value in found.items()}


def _help_cpu_s() -> float:
    command = [sys.executable, "-m", "mesh.cli.main", "--help"]
    taken = []
    for _ in range(HELPS):
        before = _of_ended_s()
        subprocess.run(
            command,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=_LIMIT_S,
            env=os.environ | _ENVIRONMENT,
        )
        taken.append(_of_ended_s() - before)
    return statistics.median(taken)


def _of_ended_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _first_token(node: LocalNode) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        if node.post("/v1/chat/completions", _ASK).status_code == httpx.codes.OK:
            return
        time.sleep(_POLL_S * 5)
    raise InternalError(f"no token came:\n{node.log[-2000:]}", fix="Read its log.")


def _tree(node: LocalNode) -> list[psutil.Process]:
    assert node.process is not None
    daemon = psutil.Process(node.process.pid)
    return [daemon, *daemon.children(recursive=True)]


def _cpu_s(node: LocalNode) -> dict[int, float]:
    """Per process, with its children that have ended."""
    return {process.pid: sum(process.cpu_times()[:4]) for process in _tree(node)}


def _at_rest(node: LocalNode) -> dict[str, float]:
    time.sleep(SETTLE_S)
    before, begun_s = _cpu_s(node), time.perf_counter()
    time.sleep(IDLE_S)
    after = _cpu_s(node)
    spent_s = sum(after.values()) - sum(before.values())
    return {
        "idle_percent": 100 * spent_s / (time.perf_counter() - begun_s),
        "idle_pss_mb": sum(process.memory_full_info().pss for process in _tree(node)) / 2**20,
        "processes": len(after),
    }


def _row(node: LocalNode, name: str) -> dict[str, Any]:
    rows = node.get("/mesh/v1/status")["processes"]
    (row,) = [row for row in rows if name in row["name"]]
    return dict(row)


def _killed(node: LocalNode) -> dict[str, float]:
    """How long a shard's and an asker's process takes to be up again after SIGKILL."""
    found = {}
    for name in ("shard", "asker"):
        before = _row(node, name)
        psutil.Process(before["pid"]).send_signal(signal.SIGKILL)
        begun_s = time.perf_counter()
        while (row := _row(node, name))["state"] != "up" or row["starts"] == before["starts"]:
            time.sleep(_POLL_S)
        found[f"{name}_back_s"] = time.perf_counter() - begun_s
        node.wait_ready()
        found[f"{name}_serves_s"] = time.perf_counter() - begun_s
    return found


if __name__ == "__main__":
    print(json.dumps(sample()))
