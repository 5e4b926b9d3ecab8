"""A model that one machine has, brought up over machines that were told nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.mesh_e2e.conftest import StartNode
from tests.mesh_e2e.spread import hugging_face
from tests.mesh_e2e.test_daemons import hearthnet
from tests.mesh_e2e.test_deployments import (
    EVEN,
    LAYERS,
    MODEL,
    PROMPT,
    answer,
    peers,
    ready,
    row,
    until,
)

pytestmark = pytest.mark.slow


def test_every_machine_fetches_its_own_layers_and_no_more(
    start_node: StartNode, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "toy", "llama", layers=LAYERS)

    attic = start_node("attic", "--model", f"{checkpoint}={MODEL}", "--layers", "none")
    others = [
        start_node(name, "--layers", "none", environment=EVEN) for name in ("kitchen", "study")
    ]
    house = [attic, *others]
    for each in house:
        each.wait_up()
    for each in house:
        until(lambda each=each: len(peers(each)) == len(house) - 1, "they see each other")

    # By one that has nothing, and never will have more than the ends and what is placed there.
    deployed = hearthnet("deploy", MODEL, "--nodes", "kitchen,study", "--wait", node=others[0])
    assert deployed.returncode == 0, deployed.stderr
    ready(*house)
    assert {span["node"] for span in row(attic)["spans"]} == {"kitchen", "study"}
    expected, _ = hugging_face(checkpoint, PROMPT, 16)
    assert answer(others[0]) == expected
    assert answer(attic) == expected

    for each in others:
        models = each.get("/mesh/v1/status")["weights"]["models"]
        (held,) = [model for model in models if model["id"] == MODEL]
        mine = [span["layers"] for span in row(attic)["spans"] if span["node"] == each.name]
        assert (held["id"], held["layers"], held["partial"]) == (MODEL, mine, True)
        assert held["here_bytes"] < held["total_bytes"]
