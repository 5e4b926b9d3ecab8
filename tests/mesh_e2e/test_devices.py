"""A machine with several devices, here parts of its processor, holds a model that fits on none."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from mesh.cli.local_node import LocalNode
from tests.checkpoints import make_checkpoint
from tests.mesh_e2e.conftest import StartNode
from tests.mesh_e2e.test_daemons import hearthnet
from tests.mesh_e2e.test_deployments import meet, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores"),
]

CORES = sorted(os.sched_getaffinity(0))[:2]
DEVICES = [f"cpu:{core}" for core in CORES]
LIMIT_MB = 580
"""Each device has half of it: too little for the model, which has 170 MiB of weights."""
TOKENS = 48
_HOST = "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__HOST__"


@pytest.fixture(scope="module")
def house(
    start_node: StartNode, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LocalNode, LocalNode]:
    """A machine with two devices, and another that asks it."""
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint(folder / "wide", "llama", layers=8, hidden=768)
    make_checkpoint(folder / "small", "llama", layers=4, seed=1)
    shared = {"HEARTHNET_MODELS_DIR": str(folder), f"{_HOST}KV_TOKENS": "512"}
    double = start_node(
        "double", "--layers", "none", "--device", ",".join(DEVICES),
        environment=shared | {f"{_HOST}MAX_MEMORY": f"{LIMIT_MB} MiB"},
    )  # fmt: skip
    study = start_node("study", "--layers", "none", environment=shared)
    meet(double, study)
    return double, study


def test_two_replicas_of_what_fits_on_a_device_lie_on_one_each_and_spare_each_other(
    house: tuple[LocalNode, LocalNode],
) -> None:
    double, study = house
    small = ("deploy", "small", "--nodes", "double", "--context", "512")
    deployed = hearthnet(*small, "--replicas", "2", "--wait", node=study)
    assert deployed.returncode == 0, deployed.stderr

    def lying() -> dict[str, str]:
        shards = double.get("/mesh/v1/status")["shards"]
        return {each["device"]: each["shard_id"] for each in shards if each["online"]}

    both = dict(zip(DEVICES, ("small:0-3", "small:0-3#1"), strict=True))
    until(lambda: lying() == both, "a copy lies on each device", *house)

    def seen() -> int:
        return sum(len(peer["shards"]) for peer in study.get("/mesh/v1/status")["peers"])

    until(lambda: seen() == 2, "the asker sees both", *house)
    before = answer(study, "small")
    assert before["route"] == ["0-3"]
    processes = {row["name"]: row["pid"] for row in double.get("/mesh/v1/status")["processes"]}
    os.kill(processes[f"the shards' process on {DEVICES[0]}"], signal.SIGKILL)
    during = answer(study, "small")  # by the other copy, whether it has come back or not
    assert during["token_ids"] == before["token_ids"]
    assert not during["fallback"]
    assert hearthnet("scale", "small", "1", "--wait", node=study).returncode == 0
    until(lambda: [*lying().values()] == ["small:0-3"], "one copy is left", *house)
    assert hearthnet("evict", "small", "--wait", node=study).returncode == 0


def test_a_model_that_fits_on_no_device_lies_on_two_and_survives_the_end_of_one(
    house: tuple[LocalNode, LocalNode],
) -> None:
    double, study = house
    fitting = ("deploy", "wide", "--nodes", "double", "--context", "512")

    def estimated() -> list[dict[str, Any]]:
        wanted = {"model": "wide", "nodes": ["double"], "context": 512}
        replicas = study.post("/mesh/v1/plan", wanted).json()["replicas"]
        found: list[dict[str, Any]] = [shard for each in replicas for shard in each["shards"]]
        return found if len(found) == 2 else []

    planned = until(estimated, "both devices are measured")
    assert {each["device"] for each in planned} == set(DEVICES)
    deployed = hearthnet(*fitting, "--wait", node=study)
    assert deployed.returncode == 0, deployed.stderr
    picture = double.get("/mesh/v1/status")
    held = {shard["layers"]: shard["device"] for shard in picture["shards"]}
    assert sorted(held.values()) == DEVICES

    def say_what_is_free() -> bool:
        said = double.get("/mesh/v1/status")["devices"]
        return [each["device"] for each in said] == DEVICES

    until(say_what_is_free, "both processes have said what is free", double)
    assert "on " + DEVICES[1] in hearthnet("status", node=double).stdout
    processes = {row["name"]: row["pid"] for row in picture["processes"]}
    for core, device in zip(CORES, DEVICES, strict=True):
        assert cores_of(processes[f"the shards' process on {device}"]) == {str(core)}

    answer(study)  # the way and the weights are known from now on
    began = time.monotonic()
    before = answer(study)
    took_s = time.monotonic() - began
    assert set(before["route"]) == set(held)
    victim = processes[f"the shards' process on {DEVICES[1]}"]
    killing = Timer(took_s / 2, os.kill, (victim, signal.SIGKILL))
    killing.start()
    during = answer(study)
    killing.join()
    assert during["token_ids"] == before["token_ids"]
    assert during["failovers"] or during["fallback"]

    def is_back() -> bool:
        shards = double.get("/mesh/v1/status")["shards"]
        return {shard["layers"]: shard["device"] for shard in shards if shard["online"]} == held

    until(is_back, "what the lost process had is loaded again, on its device", *house)
    assert hearthnet("evict", "wide", "--wait", node=study).returncode == 0
    assert double.get("/mesh/v1/status")["shards"] == []


def cores_of(pid: int) -> set[str]:
    """Where the threads of a process may run."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    lines = [line for task in tasks for line in (task / "status").read_text().splitlines()]
    return {line.split()[1] for line in lines if line.startswith("Cpus_allowed_list")}


def answer(node: LocalNode, model: str = "wide") -> dict[str, Any]:
    """A long answer as the node tells of it, with the layers of its route."""
    asked = {"model": model, "prompt": [5, 6, 7], "max_tokens": TOKENS, "temperature": 0}
    response = node.post("/v1/completions", asked | {"ignore_eos": True})
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()["hearthnet"]
    return told | {"route": [hop["layers"] for hop in told["route"]]}
