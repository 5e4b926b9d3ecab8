"""What leaves a machine and who sees it, with real daemons: switches, layers kept, the report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from mesh.cli.local_node import LocalNode
from mesh.models.builtin import checkpoint_dir
from tests.mesh_e2e.conftest import StartNode
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

OFF = {"HEARTHNET_POLICY__RESEARCH__ENABLE": "false"}
SECTION_OFF = {"HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__ENABLED": "false"}
KEEP_TWO = {"HEARTHNET_ROUTING__KEEP_FIRST": "2", "HEARTHNET_ROUTING__KEEP_LAST": "1"}
PROMPT = [31, 7, 250, 99, 12]


def ask(node: LocalNode) -> Any:
    body = {
        "model": "builtin", "prompt": PROMPT, "max_tokens": 12, "temperature": 0,
        "ignore_eos": True, "fallback_to_local": False,
    }  # fmt: skip
    return node.post("/v1/completions", body)


def doctor(node: LocalNode, *flags: str) -> str:
    command = [sys.executable, "-m", "mesh.cli.main", "doctor", "privacy", *flags]
    run = subprocess.run(
        [*command, "--state-dir", str(node.state_dir)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return run.stdout


def recorded(node: LocalNode) -> dict[str, tuple[str, bool]]:
    rows = node.get("/mesh/v1/hearth")["shards"]
    return {row["shard_id"]: (row["node"], row["withdrawn"]) for row in rows}


@pytest.fixture(scope="module")
def attic(start_node: StartNode) -> LocalNode:
    """It holds every layer, and tells its log all it would ever tell."""
    return start_node("attic", "--log-level", "debug")


def test_layers_kept_at_home_stay_there_and_the_report_says_so(
    attic: LocalNode, start_node: StartNode
) -> None:
    sofa = start_node("sofa", "--layers", "none", environment=KEEP_TWO)
    attic.wait_ready()
    sofa.wait_ready()
    response = ask(sofa)
    assert response.status_code == 200, response.text
    facts = response.json()["hearthnet"]
    total = attic.get("/mesh/v1/models")["models"][0]["total_layers"]
    route = [(hop["node"], hop["layers"]) for hop in facts["route"]]
    assert route == [
        ("sofa", "0-1"), ("attic", f"2-{total - 2}"), ("sofa", f"{total - 1}-{total - 1}"),
    ]  # fmt: skip
    assert facts["token_ids"] == ask(attic).json()["hearthnet"]["token_ids"]
    # They are sofa's alone: nobody was told of them.
    assert sofa.get("/mesh/v1/status")["shards"] == []
    assert not any(p["shards"] for p in attic.get("/mesh/v1/peers")["peers"])

    report = json.loads(doctor(sofa, "--json"))
    (next_route,) = [r for r in report["routes"] if r["request"] is None]
    assert [(hop["node"], hop["layers"], hop["sight"]) for hop in next_route["hops"]] == [
        ("sofa", "0-1", "this machine"),
        ("attic", f"2-{total - 2}", "recoverable"),
        ("sofa", f"{total - 1}-{total - 1}", "this machine"),
    ]
    words = doctor(sofa)
    assert "can compute back most of prompt and answer" in words
    assert "Layers that always run here: the first 2 and the last 1." in words
    assert doctor(attic).count("nobody else sees these") == 1
    # What attic serves is in the log for all to read, once, and what sofa keeps is not.
    wait_until(lambda: recorded(sofa) == {f"builtin:0-{total - 1}": ("attic", False)}, "the record")


def test_what_cannot_be_held_at_home_is_said_and_goes_nowhere_else(
    attic: LocalNode, start_node: StartNode
) -> None:
    limits = {
        "HEARTHNET_ROUTING__KEEP_FIRST": "6",  # more than a megabyte
        "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__HOST__SHARD_MAX_VRAM_MB": "1",
    }
    shed = start_node("shed", "--layers", "none", environment=limits)
    shed.wait_up()
    wait_until(lambda: "the limit is 1 MiB" in str(missing(shed)), "the reason")
    assert "the limit is 1 MiB" in str(shed.get("/mesh/v1/status")["reasons"])
    wait_until(lambda: shed.get("/mesh/v1/peers")["peers"], "attic is there")
    response = ask(shed)
    assert response.status_code == 503, response.text
    assert response.json()["error"]["code"] == "shard_unavailable"
    assert "have to run on this machine" in response.json()["error"]["message"]


def missing(node: LocalNode) -> list[str]:
    import httpx

    answer = httpx.get(f"{node.url}/readyz", trust_env=False, timeout=30)
    found: list[str] = answer.json()["missing"]
    return found


@pytest.mark.parametrize("switch", [OFF, SECTION_OFF], ids=["policy", "section"])
def test_switched_off_nothing_leaves_and_distributed_calls_are_refused(
    attic: LocalNode,
    start_node: StartNode,
    switch: dict[str, str],
    request: pytest.FixtureRequest,
) -> None:
    attic.wait_up()
    name = request.node.callspec.id
    sofa = start_node(name, "--layers", "0-3", environment=switch)
    sofa.wait_up()
    status = sofa.get("/mesh/v1/status")
    assert status["node"]["enabled"] is False
    assert status["node"]["endpoint"] is None
    wait_until(lambda: sofa.get("/mesh/v1/status")["shards"], "its own layers load")
    response = ask(sofa)
    assert response.status_code == 403, response.text
    assert response.json()["error"]["code"] == "experimental_disabled"
    # attic sees who else announces on this machine, but not sofa.
    seen = {peer["id"] for peer in attic.get("/mesh/v1/peers")["peers"]}
    assert status["node"]["id"] not in seen
    assert {node for node, _ in recorded(attic).values()} <= {"attic"}
    assert name in {m["name"] for m in attic.get("/mesh/v1/hearth")["members"]}
    # Local models are answered as ever.
    barn = start_node(f"barn-{name}", environment=switch)
    barn.wait_ready()
    assert ask(barn).status_code == 200


# Last, as it ends the node that the others share.
def test_neither_prompts_nor_activations_are_logged_or_written(
    attic: LocalNode, start_node: StartNode
) -> None:
    sofa = start_node("porch", "--layers", "none", "--log-level", "debug")
    attic.wait_ready()
    sofa.wait_ready()
    word = "quibblezorp"
    body = {
        "model": "builtin", "messages": [{"role": "user", "content": f"Who is {word}?"}],
        "temperature": 0, "fallback_to_local": False,
    }  # fmt: skip
    facts = sofa.post("/v1/chat/completions", {**body, "max_tokens": 8}).json()
    assert [hop["node"] for hop in facts["hearthnet"]["route"]] == ["attic"]
    streamed = sofa.post("/v1/chat/completions", {**body, "stream": True, "resumable": True})
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert sofa.post("/v1/chat/completions", {**body, "max_tokens": 10**6}).status_code == 400
    for node in (sofa, attic):
        node.stop()

    ids = AutoTokenizer.from_pretrained(checkpoint_dir())(f" {word}", add_special_tokens=False)
    spelt = ids["input_ids"][-4:]
    assert len(spelt) == 4, "too few tokens to be told from chance"
    forbidden = [word.encode()]
    forbidden += [gap.join(map(str, spelt)).encode() for gap in (", ", ",", " ", "\n")]
    forbidden += [row.tobytes() for row in embedded(spelt[0])]
    held = {
        path: path.read_bytes()
        for node in (sofa, attic)
        for path in node.state_dir.rglob("*")
        if path.is_file()
    }
    assert sum(b"builtin" in data for data in held.values()) >= 2, "the search looks at something"
    assert [path for path, data in held.items() if any(one in data for one in forbidden)] == []


def embedded(token: int) -> list[Any]:
    """What leaves the asker for a token, as it travels."""
    (file,) = Path(checkpoint_dir()).glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        row = tensors.get_slice("model.embed_tokens.weight")[token]
    return [row.to(dtype).numpy() for dtype in (torch.float16, torch.float32)]
