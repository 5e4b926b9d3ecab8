"""What a node costs to start and to leave running; ``python -m tests.bench.start`` samples once.
And how long a model takes that three nodes have to bring up: see `brought_up`.

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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil

from mesh.cli.local_node import LocalNode, start_hearth
from mesh.errors import InternalError
from mesh.models.manifest import read_manifest
from mesh.types import ModelId
from tests.bench.noise import wait_for_idle
from tests.checkpoints import make_large_checkpoint

SAMPLES = 3
HELPS = 5
SETTLE_S = 5.0
IDLE_S = 20.0
_LIMIT_S = 120.0
_RUN_LIMIT_S = 300.0
_FLAGS = ("--threads", "1")
_ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": ""}
"""As ever after a first start: Python finds what it has compiled."""
_POLL_S = 0.02
_EVEN = {"HEARTHNET_DEPLOYMENTS__PLACEMENT": "even"}
_ASK = {
    "model": "builtin",
    "messages": [{"role": "user", "content": "What is hearthnet?"}],
    "max_tokens": 1,
    "temperature": 0,
}


def measure() -> dict[str, float]:
    """Medians of a few samples; and one `run`."""
    samples = [sample() for _ in range(SAMPLES)]
    found = {name: statistics.median(each[name] for each in samples) for name in samples[0]}
    return found | brought_up()


def brought_up() -> dict[str, float]:
    """Seconds from ``hearthnet run`` to its first token, of the 0.5B shape over three nodes on this
    machine of which one has the files and none has loaded any; then once more, as it is up."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        checkpoint = make_large_checkpoint(Path(name) / "models" / "half", "qwen0.5B")
        manifest = read_manifest(checkpoint, model_id=ModelId("half"), cache_dir=Path(name))
        nodes = []
        for number in range(3):
            # Of what the others have on their disks nothing is used: each has its own.
            models = checkpoint.parent if number == 0 else Path(name) / f"models-{number}"
            settings = {**_EVEN, "HEARTHNET_MODELS_DIR": str(models)}
            flags = (*_FLAGS, "--layers", "none")
            nodes.append(LocalNode(f"n{number}", Path(name) / f"n{number}", flags, settings))
        start_hearth(nodes, stack)
        for node in nodes:
            node.wait_up()
            _see(node, len(nodes) - 1)
        wait_for_idle()
        begun_s = sum(sum(_cpu_s(node).values()) for node in nodes)
        first_s, again_s = _run_s(nodes[0]), _run_s(nodes[0])
        spent_s = sum(sum(_cpu_s(node).values()) for node in nodes) - begun_s
    return {
        "run_model_mb": round((sum(manifest.layer_bytes) + manifest.ends_bytes) / 2**20),
        "run_first_token_s": round(first_s, 2),
        "run_again_s": round(again_s, 2),
        "run_cpu_s": round(spent_s, 2),
    }


def _see(node: LocalNode, count: int) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while sum(peer["state"] == "up" for peer in node.get("/mesh/v1/peers")["peers"]) < count:
        assert time.monotonic() < deadline, f"{node.name} does not see the others"
        time.sleep(_POLL_S)


def _run_s(node: LocalNode) -> float:
    state = ["--state-dir", str(node.state_dir)]
    command = [sys.executable, "-m", "mesh.cli.main", "run", "half", "The kettle", "--raw"]
    begun_s = time.perf_counter()
    done = subprocess.run(
        [*command, "--max-tokens", "1", "--ignore-eos", "--json", *state],
        stdout=subprocess.PIPE, text=True, timeout=_RUN_LIMIT_S, check=True,
        env=os.environ | _ENVIRONMENT,
    )  # fmt: skip
    assert len(json.loads(done.stdout)["hearthnet"]["route"]) == 3
    return time.perf_counter() - begun_s


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
