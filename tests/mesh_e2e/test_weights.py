"""Weights come from a neighbour by the verbs, and answer as the whole checkpoint does."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from mesh.cli.local_node import LocalNode
from mesh.models.hashing import has_changed
from mesh.models.manifest import read_manifest
from tests.checkpoints import make_checkpoint
from tests.mesh_e2e.conftest import StartNode
from tests.ndif import client
from tests.transfers.test_fetcher import spoil
from tests.waiting import wait_until
from tests.warm.daemons import command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
LAYERS = 8


def verb(node: LocalNode, *arguments: str) -> subprocess.CompletedProcess[str]:
    return command(*arguments, "--state-dir", str(node.state_dir))


def answer(node: LocalNode) -> dict[str, Any]:
    body = {
        "model": "toy",
        "messages": [{"role": "user", "content": "The kettle sings"}],
        "max_tokens": 24,
        "temperature": 0,
    }
    response = node.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def fetched(node: LocalNode) -> Path:
    """Where it has what it fetched of the model."""
    models = node.get("/mesh/v1/models")["models"]
    (directory,) = [model["directory"] for model in models if model["id"] == "toy"]
    return Path(directory)


def served_by(node: LocalNode) -> set[str]:
    models = node.get("/mesh/v1/models")["models"]
    return {name for model in models if model["id"] == "toy" for name in model["nodes"]}


def answered_by(node: LocalNode) -> set[str]:
    return {hop["node"] for hop in answer(node)["hearthnet"]["route"]}


def missing(node: LocalNode) -> list[str]:
    """What it is not ready for."""
    said: list[str] = httpx.get(f"{node.url}/readyz", trust_env=False, timeout=30).json()["missing"]
    return said


def advertised(node: LocalNode, of: LocalNode) -> int:
    """How many advertisements of another a node has counted in this minute."""
    for process in node.get("/mesh/v1/status")["accounts"]:
        for each in process["principals"]:
            if each["node"] == of.name:
                used: int = each["resources"]["advertisements_per_minute"]["used"]
                return used
    return 0


def test_fetched_layers_answer_as_the_whole_does(own_node: StartNode, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama", layers=LAYERS, dtype="float16")
    own = ("--dtype", "fp16", "--device", "cpu")
    attic = own_node("attic", "--model", f"{checkpoint}=toy", *own)
    sofa = own_node("sofa", "--layers", "none", *own)
    attic.wait_ready()
    alone = answer(attic)
    sofa.wait_up()
    wait_until(lambda: [n["id"] for n in sofa.get("/mesh/v1/weights")["neighbours"]] == ["toy"])
    pulled = verb(sofa, "pull", "toy", "--layers", "4-7", "--json")
    assert pulled.returncode == 0, pulled.stderr
    directory = json.loads(pulled.stdout)["directory"]
    (row,) = [
        r for r in json.loads(verb(sofa, "list", "--json").stdout)["models"] if r["id"] == "toy"
    ]
    assert (row["layers"], row["ends"], row["directory"]) == (["4-7"], True, directory)
    assert row["here_bytes"] < row["total_bytes"]
    assert "4-7 of 0-7, ends" in verb(sofa, "list").stdout
    assert "attic has 0-7 and ends" in verb(sofa, "show", "toy").stdout

    assert "toy is gone" in verb(sofa, "rm", "toy", "--yes").stdout
    assert not Path(directory).exists()
    assert verb(sofa, "pull", "toy", "--layers", "4-7", "--from", "attic").returncode == 0
    for node, path, layers in ((sofa, directory, "4-7"), (attic, str(checkpoint), "0-3")):
        node.stop()
        node.flags = ("--threads", "1", "--model", f"{path}=toy", "--layers", layers, *own)
        node.start()
    for node in (attic, sofa):
        node.wait_ready()
        wait_until(lambda node=node: served_by(node) == {"attic", "sofa"})
    for node in (attic, sofa):
        together = answer(node)
        hops = {hop["node"]: hop["layers"] for hop in together["hearthnet"]["route"]}
        assert hops == {"attic": "0-3", "sofa": "4-7"}
        assert together["choices"] == alone["choices"]
    refused = verb(sofa, "rm", "toy", "--yes")
    assert "model_in_use" in refused.stderr
    assert Path(directory).is_dir()

    weight = "model.layers.5.mlp.up_proj.weight"
    spoil(Path(directory), weight)  # which it computes with: the file is mapped

    def said() -> list[str]:
        rows = sofa.get("/mesh/v1/status")["warnings"]
        return [row["message"] for row in rows if row["code"] == "weights_damaged"]

    wait_until(said)
    assert [weight in each for each in said()] == [True]
    assert f"{weight} in {directory}" in verb(sofa, "doctor").stdout
    wait_until(lambda: not has_changed(read_manifest(Path(directory)).tensors[weight]))
    # What it serves is loaded again, while who asks has all layers to answer alone.
    wait_until(lambda: answered_by(attic) == {"attic", "sofa"})
    assert answer(attic)["choices"] == alone["choices"]


def test_a_pull_goes_on_without_its_command_and_ends_when_it_is_cancelled(
    own_node: StartNode, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama", layers=LAYERS, hidden=256)
    slow = {"HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__HOST__TRANSFER_MB_PER_SECOND": "0.05"}
    own_node("attic", "--model", f"{checkpoint}=toy", environment=slow).wait_up()
    sofa = own_node("sofa", "--layers", "none")
    sofa.wait_up()
    wait_until(lambda: [n["id"] for n in sofa.get("/mesh/v1/weights")["neighbours"]] == ["toy"])
    where = ("--state-dir", str(sofa.state_dir))
    pulling = subprocess.Popen(
        [sys.executable, "-m", "mesh.cli.main", "pull", "toy", *where],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(lambda: sofa.get("/mesh/v1/weights")["transfers"])
    assert pulling.stderr is not None
    assert pulling.stderr.readline()  # it has heard that its pull is taken
    pulling.send_signal(signal.SIGINT)
    _, said = pulling.communicate(timeout=30)
    assert pulling.returncode == 130
    assert "The daemon goes on fetching toy" in said
    sofa.kill()
    sofa.start()
    sofa.wait_up()
    assert [each["model"] for each in sofa.get("/mesh/v1/weights")["pulls"]] == ["toy"]
    assert "fetching toy: " in verb(sofa, "list").stdout
    refused = verb(sofa, "pull", "--cancel", "toy", "--layers", "0-3")
    assert (refused.returncode, "no other option" in refused.stderr) == (2, True)
    cancelled = verb(sofa, "pull", "--cancel", "toy")
    assert cancelled.stdout.startswith("toy is not fetched any more; what has come is kept")
    wait_until(lambda: not sofa.get("/mesh/v1/weights")["transfers"])
    again = verb(sofa, "pull", "--cancel", "toy")
    assert (again.returncode, "toy is not pulled; nothing is." in again.stderr) == (4, True)


def test_what_is_not_served_can_be_removed(own_node: StartNode, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama", layers=2)
    node = own_node("attic", "--layers", "none")
    node.wait_up()
    assert "model_not_found" in verb(node, "pull", "no/such/toy").stderr
    offered = verb(node, "pull", str(checkpoint), "--json")
    assert json.loads(offered.stdout)["directory"] == str(checkpoint)
    wait_until(lambda: len(node.get("/mesh/v1/weights")["models"]) == 2)
    name = checkpoint.name
    assert "was not put there by hearthnet" in verb(node, "rm", name, "--yes").stderr
    assert checkpoint.is_dir()


def test_a_deployment_fetches_what_it_needs(own_node: StartNode, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama", layers=LAYERS, hidden=128)
    slow = {"HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__HOST__TRANSFER_MB_PER_SECOND": "0.5"}
    attic = own_node("attic", "--model", f"{checkpoint}=toy", "--layers", "none")
    sofa = own_node("sofa", "--layers", "none", environment=slow)
    sofa.wait_up()
    wait_until(lambda: [n["id"] for n in sofa.get("/mesh/v1/weights")["neighbours"]] == ["toy"])
    thin = {"HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__THIN": "always"}
    den = own_node("den", "--layers", "none", environment=thin)
    den.wait_up()
    spans = ("--layers", "attic=0-3", "--layers", "sofa=4-7")
    deployed = verb(sofa, "deploy", "toy", *spans)
    assert deployed.returncode == 0, deployed.stderr
    wait_until(lambda: attic.get("/mesh/v1/deployments")["deployments"])

    # A job that comes meanwhile is told how far it is.
    key = attic.record.api_key
    assert key is not None
    _, via = client.logits_of(checkpoint, "toy", "The kettle", attic.url, key)
    heard = [each.status.value for each in via.seen]
    said = [status for status, _ in itertools.groupby(heard)]
    assert said[-3:] == ["DISPATCHED", "RUNNING", "COMPLETED"], said
    # A quick machine has loaded so small a model before anybody looks.
    assert said[-4] in ("DEPLOYING", "PROVISIONING"), said
    percents = [
        each.meta["percent"]
        for each in via.seen
        if each.status.value == "PROVISIONING" and each.meta
    ]
    assert len(set(percents)) > 1, [each.description for each in via.seen]
    assert percents == sorted(percents)
    assert 0 <= percents[0] < percents[-1] <= 100

    # Who leaves the ends to others fetches none, and asks all the same.
    asked = verb(den, "run", "toy", "The kettle sings", "--max-tokens", "24", "--json")
    assert asked.returncode == 0, asked.stderr
    hops = {hop["node"]: hop["layers"] for hop in json.loads(asked.stdout)["hearthnet"]["route"]}
    assert hops == {"attic": "0-3", "sofa": "4-7"}

    waited = verb(sofa, "deploy", "toy", "--wait")
    assert waited.returncode == 0, waited.stderr
    for node in (attic, sofa, den):
        wait_until(lambda node=node: served_by(node) == {"attic", "sofa"})
        wait_until(lambda node=node: not any("toy" in each for each in missing(node)))
    assert answer(sofa)["choices"] == answer(attic)["choices"] == answer(den)["choices"]
    # Nothing changes any more, and who asks a model that it was told to hold says nothing more.
    before = advertised(den, attic)
    time.sleep(1.5)
    assert advertised(den, attic) - before < 6
    assert not any(entry.present for entry in read_manifest(fetched(den)).tensors.values())
    assert read_manifest(fetched(sofa)).has_ends
    held = {row["id"]: row for row in sofa.get("/mesh/v1/weights")["models"]}
    assert (held["toy"]["layers"], held["toy"]["in_use"]) == (["4-7"], True)
