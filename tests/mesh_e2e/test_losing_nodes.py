"""Nodes that go, politely or not, in the middle of an answer."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from mesh.cli.local_node import LocalNode
from mesh.models.builtin import checkpoint_dir
from tests.mesh_e2e.conftest import StartNode
from tests.mesh_e2e.spread import hugging_face

PROMPT = [40 + i for i in range(24)]
COUNT = 400

pytestmark = pytest.mark.slow

Answer = tuple[list[int], str]
"""Token ids, and all the text that was streamed."""


@pytest.fixture(scope="module")
def expected() -> Answer:
    directory = checkpoint_dir()
    ids, _ = hugging_face(directory, PROMPT, COUNT)
    text = AutoTokenizer.from_pretrained(directory).decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert len(set(text.split())) > COUNT / 8, "a text in which nothing could be lost unseen"
    return ids, text


def stream(
    asker: LocalNode, at: int, act: Callable[[], None], **body: Any
) -> tuple[dict[str, Any], list[dict[str, Any]], list[int], str]:
    """The facts, the events, the token ids and the text of one answer; `act` is done at token `at`.

    The text is put together from what came, piece by piece.
    """
    request = {
        "model": "builtin", "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0,
        "ignore_eos": True, "stream": True, **body,
    }  # fmt: skip
    facts: dict[str, Any] = {}
    events: list[dict[str, Any]] = []
    text: list[str] = []
    chunks = 0
    url = f"{asker.url}/v1/completions"
    with httpx.stream("POST", url, json=request, timeout=120, trust_env=False) as response:
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                return chunk["error"], events, [], "".join(text)
            text += [choice["text"] for choice in chunk["choices"]]
            extra = chunk.get("hearthnet", {})
            if "event" in extra:
                events.append(extra["event"])
            elif extra:
                facts = extra
            chunks += 1
            if chunks == at:
                act()
    return facts, events, facts.get("token_ids", []), "".join(text)


def ready(node: LocalNode) -> LocalNode:
    node.wait_ready()
    return node


def test_the_answer_goes_on_at_home_when_nobody_else_is_left(
    own_node: StartNode, expected: Answer
) -> None:
    own_node("a1", "--layers", "0-3")
    victim = own_node("b1", "--layers", "4-7")
    asker = ready(own_node("c1", "--layers", "none"))
    facts, events, ids, text = stream(asker, 20, victim.kill)
    assert (ids, text) == expected
    assert facts["fallback"] is True
    assert [event["type"] for event in events] == ["shard_status", "pipeline_aborted"]
    # the local model is loaded now, and is not offered to others
    assert asker.get("/mesh/v1/status")["shards"] == []


def test_the_streamed_text_is_whole_through_a_failover(
    own_node: StartNode, expected: Answer
) -> None:
    own_node("a6", "--layers", "0-3")
    nodes = {name: own_node(name, "--layers", "4-7") for name in ("b6", "d6")}
    asker = ready(own_node("c6", "--layers", "none"))
    wait_for(lambda: set(nodes) <= serving(asker))

    def kill_the_serving_one() -> None:
        route = asker.get("/mesh/v1/status")["generations"][0]["route"]
        nodes[route[-1]["node"]].kill()

    facts, events, ids, text = stream(asker, 20, kill_the_serving_one, fallback_to_local=False)
    assert (ids, text) == expected
    assert facts["failovers"] == 1
    assert [event["type"] for event in events] == ["shard_status", "shard_failover"]


def test_what_nobody_serves_is_answered_at_home_from_the_start(
    own_node: StartNode, expected: Answer
) -> None:
    own_node("a7", "--layers", "0-3")
    asker = own_node("c7", "--layers", "none")
    asker.wait_up()
    facts, events, ids, text = stream(asker, 0, lambda: None)
    assert (ids, text) == expected
    assert facts["fallback"] is True
    assert [event["type"] for event in events] == ["pipeline_aborted"]
    assert asker.get("/mesh/v1/status")["shards"] == []
    body = {"model": "builtin", "prompt": PROMPT, "fallback_to_local": False}
    refused = asker.post("/v1/completions", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shard_unavailable")


def test_without_leave_to_go_home_it_ends_naming_the_layers(
    own_node: StartNode, expected: Answer
) -> None:
    own_node("a2", "--layers", "0-3")
    victim = own_node("b2", "--layers", "4-7")
    asker = ready(own_node("c2", "--layers", "none"))
    error, events, *_ = stream(asker, 20, victim.kill, fallback_to_local=False)
    assert error["code"] == "shard_unavailable"
    assert "4-7" in error["message"]
    assert "pipeline_aborted" in [event["type"] for event in events]


def test_a_node_that_is_stopped_politely_hands_its_sessions_over(
    own_node: StartNode, expected: Answer
) -> None:
    own_node("a3", "--layers", "0-3")
    first = own_node("b3", "--layers", "4-7")
    second = own_node("d3", "--layers", "4-7")
    asker = ready(own_node("c3", "--layers", "none"))
    for node in (first, second):
        node.wait_ready()
    stopping: list[LocalNode] = []

    def stop_the_serving_one() -> None:
        route = asker.get("/mesh/v1/status")["generations"][0]["route"]
        node = {"b3": first, "d3": second}[route[-1]["node"]]
        assert node.process is not None
        node.process.terminate()
        stopping.append(node)

    facts, events, ids, text = stream(asker, 20, stop_the_serving_one)
    assert (ids, text) == expected
    assert facts["failovers"] == 0, "nothing was lost"
    assert [event["type"] for event in events] == ["shard_status", "shard_failover"]
    assert events[0]["status"] == "draining"
    assert stopping[0].process is not None
    assert stopping[0].process.wait(20) == 0
    stopping[0].process = None


def test_a_paused_node_hands_over_and_comes_back(own_node: StartNode, expected: Answer) -> None:
    own_node("a5", "--layers", "0-3")
    sleepy = own_node("b5", "--layers", "4-7")
    other = own_node("d5", "--layers", "4-7")
    asker = ready(own_node("c5", "--layers", "none"))
    for node in (sleepy, other):
        node.wait_ready()
    nodes = {"b5": sleepy, "d5": other}
    paused: list[LocalNode] = []

    def pause_the_serving_one() -> None:
        route = asker.get("/mesh/v1/status")["generations"][0]["route"]
        paused.append(nodes[route[-1]["node"]])
        hearthnet("pause", paused[0])
        shards = paused[0].get("/mesh/v1/status")["shards"]
        assert [shard["active_streams"] for shard in shards] == [0], "now it may sleep"

    facts, events, ids, text = stream(asker, 20, pause_the_serving_one)
    assert (ids, text) == expected
    assert facts["failovers"] == 0
    assert events[0]["status"] == "draining"
    assert paused[0].get("/mesh/v1/status")["node"]["paused"] is True
    wait_for(lambda: serving(asker) & set(nodes) == set(nodes) - {paused[0].name})
    hearthnet("resume", paused[0])
    wait_for(lambda: set(nodes) <= serving(asker))


def hearthnet(verb: str, node: LocalNode) -> None:
    subprocess.run(
        [sys.executable, "-m", "mesh.cli.main", verb, "--state-dir", str(node.state_dir)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip


def serving(asker: LocalNode) -> set[str]:
    return set(asker.get("/mesh/v1/models")["models"][0]["nodes"])


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_stopping_node_that_nobody_can_replace_finishes_first(
    own_node: StartNode, expected: Answer
) -> None:
    own_node("a4", "--layers", "0-3")
    only = own_node("b4", "--layers", "4-7")
    asker = ready(own_node("c4", "--layers", "none"))

    def stop() -> None:
        assert only.process is not None
        only.process.terminate()

    facts, events, ids, text = stream(asker, 20, stop, fallback_to_local=False)
    assert (ids, text) == expected
    assert facts["failovers"] == 0
    assert events == []
    assert only.process is not None
    assert only.process.wait(20) == 0
    only.process = None
