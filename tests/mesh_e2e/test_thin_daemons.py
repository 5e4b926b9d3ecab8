"""A node with a model's config and tokenizer and nothing else of it, over daemons that hold it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mesh.cli.local_node import LocalNode
from mesh.models.manifest import read_manifest
from tests.checkpoints import make_checkpoint
from tests.mesh_e2e.conftest import StartNode
from tests.mesh_e2e.spread import hugging_face
from tests.mesh_e2e.test_losing_nodes import COUNT, PROMPT, stream
from tests.mesh_e2e.test_weights import verb
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SPANS = {"0-2": ("attic", "loft"), "3-4": ("den", "study"), "5-7": ("barn", "cellar")}


def serving(asker: LocalNode) -> set[str]:
    models = asker.get("/mesh/v1/models")["models"]
    return {node for model in models if model["id"] == "toy" for node in model["nodes"]}


def test_a_thin_node_answers_exactly_whichever_hop_is_killed(
    own_node: StartNode, tmp_path: Path
) -> None:
    fp32 = ("--dtype", "fp32")
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama", layers=8)
    ids, _ = hugging_face(checkpoint, PROMPT, COUNT)
    held = {
        name: own_node(name, "--model", f"{checkpoint}=toy", "--layers", span, *fp32)
        for span, names in SPANS.items()
        for name in names
    }
    exact = {"HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__ACTIVATION_DTYPE": "fp32"}
    sofa = own_node("sofa", "--layers", "none", *fp32, environment=exact)
    sofa.wait_up()
    wait_until(lambda: [n["id"] for n in sofa.get("/mesh/v1/weights")["neighbours"]] == ["toy"])
    pulled = verb(sofa, "pull", "toy", "--layers", "none", "--no-ends", "--json")
    assert pulled.returncode == 0, pulled.stderr
    directory = Path(json.loads(pulled.stdout)["directory"])
    assert not any(entry.present for entry in read_manifest(directory).tensors.values())
    sofa.stop()
    sofa.flags = ("--threads", "1", "--model", f"{directory}=toy", "--layers", "none", *fp32)
    sofa.start()
    for node in (*held.values(), sofa):
        node.wait_ready()
    wait_until(lambda: serving(sofa) == set(held))

    for span in ("5-7", "3-4", "0-2"):
        victims: list[LocalNode] = []

        def kill_the_serving_one(span: str = span, victims: list[LocalNode] = victims) -> None:
            (running,) = sofa.get("/mesh/v1/status")["generations"]
            (name,) = [hop["node"] for hop in running["route"] if hop["layers"] == span]
            victims.append(held[name])
            held[name].kill()

        _, events, said, _ = stream(sofa, 20, kill_the_serving_one, model="toy")
        assert said == ids
        assert [event["type"] for event in events] == ["shard_status", "shard_failover"]
        assert len(victims) == 1
    # Nothing was fetched meanwhile either.
    assert not any(entry.present for entry in read_manifest(directory).tensors.values())
    assert sofa.get("/mesh/v1/status")["shards"] == []
    assert any("thin" in line for line in sofa.get("/mesh/v1/privacy")["words"])
    answered = sofa.post(
        "/v1/completions", {"model": "toy", "prompt": "a", "max_tokens": 1, "logprobs": 5}
    )
    assert len(answered.json()["choices"][0]["logprobs"]["top_logprobs"][0]) >= 5
