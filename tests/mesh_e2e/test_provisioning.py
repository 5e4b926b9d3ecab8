"""A model that one machine has, brought up over machines that were told nothing of it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from mesh.models.builtin import checkpoint_dir
from mesh.models.local import BUILTIN
from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf
from tests.mesh_e2e.conftest import StartNode
from tests.mesh_e2e.spread import hugging_face
from tests.mesh_e2e.test_daemons import hearthnet
from tests.mesh_e2e.test_deployments import (
    EVEN,
    LAYERS,
    MODEL,
    PROMPT,
    answer,
    meet,
    ready,
    row,
    rows,
    until,
)
from tests.transfers.hub_standin import HubStandin

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
    meet(*house)

    def heard() -> list[str]:
        return [found["id"] for found in others[0].get("/mesh/v1/weights")["neighbours"]]

    until(lambda: MODEL in heard(), "it heard who has the files")
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


def test_run_brings_up_what_only_the_hub_has_and_each_byte_of_it_comes_once(
    own_node: StartNode, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "toy", "llama", layers=LAYERS)
    weights = checkpoint / "model.safetensors"
    with HubStandin(checkpoint) as hub:
        settings = {**EVEN, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        house = [own_node(name, environment=settings) for name in ("attic", "kitchen")]
        meet(*house)
        more = ("--raw", "--max-tokens", "4", "--ignore-eos", "--json")
        ran = hearthnet("run", "org/toy", "The kettle", *more, node=house[1])
        assert ran.returncode == 0, ran.stderr
        facts = json.loads(ran.stdout)["hearthnet"]
        assert {hop["node"] for hop in facts["route"]} == {"attic", "kitchen"}
        prompt = AutoTokenizer.from_pretrained(checkpoint).encode("The kettle")
        assert facts["token_ids"] == hugging_face(checkpoint, prompt, 4)[0]
        # A header is asked for before the file is.
        assert weights.stat().st_size <= hub.sent[weights.name] < 1.1 * weights.stat().st_size


def test_a_model_of_the_hub_is_estimated_unread_and_then_read_in_sight(
    own_node: StartNode, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "toy", "llama", layers=LAYERS, hidden=256, vocab=9000)
    weights = checkpoint / "model.safetensors"
    size = weights.stat().st_size
    with HubStandin(checkpoint) as hub:
        node = own_node("attic", environment={"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"})
        node.wait_up()
        estimated = hearthnet("deploy", "org/toy", "--estimate", "--json", node=node)
        assert estimated.returncode == 0, estimated.stderr
        plan = json.loads(estimated.stdout)
        assert (plan["model_id"], plan["total_layers"]) == ("org/toy", LAYERS)
        assert 0 < hub.sent[weights.name] < 20_000  # a header

        hub.mischief.suffix, hub.mischief.bytes_per_s = weights.suffix, size / 300
        begin = time.monotonic()
        asked = node.post("/mesh/v1/deployments", {"model": "org/toy"})
        assert time.monotonic() - begin < 100  # all of it would take 300 s
        assert (asked.status_code, asked.json()["state"]) == (202, "PROVISIONING")
        until(lambda: row(node)["spans"][0]["done_bytes"] > 0, "it is being read", node)
        assert hearthnet("evict", "org/toy", node=node).returncode == 0
        assert rows(node) == []

        hub.mischief.bytes_per_s = size / 6
        deployed = hearthnet("deploy", "org/toy", "--wait", node=node)
        assert deployed.returncode == 0, deployed.stderr
        said = [int(part) for part in re.findall(r"is being fetched, (\d+) %", deployed.stderr)]
        assert said == sorted(said)
        assert len(set(said) & set(range(1, 100))) >= 4
        ready(node)
        assert row(node)["deployment"] == deployed.stdout.partition("(")[2].partition(")")[0]


def test_the_same_weights_come_up_under_each_name_that_the_hub_has_for_them(
    own_node: StartNode, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "toy", "llama", layers=2)
    with HubStandin(checkpoint, mirror="org/mirror", before="org/old") as hub:
        node = own_node("attic", environment={"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"})
        node.wait_up()
        for model in ("org/toy", "org/mirror", "org/old"):
            ran = hearthnet("run", model, "The kettle", "--max-tokens", "2", node=node)
            assert ran.returncode == 0, ran.stderr
    assert [each["model_id"] for each in rows(node)] == ["org/mirror", "org/toy"]
    assert hearthnet("evict", "org/mirror", node=node).returncode == 0
    node.stop()
    node.start()
    node.wait_up()  # with no hub any more: what is on the disk is known at once
    found = node.get("/mesh/v1/weights")["models"]
    held = {each["id"]: each["directory"] for each in found if each["id"] != BUILTIN}
    assert held.keys() == {"org/toy", "org/mirror"}
    assert len({*held.values()}) == 2
    ran = hearthnet("run", "org/mirror", "The kettle", "--max-tokens", "2", node=node)
    assert ran.returncode == 0, ran.stderr


def test_run_brings_up_a_repository_that_has_only_gguf_files(
    own_node: StartNode, tmp_path: Path
) -> None:
    (tmp_path / "repository").mkdir()
    files = [tmp_path / "repository" / f"toy-{kind}.gguf" for kind in ("Q8_0", "Q4_0")]
    for file, kind in zip(files, ("Q8_0", "Q4_0"), strict=True):
        write_gguf(checkpoint_dir(), file, kind)
    more = ("Oats", "--raw", "--max-tokens", "8", "--ignore-eos", "--json")
    with HubStandin(tmp_path / "repository") as hub:
        settings = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
        node = own_node("attic", environment=settings)
        node.wait_up()
        refused = hearthnet("run", "org/toy", *more, node=node)
        assert "2 GGUF models: toy-Q4_0.gguf, toy-Q8_0.gguf" in refused.stderr
        named = "org/toy/toy-Q8_0.gguf"
        estimated = hearthnet("deploy", named, "--estimate", "--json", node=node)
        assert json.loads(estimated.stdout)["total_layers"] == 8, estimated.stderr
        assert hub.sent[files[0].name] < files[0].stat().st_size  # a header
        ran = hearthnet("run", named, *more, node=node)
        assert ran.returncode == 0, ran.stderr
        assert len(json.loads(ran.stdout)["hearthnet"]["token_ids"]) == 8
    # It is here now, under the name that it was asked by.
    again = hearthnet("run", named, *more, node=node)
    assert json.loads(again.stdout)["text"] == json.loads(ran.stdout)["text"], again.stderr
    node.stop()
    node.start()
    node.wait_up()
    ready(node)
    again = hearthnet("run", named, *more, node=node)
    assert json.loads(again.stdout)["text"] == json.loads(ran.stdout)["text"], again.stderr


def test_a_file_that_one_machine_has_is_spread_and_answers_as_there(
    own_node: StartNode, tmp_path: Path
) -> None:
    file = write_gguf(checkpoint_dir(), tmp_path / "small.gguf", "F16")
    house = [own_node(name, environment=EVEN) for name in ("attic", "kitchen")]
    meet(*house)
    attic, kitchen = house
    pins = ("--layers", "attic=0-3", "--layers", "kitchen=4-7")
    deployed = hearthnet("deploy", str(file), "--quant", "none", *pins, "--wait", node=kitchen)
    assert deployed.returncode == 0, deployed.stderr
    ready(kitchen)
    tokenizer, count = AutoTokenizer.from_pretrained(checkpoint_dir()), 12
    prompt = tokenizer.encode("Every evening the fox")
    expected, _ = hugging_face(checkpoint_dir(), prompt, count)
    for node in house:  # attic has its layers and the file's head of kitchen
        body = {"model": "small", "prompt": prompt, "max_tokens": count, "temperature": 0}
        body["wire_dtype"] = "fp32"
        facts = node.post("/v1/completions", body).raise_for_status().json()["hearthnet"]
        assert [hop["node"] for hop in facts["route"]] == ["attic", "kitchen"]
        assert facts["token_ids"] == expected
    (here,) = (each for each in attic.get("/mesh/v1/weights")["models"] if each["id"] == "small")
    assert here["here_bytes"] < here["total_bytes"]
    part = Path(here["directory"]) / file.name
    assert part.stat().st_blocks * 512 < file.stat().st_size == part.stat().st_size


def test_what_the_hub_cannot_give_is_said_where_it_was_asked_for(
    own_node: StartNode, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "toy", "llama", layers=2, hidden=256, vocab=9000)
    with HubStandin(checkpoint) as hub:
        node = own_node("attic", environment={"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"})
        node.wait_up()
        hub.mischief.wrong = 99
        ran = hearthnet("run", "org/toy", "The kettle", node=node)
        assert ran.returncode != 0
        assert "transfer_failed" in ran.stderr
        assert "other bytes than the hub says" in ran.stderr
        assert (row(node)["state"], row(node)["error"]["code"]) == ("FAILED", "transfer_failed")
        hub.mischief.wrong = 0
        deployed = hearthnet("deploy", "org/toy", "--wait", node=node)
        assert deployed.returncode == 0, deployed.stderr
        ready(node)
