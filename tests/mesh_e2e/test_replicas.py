"""Hosts of the same layers: they share the work, and what stands still gets none of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from mesh.cli.local_node import LocalNode
from tests.mesh_e2e.conftest import StartNode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PATIENCE_S = 120.0


def wait_for(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> float:
    """Until it holds; the seconds that took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + patience_s
        time.sleep(0.1)
    return time.monotonic() - begin


def ready(node: LocalNode) -> tuple[int, list[str]]:
    response = httpx.get(f"{node.url}/readyz", trust_env=False, timeout=30)
    return response.status_code, response.json()["missing"]


def process(node: LocalNode, name: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = node.get("/mesh/v1/status")["processes"]
    return next(row for row in rows if row["name"] == name)


def servers(node: LocalNode) -> set[str]:
    return set(node.get("/mesh/v1/models")["models"][0]["nodes"])


def freeze(node: LocalNode, name: str, missing: str) -> Callable[[], None]:
    """Stop a process; returns once that is noticed. What it returns waits for the replacement."""
    stuck = process(node, name)
    assert stuck["state"] == "up"
    os.kill(stuck["pid"], signal.SIGSTOP)
    noticed_s = wait_for(lambda: ready(node)[0] == 503)
    wait_for(lambda: any(f"{name} said nothing" in line for line in ready(node)[1]))
    wait_for(lambda: any(missing in line for line in ready(node)[1]))
    assert process(node, name)["state"] == "silent"

    def replaced() -> None:
        replaced_s = wait_for(lambda: process(node, name)["pid"] not in (None, stuck["pid"]))
        assert "stopped answering" in process(node, name)["ending"]
        wait_for(lambda: ready(node) == (200, []))
        print(f"{name}: noticed after {noticed_s:.1f} s, another after {replaced_s:.1f} s more")

    return replaced


@pytest.fixture(scope="module")
def host(start_node: StartNode) -> LocalNode:
    return start_node("attic")


@pytest.fixture(scope="module")
def asker(host: LocalNode, start_node: StartNode) -> LocalNode:
    greedy = {"HEARTHNET_ROUTING__POLICY": "greedy"}  # how quick each is has no say
    return start_node("sofa", "--layers", "none", environment=greedy)


def test_what_stands_still_is_not_offered_and_is_replaced(
    host: LocalNode, asker: LocalNode
) -> None:
    for node in (host, asker):
        node.wait_ready()
    wait_for(lambda: servers(asker) == {"attic"})

    replaced = freeze(host, "the shards' process", "no node serves layers 0-7 of builtin")
    wait_for(lambda: not servers(asker))  # whoever asks is told as soon
    replaced()
    freeze(asker, "the asker of builtin", "the asker of builtin said nothing")()

    wait_for(lambda: servers(asker) == {"attic"})
    answer = asker.post("/v1/completions", {"model": "builtin", "prompt": "Once"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["hearthnet"]["route"][0]["node"] == "attic"


def complete(asker: LocalNode, number: int, max_tokens: int) -> dict[str, Any]:
    """An answer to a prompt that nobody asked before."""
    body = {"model": "builtin", "prompt": [50 + number] * 8, "max_tokens": max_tokens,
            "temperature": 0, "ignore_eos": True}  # fmt: skip
    answer = asker.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    facts: dict[str, Any] = answer.json()["hearthnet"]
    return facts


def test_replicas_share_what_comes_in_a_row_and_what_comes_at_once(
    asker: LocalNode, start_node: StartNode
) -> None:
    """Far less than a second host's limit of streams: nobody is turned away by the first."""
    start_node("attic2").wait_ready()
    asker.wait_ready()
    wait_for(lambda: servers(asker) == {"attic", "attic2"})
    time.sleep(0.2)  # from the daemon's table to its asker process
    hosts = ("attic", "attic2")

    def shares(answers: Iterable[dict[str, Any]]) -> list[int]:
        nodes = [facts["route"][0]["node"] for facts in answers]
        return sorted(nodes.count(name) for name in hosts)

    assert shares([complete(asker, number, 4) for number in range(5)]) == [2, 3]
    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(lambda number: complete(asker, number, 200), range(5, 9)))
    assert shares(at_once) == [2, 2]
