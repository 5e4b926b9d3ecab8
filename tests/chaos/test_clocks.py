"""Machines whose clocks are days apart: they pair, find each other and answer all the same."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.cli.local_node import LocalNode, start_hearth

PROMPT = [11, 42, 97, 300, 12, 8, 77]
COUNT = 24
DAYS = {"sofa": 0, "attic": 1, "barn": -1}
LAYERS = {"sofa": "none", "attic": "0-3", "barn": "4-7"}
_ACTIVATIONS = "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__ACTIVATION_DTYPE"

# Read by every process of the node when it starts: the clock as the operating system would tell it.
_ANOTHER_DAY = """
from datetime import timedelta
import mesh.clock
right = mesh.clock.SystemClock.now
mesh.clock.SystemClock.now = lambda self: right(self) + timedelta(days={days})
"""


def node(name: str, directory: Path) -> LocalNode:
    home = directory / f"clock-of-{name}"
    home.mkdir()
    (home / "sitecustomize.py").write_text(_ANOTHER_DAY.format(days=DAYS[name]))
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(home), _ACTIVATIONS: "fp32"}
    return LocalNode(
        name, directory / name, ("--threads", "1", "--layers", LAYERS[name]), environment
    )


def wait_for_shards(asker: LocalNode, count: int, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        peers = asker.get("/mesh/v1/peers")["peers"]
        if sum(shard["online"] for peer in peers for shard in peer["shards"]) == count:
            return
        time.sleep(0.1)
    raise AssertionError(f"not all shards are seen: {peers}")


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_clocks_days_apart_change_no_answer(
    tmp_path: Path, one_machine: Callable[[list[int], int], list[int]]
) -> None:
    nodes = [node(name, tmp_path) for name in DAYS]
    with contextlib.ExitStack() as stack:
        start_hearth(nodes, stack)
        for each in nodes:
            each.wait_ready()
        asker = nodes[0]
        wait_for_shards(asker, 2)
        response = asker.post(
            "/v1/completions",
            {"model": "builtin", "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0,
             "ignore_eos": True, "fallback_to_local": False},
        )  # fmt: skip
        assert response.status_code == 200, f"{response.text} {asker.log}"
        facts = response.json()["hearthnet"]
        assert facts["token_ids"] == one_machine(PROMPT, COUNT)
        assert [hop["node"] for hop in facts["timings"]["hops"]] == ["attic", "barn"]
        assert facts["failovers"] == 0
