"""Limits under load: exact, and a short line in front of them."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Any

import httpx
import psutil
import pytest

from mesh.cli.local_node import LocalNode
from tests.mesh_e2e.conftest import StartNode

pytestmark = pytest.mark.slow
CPU_S = 4.0
"""Tokenising the two texts takes three times as long, also on a fast machine."""

MANY = 12
"""More than there are streams, and places in line."""

SECTION = "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__"
STRICT = {
    SECTION + "MAX_CONCURRENT_PIPELINES": "16",
    # These askers could hold the model: what the shards refuse would be answered at home.
    SECTION + "FALLBACK_TO_LOCAL": "false",
    SECTION + "MAX_QUEUED": "8",  # four for one user
}


def at_once(asker: LocalNode, count: int, **body: Any) -> list[tuple[int, dict[str, Any]]]:
    """`count` long answers asked for at the same time; (status, JSON) of each."""
    results: list[tuple[int, dict[str, Any]]] = []
    barrier = threading.Barrier(count)

    def ask(number: int) -> None:
        barrier.wait()
        response = httpx.post(
            f"{asker.url}/v1/completions",
            json={"model": "builtin", "prompt": [50 + number] * 8, "max_tokens": 300,
                  "temperature": 0, "ignore_eos": True, **body},
            timeout=120, trust_env=False,
        )  # fmt: skip
        results.append((response.status_code, response.json()))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture(scope="module")
def narrow(start_node: StartNode) -> LocalNode:
    """It serves two streams."""
    return start_node("narrow", environment={SECTION + "HOST__MAX_CONCURRENT_STREAMS": "2"})


@pytest.fixture(scope="module")
def eager(start_node: StartNode, narrow: LocalNode) -> LocalNode:
    """It asks far more of the others than they serve."""
    asker = start_node("eager", "--layers", "none", environment=STRICT)
    asker.wait_ready()
    return asker


def wait_for_servers(asker: LocalNode, names: set[str]) -> None:
    """Until the asker's process may route to all of them."""
    deadline = time.monotonic() + 60
    while not names <= set(asker.get("/mesh/v1/models")["models"][0]["nodes"]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(0.2)  # from the daemon's table to its asker process


def test_a_shard_serves_as_many_streams_as_it_says_and_refuses_the_rest(
    eager: LocalNode,
) -> None:
    asker = eager
    assert asker.post("/v1/completions", {"model": "builtin", "prompt": "a"}).status_code == 200
    results = at_once(asker, MANY)
    served = [body for status, body in results if status == 200]
    refused = [body["error"] for status, body in results if status != 200]
    assert 2 <= len(served) < MANY
    assert refused
    assert {error["code"] for error in refused} == {"shard_unavailable"}
    assert all("narrow" in error["message"] for error in refused)
    assert all(body["usage"]["completion_tokens"] == 300 for body in served)
    # and all of it is free again
    assert asker.post("/v1/completions", {"model": "builtin", "prompt": "a"}).status_code == 200


def test_who_finds_every_shard_full_waits_and_is_told_where_it_stands(eager: LocalNode) -> None:
    body = {"model": "builtin", "max_tokens": 300, "ignore_eos": True, "stream": True}
    holders = threading.Thread(target=at_once, args=(eager, 2), kwargs={"max_tokens": 450})
    holders.start()
    deadline = time.monotonic() + 60
    while sum(each["tokens"] > 0 for each in eager.get("/mesh/v1/status")["generations"]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with httpx.stream(
        "POST", f"{eager.url}/v1/completions", json={**body, "prompt": "a"}, timeout=60,
        trust_env=False,
    ) as response:  # fmt: skip
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line[6:7] == "{"]
    holders.join()
    events = [said["event"] for said in (c.get("hearthnet", {}) for c in chunks) if "event" in said]
    assert events == [{"position": 1, "type": "queued"}]
    assert chunks[-1]["hearthnet"]["token_ids"][299:]


def test_a_full_shard_makes_the_asker_pick_another(eager: LocalNode, start_node: StartNode) -> None:
    start_node("narrow2", environment={SECTION + "HOST__MAX_CONCURRENT_STREAMS": "2"})
    wait_for_servers(eager, {"narrow", "narrow2"})
    results = at_once(eager, 4)
    assert [status for status, _ in results] == [200] * 4, results
    nodes = [body["hearthnet"]["route"][0]["node"] for _, body in results]
    assert sorted(nodes.count(name) for name in ("narrow", "narrow2")) == [2, 2]


def test_an_asker_runs_as_many_pipelines_as_it_is_told_and_has_as_many_wait(
    narrow: LocalNode, start_node: StartNode
) -> None:
    limits = {SECTION + "MAX_CONCURRENT_PIPELINES": "1", SECTION + "MAX_QUEUED": "1"}
    asker = start_node("modest", "--layers", "none", environment=limits)
    asker.wait_ready()
    results = at_once(asker, 3)
    assert sorted(status for status, _ in results) == [200, 200, 429], results
    busy = next(body["error"] for status, body in results if status == 429)
    assert busy["code"] == "busy"


def test_prompts_of_megabytes_are_refused_before_they_cost_anything(eager: LocalNode) -> None:
    asker = eager
    # The first answer says that the ends are loaded, whatever else it says.
    asker.post("/v1/completions", {"model": "builtin", "prompt": "a"})
    assert asker.process is not None
    daemon = psutil.Process(asker.process.pid)

    def spent_s() -> float:
        tree = [daemon, *daemon.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in tree)

    text = "The kettle sings on the hearth. " * 122_000
    chat = {"messages": [{"role": "user", "content": text}]}
    before = spent_s()
    for path, body in (("/v1/completions", {"prompt": text}), ("/v1/chat/completions", chat)):
        response = asker.post(path, {"model": "builtin", **body})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert re.search(
            r"\d{7} bytes, .* maximum context length is \d+ tokens\.", error["message"]
        )
    assert spent_s() - before < CPU_S
