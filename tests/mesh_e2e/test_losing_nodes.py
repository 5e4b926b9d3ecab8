"""Nodes that go, politely or not, in the middle of an answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from mesh.cli.local_node import LocalNode
from mesh.models.builtin import checkpoint_dir
from tests.mesh_e2e.conftest import StartNode
from tests.mesh_e2e.spread import hugging_face

PROMPT = [40 + i for i in range(24)]
COUNT = 400

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return hugging_face(checkpoint_dir(), PROMPT, COUNT)[0]


def stream(
    asker: LocalNode, at: int, act: Callable[[], None], **body: Any
) -> tuple[dict[str, Any], list[dict[str, Any]], list[int]]:
    """The facts, the events and the token ids of one answer; `act` is done at token `at`."""
    request = {
        "model": "builtin", "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0,
        "ignore_eos": True, "stream": True, **body,
    }  # fmt: skip
    facts: dict[str, Any] = {}
    events: list[dict[str, Any]] = []
    chunks = 0
    url = f"{asker.url}/v1/completions"
    with httpx.stream("POST", url, json=request, timeout=120, trust_env=False) as response:
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                return chunk["error"], events, []
            extra = chunk.get("hearthnet", {})
            if "event" in extra:
                events.append(extra["event"])
            elif extra:
                facts = extra
            chunks += 1
            if chunks == at:
                act()
    return facts, events, facts.get("token_ids", [])


def ready(node: LocalNode) -> LocalNode:
    node.wait_ready()
    return node


def test_the_answer_goes_on_at_home_when_nobody_else_is_left(
    start_node: StartNode, expected: list[int]
) -> None:
    start_node("a1", "--layers", "0-3")
    victim = start_node("b1", "--layers", "4-7")
    asker = ready(start_node("c1", "--layers", "none"))
    facts, events, ids = stream(asker, 20, victim.kill)
    assert ids == expected
    assert facts["fallback"] is True
    assert [event["type"] for event in events] == ["shard_status", "pipeline_aborted"]
    # the local model is loaded now, and is not offered to others
    assert asker.get("/mesh/v1/status")["shards"] == []


def test_without_leave_to_go_home_it_ends_naming_the_layers(
    start_node: StartNode, expected: list[int]
) -> None:
    victim = start_node("b2", "--layers", "4-7")
    asker = ready(start_node("c2", "--layers", "none"))
    error, events, _ = stream(asker, 20, victim.kill, fallback_to_local=False)
    assert error["code"] == "shard_unavailable"
    assert "4-7" in error["message"]
    assert "pipeline_aborted" in [event["type"] for event in events]


def test_a_node_that_is_stopped_politely_hands_its_sessions_over(
    start_node: StartNode, expected: list[int]
) -> None:
    first = start_node("b3", "--layers", "4-7")
    second = start_node("d3", "--layers", "4-7")
    asker = ready(start_node("c3", "--layers", "none"))
    for node in (first, second):
        node.wait_ready()
    stopping: list[LocalNode] = []

    def stop_the_serving_one() -> None:
        route = asker.get("/mesh/v1/status")["generations"][0]["route"]
        node = {"b3": first, "d3": second}[route[-1]["node"]]
        assert node.process is not None
        node.process.terminate()
        stopping.append(node)

    facts, events, ids = stream(asker, 20, stop_the_serving_one)
    assert ids == expected
    assert facts["failovers"] == 0, "nothing was lost"
    assert [event["type"] for event in events] == ["shard_status", "shard_failover"]
    assert events[0]["status"] == "draining"
    assert stopping[0].process is not None
    assert stopping[0].process.wait(20) == 0
    stopping[0].process = None


def test_a_stopping_node_that_nobody_can_replace_finishes_first(
    start_node: StartNode, expected: list[int]
) -> None:
    only = start_node("b4", "--layers", "4-7")
    asker = ready(start_node("c4", "--layers", "none"))

    def stop() -> None:
        others = [p for p in asker.get("/mesh/v1/peers")["peers"] if p["name"] in ("b3", "d3")]
        assert all(peer["state"] != "up" for peer in others)
        assert only.process is not None
        only.process.terminate()

    # b3 or d3 may still be there from the test before: this one needs b4 to be alone.
    _forget(asker, ("b3", "d3"))
    facts, events, ids = stream(asker, 20, stop, fallback_to_local=False)
    assert ids == expected
    assert facts["failovers"] == 0
    assert events == []
    assert only.process is not None
    assert only.process.wait(20) == 0
    only.process = None


def _forget(asker: LocalNode, names: tuple[str, ...]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        up = {p["name"] for p in asker.get("/mesh/v1/peers")["peers"] if p["state"] == "up"}
        if not up & set(names):
            return
        time.sleep(0.1)
    pytest.skip(f"{names} are still there")
