"""Deployments go where the planner says, by what the machines measured of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from tests.mesh_e2e.conftest import StartNode
from tests.mesh_e2e.test_daemons import hearthnet
from tests.mesh_e2e.test_deployments import peers, ready, row, until

pytestmark = pytest.mark.slow


def test_replicas_go_where_the_estimate_put_them(start_node: StartNode) -> None:
    attic, study = house = [start_node(name, "--layers", "none") for name in ("attic", "study")]
    for node in house:
        node.wait_up()
        until(lambda node=node: len(peers(node)) == 1, "they see each other")

    def estimated() -> dict[str, Any] | None:
        found = attic.post("/mesh/v1/plan", {"model": "builtin", "replicas": 2})
        assert found.status_code == 200, found.text
        plan: dict[str, Any] = found.json()
        measured = all(replica["tokens_per_second"] for replica in plan["replicas"])
        return plan if len(plan["replicas"]) == 2 and measured else None

    plan = until(estimated, "both are measured")
    # A model that fits one machine twice over lies whole on each.
    laid = {shard["node"]: shard["layers"] for r in plan["replicas"] for shard in r["shards"]}
    assert laid == {"attic": "0-7", "study": "0-7"}
    deployed = hearthnet("deploy", "builtin", "--replicas", "2", "--wait", node=attic)
    assert deployed.returncode == 0, deployed.stderr
    ready(*house, replicas=2)
    assert {span["node"]: span["layers"] for span in row(study)["spans"]} == laid
