"""What daemons say of each other: verdicts from real links, standings from a real asker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from mesh.cli.local_node import LocalNode
from tests.mesh_e2e.conftest import starter
from tests.waiting import wait_until

HEALTH_TIMEOUT_S = "6"


BAD_MEMORY = """
import sys
if {"mesh.shard.process", "mesh.processes.nursery"} & {*sys.orig_argv}:
    from mesh.wire import activations
    honest = activations.to_wire
    def to_wire(tensor, dtype):
        if sys.argv[0] == "mesh.shard.process":
            tensor = tensor.clone()
            tensor[..., 0] = float("nan")
        return honest(tensor, dtype)
    activations.to_wire = to_wire
"""
"""As ``sitecustomize`` of a daemon: its shard process answers with NaN."""


def corruptions(node: LocalNode) -> float:
    text = httpx.get(f"{node.url}/metrics", timeout=30, trust_env=False).text
    name = "distributed_inference_shard_corruption_detected_total "
    return float(next(line for line in text.splitlines() if line.startswith(name)).split()[1])


def peer_row(node: LocalNode, name: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = node.get("/mesh/v1/status")["peers"]
    return next((row for row in rows if row["name"] == name), {})


@pytest.mark.slow
def test_a_daemon_that_is_stopped_becomes_suspect_then_lost_then_healthy(tmp_path: Path) -> None:
    environment = {
        "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__SHARD_HEALTH_TIMEOUT_SECONDS": HEALTH_TIMEOUT_S
    }
    with starter(tmp_path) as start:
        watcher = start("watcher", "--layers", "none", environment=environment)
        other = start("other", environment=environment)
        for node in (watcher, other):
            node.wait_ready()
        wait_until(lambda: peer_row(watcher, "other").get("verdict") == "healthy", limit_s=30)
        wait_until(lambda: bool(peer_row(watcher, "other")["shards"]), limit_s=60)
        body = {"model": "builtin", "prompt": "The fox", "max_tokens": 8}
        watcher.post("/v1/completions", body).raise_for_status()

        def standing() -> dict[str, Any] | None:
            (shard,) = peer_row(watcher, "other")["shards"]
            seen: dict[str, Any] | None = shard["standing"]
            return seen

        wait_until(lambda: standing() is not None, limit_s=60)
        found = standing()
        assert found is not None
        # A newcomer's session is checked once, and again at each step that is drawn.
        assert {*found["checks"]} == {"unchecked"}, "nobody else holds these layers, and it says so"
        assert found["p50_ms"] > 0
        assert found["avoided_for_s"] == 0

        other.freeze()
        try:
            wait_until(lambda: peer_row(watcher, "other").get("verdict") == "suspect", limit_s=60)
            wait_until(lambda: peer_row(watcher, "other").get("verdict") == "lost", limit_s=60)
        finally:
            other.thaw()
        wait_until(lambda: peer_row(watcher, "other").get("verdict") == "healthy", limit_s=30)
        assert corruptions(watcher) == 0


@pytest.mark.slow
def test_a_daemon_that_answers_nonsense_is_counted_and_left(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BAD_MEMORY)
    with starter(tmp_path) as start:
        watcher = start("watcher")  # holds the layers too, and prefers others' to its own
        other = start("other", environment={"PYTHONPATH": str(tmp_path)})
        for node in (watcher, other):
            node.wait_ready()
        wait_until(lambda: bool(peer_row(watcher, "other").get("shards")), limit_s=60)
        assert corruptions(watcher) == 0
        body = {"model": "builtin", "prompt": "The fox", "max_tokens": 8, "temperature": 0}
        response = watcher.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        assert [hop["node"] for hop in response.json()["hearthnet"]["route"]] == ["watcher"]
        wait_until(lambda: corruptions(watcher) == 1, limit_s=60)
        assert peer_row(watcher, "other")["shards"][0]["standing"]["avoided_for_s"] > 0
