"""Nodes that go, politely or not, in the middle of an answer.

One house for all, because every daemon takes seconds to start: each test says how many nodes have
to serve the second half when it begins, and what the one before it lost is started again only then.
In the order of this file few have to be.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from mesh.cli.local_node import LocalNode
from mesh.models.builtin import checkpoint_dir
from tests.mesh_e2e.conftest import StartNode
from tests.mesh_e2e.spread import hugging_face
from tests.waiting import wait_until
from tests.warm.daemons import command

PROMPT = [40 + i for i in range(24)]
COUNT = 400

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

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


class House:
    """Who asks, who holds layers 0-3, and two who can hold 4-7, running or not."""

    def __init__(self, start: StartNode) -> None:
        self._start = start
        self._second_half: dict[str, LocalNode] = {}
        start("attic", "--layers", "0-3")
        self.asker = start("sofa", "--layers", "none")

    def with_second_half(self, count: int) -> list[LocalNode]:
        """Have so many nodes serve layers 4-7, as the asker sees it; those that do.

        A test that fails may leave too many of them, or one that is paused: those are ended.
        """
        self.asker.wait_up()
        for node in self.running:
            if len(self.running) > count or node.get("/mesh/v1/status")["node"]["paused"]:
                node.kill()
        for name in ("barn", "cellar"):
            if len(self.running) == count:
                break
            if name not in self._second_half:
                self._second_half[name] = self._start(name, "--layers", "4-7")
            elif self._second_half[name] not in self.running:
                self._second_half[name].start()
        for node in self.running:
            node.wait_ready()
        names = {node.name for node in self.running}
        wait_until(lambda: serving(self.asker) == {"attic", *names})
        if count:
            self.asker.wait_ready()
        return self.running

    @property
    def running(self) -> list[LocalNode]:
        return [node for node in self._second_half.values() if node.process is not None]

    def serving_now(self) -> LocalNode:
        """Who runs the last layers of the answer under way."""
        route = self.asker.get("/mesh/v1/status")["generations"][0]["route"]
        return self._second_half[route[-1]["node"]]


@pytest.fixture(scope="module")
def house(start_node: StartNode) -> House:
    return House(start_node)


def test_a_paused_node_hands_over_and_comes_back(house: House, expected: Answer) -> None:
    names = {node.name for node in house.with_second_half(2)}
    paused: list[LocalNode] = []

    def pause_the_serving_one() -> None:
        paused.append(house.serving_now())
        hearthnet("pause", paused[0])
        shards = paused[0].get("/mesh/v1/status")["shards"]
        assert [shard["active_streams"] for shard in shards] == [0], "now it may sleep"

    # Long enough for a program to start and say so meanwhile.
    facts, events, ids, text = stream(house.asker, 20, pause_the_serving_one, max_tokens=4 * COUNT)
    assert ids[:COUNT] == expected[0]
    assert text.startswith(expected[1])
    assert facts["failovers"] == 0
    assert events[0]["status"] == "draining"
    assert paused[0].get("/mesh/v1/status")["node"]["paused"] is True
    wait_until(lambda: serving(house.asker) & names == names - {paused[0].name})
    hearthnet("resume", paused[0])
    wait_until(lambda: names <= serving(house.asker))


def test_the_streamed_text_is_whole_through_a_failover(house: House, expected: Answer) -> None:
    house.with_second_half(2)
    facts, events, ids, text = stream(
        house.asker, 20, lambda: house.serving_now().kill(), fallback_to_local=False
    )
    assert (ids, text) == expected
    assert facts["failovers"] == 1
    assert [event["type"] for event in events] == ["shard_status", "shard_failover"]


def test_a_stopping_node_that_nobody_can_replace_finishes_first(
    house: House, expected: Answer
) -> None:
    (only,) = house.with_second_half(1)

    def stop() -> None:
        assert only.process is not None
        only.process.terminate()

    facts, events, ids, text = stream(house.asker, 20, stop, fallback_to_local=False)
    assert (ids, text) == expected
    assert facts["failovers"] == 0
    assert events == []
    assert only.process is not None
    assert only.process.wait(20) == 0
    only.process = None


def test_what_nobody_serves_is_answered_at_home_from_the_start(
    house: House, expected: Answer
) -> None:
    house.with_second_half(0)
    facts, events, ids, text = stream(house.asker, 0, lambda: None)
    assert (ids, text) == expected
    assert facts["fallback"] is True
    assert [event["type"] for event in events] == ["pipeline_aborted"]
    # the local model is loaded now, and is not offered to others
    assert house.asker.get("/mesh/v1/status")["shards"] == []
    body = {"model": "builtin", "prompt": PROMPT, "fallback_to_local": False}
    refused = house.asker.post("/v1/completions", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shard_unavailable")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_node_that_is_stopped_politely_hands_its_sessions_over(
    house: House, expected: Answer, number: signal.Signals
) -> None:
    house.with_second_half(2)
    stopping: list[LocalNode] = []

    def stop_the_serving_one() -> None:
        node = house.serving_now()
        assert node.process is not None
        node.process.send_signal(number)
        stopping.append(node)

    facts, events, ids, text = stream(house.asker, 20, stop_the_serving_one)
    assert (ids, text) == expected
    assert facts["failovers"] == 0, "nothing was lost"
    assert [event["type"] for event in events] == ["shard_status", "shard_failover"]
    assert events[0]["status"] == "draining"
    assert stopping[0].process is not None
    assert stopping[0].process.wait(20) == 0
    stopping[0].process = None


def test_without_leave_to_go_home_it_ends_naming_the_layers(house: House, expected: Answer) -> None:
    (victim,) = house.with_second_half(1)
    error, events, *_ = stream(house.asker, 20, victim.kill, fallback_to_local=False)
    assert error["code"] == "shard_unavailable"
    assert "4-7" in error["message"]
    assert "pipeline_aborted" in [event["type"] for event in events]


def test_the_answer_goes_on_at_home_when_nobody_else_is_left(
    house: House, expected: Answer
) -> None:
    (victim,) = house.with_second_half(1)
    facts, events, ids, text = stream(house.asker, 20, victim.kill)
    assert (ids, text) == expected
    assert facts["fallback"] is True
    assert [event["type"] for event in events] == ["shard_status", "pipeline_aborted"]
    assert house.asker.get("/mesh/v1/status")["shards"] == []


def hearthnet(verb: str, node: LocalNode) -> None:
    command(verb, "--state-dir", str(node.state_dir), timeout=60).check_returncode()


def serving(asker: LocalNode) -> set[str]:
    return set(asker.get("/mesh/v1/models")["models"][0]["nodes"])
