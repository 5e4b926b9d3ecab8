"""A machine whose owner gives a part of it: some memory, and the time that others leave over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from threading import Event, Thread
from typing import Any

import pytest

from mesh.cli.local_node import LocalNode
from tests.checkpoints import make_checkpoint
from tests.mesh_e2e.conftest import StartNode
from tests.mesh_e2e.test_daemons import hearthnet
from tests.mesh_e2e.test_deployments import EVEN, meet, until

pytestmark = pytest.mark.slow

LIMIT_MB = 390
"""Room for the ends of the built-in model and for two more models, each with its ends."""
MODEL_MB = 145
"""More than one of them takes, with its ends."""
NICE = 7
_HOST = "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__HOST__"
SETTING = "research.distributed_inference.host.max_memory"


@pytest.fixture(scope="module")
def house(
    start_node: StartNode, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LocalNode, LocalNode]:
    """A guest on somebody's machine, and another node of the hearth."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("one", "two", "three"):
        make_checkpoint(folder / name, "llama", layers=2)
    shared = {"HEARTHNET_MODELS_DIR": str(folder), **EVEN}
    manners = {f"{_HOST}MAX_MEMORY": f"{LIMIT_MB} MiB", f"{_HOST}NICE": str(NICE)}
    guest = start_node("guest", "--layers", "none", environment=shared | manners)
    study = start_node("study", "--layers", "none", environment=shared)
    meet(guest, study)
    return guest, study


def cap(node: LocalNode) -> dict[str, Any]:
    found: dict[str, Any] | None = node.get("/mesh/v1/status")["node"]["memory_cap"]
    return found or {"taken_mb": 0, "limit_mb": 0}


@contextmanager
def watched(node: LocalNode) -> Iterator[list[int]]:
    """What its models take, all the time."""
    seen, over = [0], Event()

    def watch() -> None:
        while not over.wait(0.05):
            seen.append(cap(node)["taken_mb"])

    thread = Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def test_deployments_together_never_take_more_than_the_owner_gives(
    house: tuple[LocalNode, LocalNode],
) -> None:
    guest, study = house
    with watched(guest) as taken:
        for name in ("one", "two"):
            ran = deployed(name, guest)
            assert ran.returncode == 0, ran.stdout + ran.stderr
        # Others are told of no more than that.
        until(lambda: free_mb(study, guest)[0] < MODEL_MB, "what is left is known elsewhere")
        assert free_mb(study, guest)[1] == LIMIT_MB
        for node in house:
            refused = hearthnet("deploy", "three", "--nodes", "guest", "--estimate", node=node)
            assert refused.returncode == 5
            assert "It does not fit" in refused.stdout
        said = hearthnet("status", node=guest).stdout
        assert f"of at most {LIMIT_MB} MiB ({SETTING})" in said
        assert hearthnet("evict", "one", node=guest).returncode == 0
        # How much is free is looked at every second or two.
        until(lambda: deployed("three", guest).returncode == 0, "what was evicted is given back")
    # Two at once, so that a third had no place; the ends of the built-in model come when they do.
    assert LIMIT_MB - MODEL_MB < max(taken) <= LIMIT_MB


def deployed(model: str, node: LocalNode) -> CompletedProcess[str]:
    """What came of having it loaded on the guest, for good."""
    return hearthnet("deploy", model, "--nodes", "guest", "--dedicated", "--wait", node=node)


def free_mb(asker: LocalNode, of: LocalNode) -> tuple[int, int]:
    """What the planner of one node thinks is free on another, and what there is."""
    plan = asker.post("/mesh/v1/plan", {"model": "builtin"}).json()
    name = of.get("/mesh/v1/status")["node"]["name"]
    (row,) = (each for each in plan["machines"] if each["node"] == name)
    return row["free_bytes"] >> 20, row["total_bytes"] >> 20


def test_what_computes_stands_behind_other_programs(house: tuple[LocalNode, LocalNode]) -> None:
    guest, study = house
    computing = {"the shards' process", "the asker of builtin", "the jobs' process"}
    rows = [row for row in guest.get("/mesh/v1/status")["processes"] if row["pid"]]
    assert computing & {row["name"] for row in rows}
    for row in rows:
        if row["name"] in computing:
            nice = os.getpriority(os.PRIO_PROCESS, row["pid"])
            assert nice == min(19, NICE + os.nice(0)), row["name"]
            threads = [int(each.name) for each in Path(f"/proc/{row['pid']}/task").iterdir()]
            assert len(threads) > 1
    beside = study.get("/mesh/v1/status")["processes"]
    asker = next(row["pid"] for row in beside if row["name"] == "the asker of builtin")
    assert os.getpriority(os.PRIO_PROCESS, asker) == 0
