"""Deployments go where the planner says, by what the machines measured of themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mesh.cli.local_node import LocalNode
from tests.mesh_e2e.conftest import StartNode
from tests.mesh_e2e.test_daemons import hearthnet
from tests.mesh_e2e.test_deployments import meet, ready, row, rows, until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def house(start_node: StartNode) -> tuple[LocalNode, LocalNode]:
    less = {"HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__HOST__KV_TOKENS": "4096"}
    attic = start_node("attic", "--layers", "none")
    study = start_node("study", "--layers", "none", environment=less)
    meet(attic, study)
    return attic, study


def test_replicas_go_where_the_estimate_put_them(house: tuple[LocalNode, LocalNode]) -> None:
    attic, study = house

    def estimated() -> dict[str, Any] | None:
        found = attic.post("/mesh/v1/plan", {"model": "builtin", "replicas": 2})
        assert found.status_code == 200, found.text
        plan: dict[str, Any] = found.json()
        # One that has said nothing yet, or is not measured, is not used, and why is told.
        unused = [row["why"] for row in plan["machines"] if row["why"]]
        return plan if len(plan["replicas"]) == 2 and not unused else None

    plan = until(estimated, "both have said what they have and are measured")
    # A model that fits one machine twice over lies whole on each.
    laid = {shard["node"]: shard["layers"] for r in plan["replicas"] for shard in r["shards"]}
    assert laid == {"attic": "0-7", "study": "0-7"}
    deployed = hearthnet("deploy", "builtin", "--replicas", "2", "--wait", node=attic)
    assert deployed.returncode == 0, deployed.stderr
    ready(*house, replicas=2)

    # One that was not seen when this was planned gets its copy a moment later.
    def lies_as_estimated() -> bool:
        return {span["node"]: span["layers"] for span in row(study)["spans"]} == laid

    until(lies_as_estimated, "each has its replica", *house)
    # What it needs there is what the shard says that it takes, of which the plan pads the most.
    assert {s["node"]: s["positions"] for r in plan["replicas"] for s in r["shards"]} == {
        "attic": 16384,
        "study": 4096,
    }

    def told(node: LocalNode) -> dict[str, Any] | None:
        (shard,) = node.get("/mesh/v1/status")["shards"]
        return None if shard["memory"] is None else dict(shard)

    for node, replica in zip(house, plan["replicas"], strict=True):
        served = until(lambda node=node: told(node), "its process has said what it takes", node)
        (planned,) = replica["shards"]
        said_mb, need = served["memory"], planned["need"]
        assert said_mb["weights_mb"] - 1 < need["weights"] / 2**20 <= said_mb["weights_mb"]
        caches_mb = served["vram_required_mb"] - said_mb["weights_mb"] - said_mb["headroom_mb"]
        assert caches_mb - 1 < need["caches"] / 2**20 <= caches_mb
        assert 1.0 <= need["total"] / 2**20 / served["vram_required_mb"] < 1.2
    assert hearthnet("evict", "builtin", node=attic).returncode == 0


def test_who_waits_is_told_how_far_it_is_and_when_it_is_so(
    house: tuple[LocalNode, LocalNode],
) -> None:
    attic, study = house
    late = hearthnet(
        "deploy", "builtin", "--replicas", "2", "--wait", "--timeout", "0", node=attic
    )  # fmt: skip
    assert late.returncode == 5
    assert "builtin was not up within 0 s" in late.stderr
    up = hearthnet("scale", "builtin", "2", "--wait", "--timeout", "60", node=attic)
    assert up.returncode == 0, up.stderr
    ready(attic, replicas=2)
    assert len(serving(attic)) == 2
    fewer = hearthnet("scale", "builtin", "1", "--wait", node=attic)
    assert fewer.returncode == 0, fewer.stderr
    assert "layers 0-7 of builtin are unloaded" in fewer.stderr
    (name,) = serving(attic)
    gone = hearthnet("evict", "builtin", "--wait", node=study)
    assert gone.returncode == 0, gone.stderr
    assert f"{name}: layers 0-7 of builtin are unloaded" in gone.stderr
    assert serving(study) == []


def serving(node: LocalNode) -> list[str]:
    """Who serves layers, as one node sees it."""
    picture = node.get("/mesh/v1/status")
    own = {**picture["node"], "shards": picture["shards"]}
    return [each["name"] for each in (own, *picture["peers"]) if each["shards"]]


def estimate(node: LocalNode, *flags: str) -> dict[str, Any]:
    """The plan that the command line prints."""
    asked = hearthnet("deploy", "builtin", *flags, "--json", node=node)
    plan: dict[str, Any] = json.loads(asked.stdout)
    assert (asked.returncode == 0) == (plan["refusal"] is None), asked.stderr
    return plan


def lies(plan: dict[str, Any]) -> set[str]:
    """On which machines."""
    return {shard["node"] for replica in plan["replicas"] for shard in replica["shards"]}


def test_each_flag_of_an_estimate_reaches_it(house: tuple[LocalNode, LocalNode]) -> None:
    attic, _ = house
    kinds = ("--streams", "3", "--dedicated", "--quant", "int8", "--context", "512")
    plan = estimate(attic, "--estimate", *kinds)
    known = ("streams", "dedicated", "quant", "context")
    assert [plan[name] for name in known] == [3, True, "int8", 512]
    assert lies(estimate(attic, "--estimate", "--nodes", "study")) == {"study"}
    pinned = estimate(attic, "--estimate", "--layers", "attic=0-2", "--layers", "study=3-7")
    laid = {s["node"]: s["layers"] for r in pinned["replicas"] for s in r["shards"]}
    assert laid == {"attic": "0-2", "study": "3-7"}
    beyond = estimate(attic, "--estimate", "--layers", "attic=5-9")
    assert "has layers 0-7, not 5-9" in beyond["refusal"]["message"]
    # Without the flag of that name as well, what is supposed is only estimated.
    assert lies(estimate(attic, "--without", "attic")) == {"study"}
    bought = estimate(attic, "--with", "van=64:100", "--without", "attic", "--without", "study")
    assert lies(bought) == {"van"}
    said = hearthnet("deploy", "builtin", "--with", "van=64:100", node=attic)
    assert "van" in said.stdout, said
    found = attic.post(
        "/mesh/v1/plan",
        {"model": "builtin", "streams": 3, "dedicated": True, "quant": "int8", "context": 512,
         "nodes": ["study"], "layers": ["study=0-7"], "with": ["van=64:100"], "without": ["attic"]},
    )  # fmt: skip
    assert [found.json()[name] for name in known] == [3, True, "int8", 512]
    assert lies(found.json()) == {"study"}
    assert attic.get("/mesh/v1/deployments")["deployments"] == []


def test_each_flag_of_a_deployment_reaches_the_wish(house: tuple[LocalNode, LocalNode]) -> None:
    attic, study = house
    flags = ("--quant", "none", "--context", "600", "--dedicated", "--minimum-seconds", "5",
             "--keep-alive", "90", "--nodes", "attic,study", "--layers", "study=0-4")  # fmt: skip
    deployed = hearthnet("deploy", "builtin", *flags, "--wait", node=attic)
    assert deployed.returncode == 0, deployed.stderr
    ready(*house)
    wished = row(study)
    known = ("quant", "context", "dedicated", "minimum_s", "keep_alive_s", "replicas")
    assert [wished[name] for name in known] == ["none", 600, True, 5.0, 90.0, 1]
    assert {(s["node"], s["layers"]) for s in wished["spans"]} == {
        ("attic", "5-7"),
        ("study", "0-4"),
    }
    # What is not said stays as it is.
    changed = hearthnet("deploy", "builtin", "--shared", "--keep-alive", "0", node=study)
    assert changed.returncode == 0, changed.stderr
    until(lambda: not row(attic)["dedicated"], "it is heard")
    assert [row(attic)[name] for name in known] == ["none", 600, False, 5.0, None, 1]
    assert hearthnet("evict", "builtin", node=attic).returncode == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--quant", "int3"), "quant"),
        (("--context", "-1"), "--context"),
        (("--streams", "0"), "--streams"),
        (("--keep-alive", "-1"), "--keep-alive"),
        (("--nodes", "cellar"), "no member that may hold layers is called 'cellar'"),
        (("--layers", "attic=5-9"), "layers"),
        (("--layers", "attic"), "layers"),
        (("--layers", "attic=0-3", "--layers", "study=3-7"), "overlaps"),
        (("--estimate", "--quant", "int3"), "quant"),
        (("--estimate", "--nodes", "cellar"), "cellar"),
        (("--without", "cellar"), "cellar"),
        (("--with", "van=much"), "van"),
    ],
    ids=str,
)
def test_a_wrong_flag_is_refused_with_its_name(
    house: tuple[LocalNode, LocalNode], flags: tuple[str, ...], said: str
) -> None:
    attic, _ = house
    refused = hearthnet("deploy", "builtin", *flags, node=attic)
    assert refused.returncode != 0, refused.stdout
    assert said in refused.stderr, refused.stderr
    assert "Traceback" not in refused.stderr
    assert attic.get("/mesh/v1/deployments")["deployments"] == []


def test_a_copy_beside_another_moves_to_a_machine_that_comes(
    house: tuple[LocalNode, LocalNode], start_node: StartNode
) -> None:
    attic, study = house
    deployed = hearthnet("deploy", "builtin", "--replicas", "3", "--wait", node=attic)
    assert deployed.returncode == 0, deployed.stderr
    assert {span["node"] for span in row(attic)["spans"]} == {"attic", "study"}
    cellar = start_node("cellar", "--layers", "none")
    cellar.wait_up()

    def has_parted() -> bool:
        spans = row(cellar)["spans"] if rows(cellar) else ()
        return {(span["node"], span["layers"]) for span in spans} == {
            (name, "0-7") for name in ("attic", "study", "cellar")
        }

    until(has_parted, "each has its replica", *house, cellar)
    ready(*house, cellar, replicas=3)
    assert sorted(serving(study)) == ["attic", "cellar", "study"]
