"""What daemons say of each other: verdicts from real links, standings from a real asker."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from mesh.cli.local_node import LocalNode
from tests.mesh_e2e.conftest import starter

HEALTH_TIMEOUT_S = "6"


def peer_row(node: LocalNode, name: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = node.get("/mesh/v1/status")["peers"]
    return next((row for row in rows if row["name"] == name), {})


def eventually(condition: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


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
        eventually(lambda: peer_row(watcher, "other").get("verdict") == "healthy", 30)
        eventually(lambda: bool(peer_row(watcher, "other")["shards"]), 60)
        body = {"model": "builtin", "prompt": "The fox", "max_tokens": 8}
        watcher.post("/v1/completions", body).raise_for_status()

        def standing() -> dict[str, Any] | None:
            (shard,) = peer_row(watcher, "other")["shards"]
            seen: dict[str, Any] | None = shard["standing"]
            return seen

        eventually(lambda: standing() is not None, 10)
        found = standing()
        assert found is not None
        assert found["checks"] == {"unchecked": 1}, "nobody else holds these layers, and it says so"
        assert found["p50_ms"] > 0
        assert found["avoided_for_s"] == 0

        other.freeze()
        try:
            eventually(lambda: peer_row(watcher, "other").get("verdict") == "suspect", 15)
            eventually(lambda: peer_row(watcher, "other").get("verdict") == "lost", 15)
        finally:
            other.thaw()
        eventually(lambda: peer_row(watcher, "other").get("verdict") == "healthy", 30)
        text = httpx.get(f"{watcher.url}/metrics", timeout=30, trust_env=False).text
        assert "distributed_inference_shard_corruption_detected_total 0.0" in text
