"""What else people do with a node that holds no embedding and no head: it is done, with what a node
that holds them gives, or refused with the reason and what would help."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from nnsight.intervention.backends.remote import RemoteError
from transformers import AutoModel, AutoTokenizer

from mesh.cli.local_node import LocalNode
from tests.checkpoints import make_checkpoint, make_embedding_model
from tests.mesh_e2e.conftest import StartNode
from tests.mesh_e2e.test_privacy import missing
from tests.mesh_e2e.test_weights import verb
from tests.ndif import client
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FP32 = ("--dtype", "fp32")
SECTION = "HEARTHNET_RESEARCH__DISTRIBUTED_INFERENCE__"
ENVIRONMENT = {
    f"{SECTION}ACTIVATION_DTYPE": "fp32",
    f"{SECTION}HOST__HARVEST_MB": "16",
}
PROMPT = [40 + i for i in range(24)]
WIDTH = 64
KEY = client.KEY.replace("builtin", "toy")


@dataclass(frozen=True)
class House:
    """`attic` and `cellar` hold half of the layers each, and both ends; `sofa` neither."""

    attic: LocalNode
    cellar: LocalNode
    sofa: LocalNode

    def both(self, path: str, body: dict[str, Any]) -> list[Any]:
        """What the thick attic says, and the thin sofa."""
        answers = [node.post(path, body) for node in (self.attic, self.sofa)]
        assert [each.status_code for each in answers] == [200, 200], answers[1].text
        return [each.json() for each in answers]


@pytest.fixture(scope="module")
def house(start_node: StartNode, tmp_path_factory: pytest.TempPathFactory) -> House:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("toy") / "toy", "llama", layers=8)
    make_embedding_model(checkpoint)
    model = ("--model", f"{checkpoint}=toy")
    attic = start_node("attic", *model, "--layers", "0-3", *FP32, environment=ENVIRONMENT)
    cellar = start_node("cellar", *model, "--layers", "4-7", *FP32, environment=ENVIRONMENT)
    sofa = start_node("sofa", "--layers", "none", *FP32, environment=ENVIRONMENT)
    sofa.wait_up()
    wait_until(lambda: [n["id"] for n in sofa.get("/mesh/v1/weights")["neighbours"]] == ["toy"])
    pulled = verb(sofa, "pull", "toy", "--layers", "none", "--no-ends", "--json")
    assert pulled.returncode == 0, pulled.stderr
    directory = Path(json.loads(pulled.stdout)["directory"])
    restarted(sofa, "--model", f"{directory}=toy", "--layers", "none")
    for node in (attic, cellar):
        node.wait_ready()
    wait_until(lambda: serving(sofa) == {"attic", "cellar"})
    return House(attic, cellar, sofa)


def serving(node: LocalNode) -> set[str]:
    models = node.get("/mesh/v1/models")["models"]
    return {name for model in models if model["id"] == "toy" for name in model["nodes"]}


def restarted(node: LocalNode, *flags: str, until: str = "", **environment: str) -> None:
    """Start it anew and wait until it is ready, or misses what is said in `until`."""
    node.stop()
    node.flags = ("--threads", "1", *FP32, *flags)
    node.environment = {**node.environment, **environment}
    node.start()
    if not until:
        node.wait_ready()
        return
    node.wait_up()
    wait_until(lambda: any(until in line for line in missing(node)))


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 2, "seed": 3}])
def test_log_probabilities_are_the_same_to_the_last_bit(
    house: House, sampling: dict[str, Any]
) -> None:
    # How many rows a step has, and with them its last bits, would be up to the clock with drafts.
    alone = {"draft": False}
    body = {"model": "toy", "max_tokens": 12, "ignore_eos": True, "hearthnet": alone, **sampling}
    thick, thin = house.both("/v1/completions", {**body, "prompt": PROMPT, "logprobs": 5})
    assert thin["choices"] == thick["choices"]
    assert len(thin["choices"][0]["logprobs"]["token_logprobs"]) == 12
    hello = [{"role": "user", "content": "The kettle sings"}]
    told = {"messages": hello, "logprobs": True, "top_logprobs": 20}
    thick, thin = house.both("/v1/chat/completions", {**body, **told})
    assert thin["choices"] == thick["choices"]
    assert len(thin["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 20


def test_texts_are_embedded_as_by_hugging_face(house: House) -> None:
    texts = ["The kettle sings", "Anna reads to the cat " * 40]
    body = {"model": "toy", "input": texts}
    answers = house.both("/v1/embeddings", body)
    pulled = Path(house.sofa.flags[house.sofa.flags.index("--model") + 1].partition("=")[0])
    checkpoint = Path(house.attic.flags[house.attic.flags.index("--model") + 1].partition("=")[0])
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    whole: Any = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for number, text in enumerate(texts):
        with torch.no_grad():
            states = whole(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(states, dim=0)
        for answer in answers:
            embedding = torch.tensor(answer["data"][number]["embedding"])
            assert torch.allclose(embedding, expected, atol=1e-5)
    # The sofa has what says how; the final norm is run by who has the last layer.
    assert (pulled / "1_Pooling" / "config.json").exists()


def test_steering_steers(house: House) -> None:
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
    edit = {
        "name": "loud", "model": "toy", "path": "model.layers.5",
        "tensors": base64.b64encode(safetensors.torch.save({"vector": vector})).decode(),
    }  # fmt: skip
    house.sofa.post("/mesh/v1/steering/publish", edit).raise_for_status()
    wait_until(lambda: house.attic.get("/mesh/v1/steering")["edits"])
    body = {"model": "toy", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    plain, _ = house.both("/v1/completions", body)
    steer = {"hearthnet": {"steer": [{"name": "loud", "strength": 3}]}}
    thick, thin = house.both("/v1/completions", body | steer)
    assert thin["choices"] == thick["choices"] != plain["choices"]


def test_a_harvest_writes_the_same_activations(house: House) -> None:
    """Only its hops write; what it says of their files has their hashes."""
    body = {
        "model": "toy", "batch": 0, "module": "model.layers.*", "max_tokens": 16,
        "texts": ["The kettle sings", "while rain runs"],
    }  # fmt: skip
    found = [
        node.post("/mesh/v1/harvest", {**body, "run": str(number) * 16})
        for number, node in enumerate((house.attic, house.sofa))
    ]
    assert [each.status_code for each in found] == [200, 200], found[1].text
    thick, thin = (
        [(file["node_name"], file["module"], file["sha256"]) for file in each.json()["files"]]
        for each in found
    )
    assert thin == thick
    assert len(thin) == 8


def test_a_lens_reads_with_a_head(house: House) -> None:
    refused = house.sofa.post("/mesh/v1/lens", {"model": "toy", "prompt": "The kettle"})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (409, "weights_missing")
    assert "hearthnet pull toy --layers none" in error["fix"]


def test_tokens_are_counted_by_whoever_has_the_tokenizer(house: House) -> None:
    asked = {"model": "toy", "messages": [{"role": "user", "content": "The kettle is on."}]}
    thick, thin = house.both("/v1/messages/count_tokens", asked)
    assert thick == thin
    (answer, _) = house.both("/v1/messages", {**asked, "max_tokens": 2})
    assert answer["usage"]["input_tokens"] == thin["input_tokens"] > 10


def test_nobody_who_runs_the_head_is_no_route(house: House) -> None:
    """Sofa serves the last layers itself now, alone, and cannot say what comes behind them."""
    assert verb(house.sofa, "pull", "toy", "--layers", "4-7", "--no-ends").returncode == 0
    restarted(house.sofa, *house.sofa.flags[4:-1], "4-7")
    house.cellar.stop()
    wait_until(lambda: serving(house.sofa) == {"attic", "sofa"})
    body = {"model": "toy", "prompt": PROMPT, "max_tokens": 4, "fallback_to_local": False}
    refused = house.sofa.post("/v1/completions", body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (503, "shard_unavailable")
    assert "runs the head for it" in error["message"]
    assert "hearthnet pull toy --layers none" in error["fix"]


def test_a_job_runs_beside_a_head_which_may_be_fetched_meanwhile(house: House) -> None:
    job = {"api_key": house.sofa.record.api_key}
    with pytest.raises(RemoteError, match="hearthnet pull toy --layers none"):
        client.trace(client.Recording(KEY, host=house.sofa.url, **job), "toy")
    assert verb(house.sofa, "pull", "toy", "--layers", "none").returncode == 0
    found = client.trace(client.Recording(KEY, host=house.sofa.url, **job), "toy")
    assert found["value"].shape[-1] == 384


def test_noise_goes_on_what_is_embedded_here(house: House) -> None:
    noisy = {"HEARTHNET_ROUTING__ACTIVATION_NOISE": "0.1", f"{SECTION}THIN": "always"}
    restarted(house.sofa, *house.sofa.flags[4:], until="thin not `always`", **noisy)
    refused = house.sofa.post("/v1/completions", {"model": "toy", "prompt": PROMPT})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "routing.activation_noise"
