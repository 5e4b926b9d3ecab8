"""Models that come and go by signed wishes: three real nodes that were told to hold nothing."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from nnsight.intervention.backends.remote import RemoteError

from mesh.cli.local_node import LocalNode
from tests.checkpoints import make_checkpoint
from tests.mesh_e2e.conftest import StartNode
from tests.mesh_e2e.spread import hugging_face
from tests.mesh_e2e.test_daemons import hearthnet, refused
from tests.ndif import client

pytestmark = pytest.mark.slow
MODEL = "toy"
LAYERS = 6
PROMPT = list(range(5, 35))
PATIENCE_S = 150.0
KV_TOKENS = 16384
"""What a shard's caches have unless more is wished."""
EVEN = {"HEARTHNET_DEPLOYMENTS__PLACEMENT": "even"}
"""So that each machine gets a part, however quick one of them is."""
IDLE = {"HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__HOST__SHARD_EVICTION_IDLE_SECONDS": "3"}
"""So that weights leave their devices soon after the last session did."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all nodes find checkpoints."""
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint(folder / MODEL, "llama", layers=LAYERS)
    return folder


@pytest.fixture(scope="module")
def house(start_node: StartNode, models: Path) -> dict[str, LocalNode]:
    settings = {
        "HEARTHNET_MODELS_DIR": str(models),
        "HEARTHNET_DEPLOYMENTS__REPLAN_SECONDS": "3",
        **EVEN,
        **IDLE,
    }
    nodes = {
        name: start_node(name, "--layers", "none", environment=settings)
        for name in ("attic", "kitchen", "study")
    }
    meet(*nodes.values())
    return nodes


def peers(node: LocalNode) -> list[str]:
    return [p["name"] for p in node.get("/mesh/v1/peers")["peers"] if p["state"] == "up"]


def meet(*nodes: LocalNode) -> None:
    """Wait until each is up and sees the others."""
    for node in nodes:
        node.wait_up()
    for node in nodes:
        until(lambda node=node: len(peers(node)) == len(nodes) - 1, "they see each other")


def until(holds: Callable[[], object], what: str, *nodes: LocalNode) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        if time.monotonic() > deadline:
            seen = json.dumps([rows(node) for node in nodes], indent=1)
            pytest.fail(f"not in time: {what}\n{seen}")
        time.sleep(0.1)
    return found


def rows(node: LocalNode) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = node.get("/mesh/v1/deployments")["deployments"]
    return found


def row(node: LocalNode) -> dict[str, Any]:
    (found,) = rows(node)
    return found


def ready(*nodes: LocalNode, replicas: int = 1) -> None:
    """Until all of these see what is wished: so many replicas, all of them up."""

    def holds() -> bool:
        return all(
            [each["state"] for each in rows(node)] == ["READY"]
            and row(node)["replicas_ready"] == replicas
            for node in nodes
        )

    until(holds, f"{replicas} replicas are up", *nodes)


def restart_at_once(*nodes: LocalNode) -> None:
    """Kill them all, start them all, and wait until what is wished is there again."""
    for node in nodes:
        node.kill()
    for node in nodes:
        node.start()
    for node in nodes:
        node.wait_up()
    ready(*nodes)


def placed(node: LocalNode) -> list[tuple[int, str, str]]:
    return [(span["replica"], span["node"], span["layers"]) for span in row(node)["spans"]]


def answer(node: LocalNode, count: int = 16) -> list[int]:
    response = node.post(
        "/v1/completions",
        {"model": MODEL, "prompt": PROMPT, "max_tokens": count, "temperature": 0,
         "ignore_eos": True, "wire_dtype": "fp32", "fallback_to_local": False},
    )  # fmt: skip
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["hearthnet"]["token_ids"]
    return ids


def level(node: LocalNode) -> tuple[str, str]:
    """As this node says it of the deployment, and nnsight's clients hear it."""
    heard = node.get("/status")["deployments"][MODEL]["deployment_level"]
    return row(node)["level"], heard


def held(node: LocalNode) -> set[str]:
    return {shard["shard_id"] for shard in node.get("/mesh/v1/status")["shards"]}


def loaded(node: LocalNode) -> set[tuple[str, int]]:
    """The formats and caches that a node's shards say that they have."""
    shards = node.get("/mesh/v1/status")["shards"]
    return {(shard["dtype"], shard["kv_tokens"]) for shard in shards}


def compiled_heads(node: LocalNode) -> set[str]:
    """The formats of few bits in which a node, as one that asks, has the model's head."""
    said = f"ends of {MODEL}: head compiled: "
    reasons = node.get("/mesh/v1/status")["reasons"]
    return {each.removeprefix(said) for each in reasons if each.startswith(said)}


@pytest.mark.timeout(600)
def test_a_deployment_from_nothing_to_its_end(house: dict[str, LocalNode], models: Path) -> None:
    attic, kitchen, study = house.values()
    expected, _ = hugging_face(models / MODEL, PROMPT, 16)

    deployed = hearthnet("deploy", MODEL, "--wait", node=attic)
    assert deployed.returncode == 0, deployed.stderr
    ready(attic, kitchen, study)
    assert {node for _, node, _ in placed(attic)} == set(house)

    # Unused, its weights leave the devices and its layers stay on offer; use brings them back.
    until(lambda: level(study) == ("WARM", "WARM"), "nobody uses it", study)
    ready(*house.values())
    for node in house.values():
        assert answer(node) == expected
    until(lambda: level(study) == ("HOT", "HOT"), "it is used", study)

    # Who is paused keeps its layers back, and the others say why they are not there.
    assert hearthnet("pause", node=kitchen).returncode == 0
    (away,) = until(lambda: [s for s in row(attic)["spans"] if s["phase"] == "AWAY"], "it is away")
    assert away["node"] == "kitchen"
    assert "paused" in away["reason"]
    # It keeps its part, and is given no more.
    before = placed(attic)
    estimated = hearthnet("deploy", MODEL, "--estimate", node=attic)
    assert re.search(r"kitchen .*it is paused, until `hearthnet resume` there", estimated.stdout)
    assert hearthnet("scale", MODEL, "2", node=attic).returncode == 0
    assert set(before) < set(placed(attic))
    assert {node for replica, node, _ in placed(attic) if replica == 1} == {"attic", "study"}
    assert hearthnet("scale", MODEL, "1", node=attic).returncode == 0
    assert hearthnet("resume", node=kitchen).returncode == 0
    ready(*house.values())

    # Replicas up and down; numbers are not used again.
    assert hearthnet("scale", MODEL, "3", "--wait", node=kitchen).returncode == 0
    ready(*house.values(), replicas=3)
    assert {replica for replica, _, _ in placed(study)} == {0, 2, 3}
    assert all(len(held(node)) == 3 for node in house.values())
    assert hearthnet("scale", MODEL, "1", node=study).returncode == 0
    ready(*house.values())
    until(lambda: all(len(held(n)) == 1 for n in house.values()), "one span each", attic)
    assert answer(kitchen) == expected

    # Another format, and longer caches, are loaded anew in the place of what is there.
    parts = [held(node) for node in house.values()]
    whole = loaded(attic)
    for change, is_loaded in (
        (("--quant", "int8"), {("int8", KV_TOKENS)}),
        (("--context", "20000"), {("int8", 20000)}),
        (("--quant", "none", "--context", "20000"), {(dtype, 20000) for dtype, _ in whole}),
    ):
        changed = hearthnet("deploy", MODEL, *change, "--wait", node=attic)
        assert changed.returncode == 0, changed.stderr
        for node, part in zip(house.values(), parts, strict=True):
            layers = min(part).rpartition(":")[2]
            gap = f"{node.name} drops layers {layers} before it loads layers {layers}"
            assert f"{MODEL} is away for a moment: {gap}" in changed.stderr, changed.stderr
        ready(attic, kitchen, study)
        assert all(loaded(node) == is_loaded for node in house.values())
        # The ends are in the format of the layers, wherever they are computed.
        heads = {head for head, _ in is_loaded if head == "int8"}
        until(
            lambda heads=heads: all(compiled_heads(n) == heads for n in house.values()),
            "heads as layers", *house.values(),
        )  # fmt: skip
        assert len(answer(study, 4)) == 4
    assert parts == [held(node) for node in house.values()]
    assert answer(kitchen) == expected

    # A machine that comes back takes up its part again.
    before = placed(attic)
    study.kill()
    until(lambda: row(attic)["missing"], "the gap is seen", attic)
    study.start()
    study.wait_up()
    ready(attic, kitchen, study)
    assert placed(attic) == before
    assert answer(study) == expected

    # One that stays away is planned around; back again, it has nothing to hold.
    study.kill()
    until(lambda: len(peers(attic)) == 1, "it is gone", attic)
    until(lambda: placed(attic) != before, "it is planned around", attic)
    ready(attic, kitchen)
    assert {node for _, node, _ in placed(kitchen)} == {"attic", "kitchen"}
    assert answer(kitchen) == expected
    shown = hearthnet("status", node=kitchen)
    assert f"{MODEL} was planned anew: study " in shown.stdout + shown.stderr, shown
    study.start()
    study.wait_up()
    ready(attic, kitchen, study)
    assert held(study) == set()

    restart_at_once(*house.values())
    assert answer(attic) == expected

    assert hearthnet("evict", MODEL, node=attic).returncode == 0
    for node in house.values():
        until(lambda node=node: not held(node) and not rows(node), "it is gone", node)
    until(
        lambda: MODEL not in [m["id"] for m in kitchen.get("/mesh/v1/models")["models"]],
        "nobody asks it",
        kitchen,
    )
    error = refused(kitchen, "/v1/completions", {"model": MODEL, "prompt": PROMPT})
    assert error["code"] == "model_not_found"


def test_layers_that_are_held_by_hand_have_a_level_too(own_node: StartNode) -> None:
    node = own_node("solo", environment=IDLE)
    node.wait_ready()

    def levels() -> tuple[str, str]:
        said = node.get("/status")["deployments"]["builtin"]["deployment_level"]
        (model,) = node.get("/mesh/v1/models")["models"]
        return said, model["level"]

    until(lambda: levels() == ("WARM", "WARM"), "nobody uses it")
    body = {"model": "builtin", "prompt": "The kettle", "max_tokens": 1}
    assert node.post("/v1/completions", body).status_code == 200
    until(lambda: levels() == ("HOT", "HOT"), "it is used")


def test_run_brings_a_model_up_on_machines_that_hold_nothing(house: dict[str, LocalNode]) -> None:
    attic, kitchen, study = house.values()
    arguments = ("--raw", "--max-tokens", "4", "--ignore-eos", "--json")
    ran = hearthnet("run", MODEL, "The kettle", *arguments, node=kitchen)
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    assert answer["usage"]["completion_tokens"] == 4
    assert {hop["node"] for hop in answer["hearthnet"]["route"]} == set(house)
    assert "attic: layers" in ran.stderr
    assert "is ready" in ran.stderr
    ready(attic, kitchen, study)
    again = hearthnet("run", MODEL, "The kettle", *arguments, node=study)
    assert json.loads(again.stdout)["hearthnet"]["token_ids"] == answer["hearthnet"]["token_ids"]
    assert "deploying" not in again.stderr
    unknown = hearthnet("run", "nobody-has-this", "x", node=attic)
    assert unknown.returncode == 4
    assert "not on this machine" in unknown.stderr
    assert hearthnet("evict", MODEL, node=study).returncode == 0
    for node in house.values():
        until(lambda node=node: not held(node) and not rows(node), "it is gone", node)


def made_key(node: LocalNode, *, trusted: bool) -> str:
    order = {"name": "lab", "scopes": ["chat", "interventions"], "trusted": trusted}
    key: str = node.post("/mesh/v1/keys", order).json()["key"]
    return key


def loading(node: LocalNode, key: str) -> httpx.Response:
    """What a client of Ollama hears that has the model loaded before it asks."""
    return httpx.post(
        f"{node.url}/api/generate", json={"model": MODEL}, trust_env=False, timeout=60,
        headers={"Authorization": f"Bearer {key}"},
    )  # fmt: skip


def test_a_deployment_rests_without_use_and_who_may_wakes_it(
    house: dict[str, LocalNode], models: Path
) -> None:
    attic, kitchen, study = house.values()
    # Longer than use takes to be heard of where this machine stands still meanwhile.
    order = {"model": MODEL, "keep_alive_s": 4.0, "minimum_s": 0.0, "nodes": ["attic", "kitchen"]}
    assert kitchen.post("/mesh/v1/deployments", order).status_code == 202
    ready(attic, kitchen, study)
    talk = hearthnet("chat", "--json", stdin="/set max_tokens 2\nTea?\n", node=study)
    assert json.loads(talk.stdout)["usage"]["completion_tokens"] == 2, talk.stderr
    assert f"{MODEL} is not all up here yet" in talk.stderr
    expected = answer(kitchen, 4)
    assert level(kitchen) == ("HOT", "HOT")
    # By the node that will have it rest: what others see of its use may be some seconds old.
    until(lambda: any(row(node)["rests_at"] for node in house.values()), "it is told when", attic)

    def rests() -> bool:
        return all(row(node)["level"] == "COLD" and not held(node) for node in house.values())

    until(rests, "it rests", attic)

    def is_said_to_rest() -> bool:  # by what is offered, which others hear of a moment later
        status = kitchen.get("/status")["deployments"][MODEL]
        return bool(
            status["deployment_level"] == "COLD" and status["application_state"] == "NOT_STARTED"
        )

    until(is_said_to_rest, "that is said to nnsight's clients", attic)

    # Who has no key, or one that is not trusted, does not wake it, neither by a chat nor by a job.
    question = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0,
                "ignore_eos": True, "wire_dtype": "fp32"}  # fmt: skip
    guest, lab = (made_key(kitchen, trusted=trusted) for trusted in (False, True))
    for key, states in ((guest, []), (lab, ["COLD"])):
        listed = httpx.get(
            f"{kitchen.url}/v1/models",
            headers={"Authorization": f"Bearer {key}"},
            trust_env=False,
            timeout=60,
        ).json()["data"]
        found = [model["hearthnet"]["state"] for model in listed if model["id"] == MODEL]
        assert found == states, listed
    for key in ("", guest):
        refusal = httpx.post(
            f"{kitchen.url}/v1/completions", json=question, trust_env=False, timeout=60,
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )  # fmt: skip
        assert refusal.status_code == 403, refusal.text
        assert "COLD" in refusal.json()["error"]["message"]
        with pytest.raises(RemoteError, match="COLD"):
            client.logits_of(models / MODEL, MODEL, "The kettle", kitchen.url, key)
    assert loading(kitchen, guest).status_code == 403
    assert rests()

    # A job of a trusted key does, and is told how far it is before it runs.
    logits, via = client.logits_of(models / MODEL, MODEL, "The kettle", kitchen.url, lab)
    assert logits.shape[-1] == 384
    heard = [(each.status.value, each.description) for each in via.seen]
    assert any("not up yet" in said for _, said in heard), heard
    assert [status for status, _ in heard][-3:] == ["DISPATCHED", "RUNNING", "COMPLETED"], heard
    assert {status for status, said in heard if "not up yet" in said} <= {
        "QUEUED", "PROVISIONING", "DEPLOYING",
    }  # fmt: skip

    until(rests, "it rests again", attic)
    events = []
    with httpx.stream(
        "POST", f"{kitchen.url}/v1/completions", json={**question, "stream": True},
        headers={"Authorization": f"Bearer {lab}"}, trust_env=False, timeout=60,
    ) as response:  # fmt: skip
        chunks = [
            json.loads(line.removeprefix("data: "))
            for line in response.iter_lines()
            if line.startswith("data: {")
        ]
    events = [c["hearthnet"]["event"] for c in chunks if "event" in c.get("hearthnet", {})]
    assert {event["type"] for event in events} == {"bringing_up"}, events
    assert events[0]["phase"] in {"QUEUED", "PROVISIONING", "DEPLOYING"}
    assert chunks[-1]["hearthnet"]["token_ids"] == expected
    until(lambda: row(study)["level"] == "HOT", "who has no part in it hears of it", study)
    assert loading(kitchen, lab).json()["done_reason"] == "load"
    assert hearthnet("evict", MODEL, node=attic).returncode == 0
    for node in house.values():
        until(lambda node=node: not held(node) and not rows(node), "it is gone", node)
