"""Real daemons: publish on one, ask on another, kill the one that computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import safetensors.torch
from transformers import AutoTokenizer

from mesh.cli.local_node import LocalNode
from mesh.models.builtin import checkpoint_dir
from mesh.types import Edit, Site
from tests.mesh_e2e.conftest import StartNode, starter
from tests.research.steering.local import greedy_ids, load, noise
from tests.warm.daemons import command

PROMPT = [40 + i for i in range(24)]
COUNT = 200
LAYER = 5
HIDDEN: int = json.loads((checkpoint_dir() / "config.json").read_text())["hidden_size"]
TENSORS = safetensors.torch.save({"vector": noise(HIDDEN, seed=1)})
A, B = noise(HIDDEN, 2, seed=2), noise(2, HIDDEN, seed=3) / HIDDEN
LOW_RANK = safetensors.torch.save({"a": A, "b": B})

pytestmark = pytest.mark.slow


class House:
    """Two nodes with the same last layers, one with the first, and one that only asks."""

    def __init__(self, start: StartNode) -> None:
        self.first = start("first", "--layers", "0-3")
        self.twins = [start(name, "--layers", "4-7") for name in ("left", "right")]
        self.asker = start("asker", "--layers", "none")
        for node in (self.first, *self.twins, self.asker):
            node.wait_ready()

    def ask(self, steer: list[dict[str, Any]], **body: Any) -> httpx.Response:
        request = {
            "model": "builtin", "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0,
            "ignore_eos": True, "wire_dtype": "fp32", "hearthnet": {"steer": steer}, **body,
        }  # fmt: skip
        return self.asker.post("/v1/completions", request)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with starter(tmp_path_factory.mktemp("house")) as start:
        yield House(start)


@pytest.fixture(scope="module")
def model() -> Any:
    return load(checkpoint_dir())


def hearthnet(node: LocalNode, *arguments: str) -> Any:
    done = command("steer", *arguments, "--state-dir", str(node.state_dir), "--json", timeout=60)
    done.check_returncode()
    return json.loads(done.stdout)


def until(house: House, names: set[str]) -> None:
    """The asker's log has heard of these edits, and of no other."""
    import time

    deadline = time.monotonic() + 30
    while {e["name"] for e in house.asker.get("/mesh/v1/steering")["edits"]} != names:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def published(house: House, tmp_path_factory: pytest.TempPathFactory) -> House:
    folder = tmp_path_factory.mktemp("edits")
    for name, data, path in (
        ("calm", TENSORS, f"model.layers.{LAYER}"),
        ("turn", LOW_RANK, "model.layers.2.mlp.down_proj"),
    ):
        file = folder / f"{name}.safetensors"
        file.write_bytes(data)
        made = hearthnet(house.first, "publish", name, str(file), "--path", path)
        assert made["name"] == name
    until(house, {"calm", "turn"})
    return house


WANTED = [{"name": "calm", "strength": 0.75}, {"name": "turn"}]
STRONGER = [{"name": "calm", "strength": 4.0}, {"name": "turn"}]
EDITS = (Edit(Site(LAYER), 0.75, TENSORS), Edit(Site(2, "mlp.down_proj"), 1.0, LOW_RANK))


def stream(house: House, at: int, act: Callable[[], None]) -> dict[str, Any]:
    """The facts about one steered answer; `act` is done at token `at`."""
    request = {
        "model": "builtin", "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0,
        "ignore_eos": True, "wire_dtype": "fp32", "stream": True, "fallback_to_local": False,
        "hearthnet": {"steer": WANTED},
    }  # fmt: skip
    facts: dict[str, Any] = {}
    chunks = 0
    url = f"{house.asker.url}/v1/completions"
    headers = {"Authorization": f"Bearer {house.asker.record.api_key}"}
    with httpx.stream(
        "POST", url, json=request, headers=headers, timeout=120, trust_env=False
    ) as response:
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            extra = chunk.get("hearthnet", {})
            facts = extra if "token_ids" in extra else facts
            chunks += 1
            if chunks == at:
                act()
    return facts


def test_the_file_is_fetched_and_the_answer_is_the_local_one(published: House, model: Any) -> None:
    answer = published.ask(WANTED).json()
    assert answer["hearthnet"]["token_ids"] == greedy_ids(model, PROMPT, COUNT, EDITS)
    plain = published.ask([]).json()
    assert plain["hearthnet"]["token_ids"] == greedy_ids(model, PROMPT, COUNT, ())
    assert plain["hearthnet"]["token_ids"] != answer["hearthnet"]["token_ids"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_chat_is_steered_as_a_completion_is(published: House, model: Any, streamed: bool) -> None:
    messages = [{"role": "user", "content": "Who lives in the attic?"}]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_dir())
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    given = {
        "model": "builtin", "messages": messages, "max_tokens": 40, "temperature": 0,
        "extra_body": {"ignore_eos": True, "wire_dtype": "fp32", "hearthnet": {"steer": STRONGER}},
    }  # fmt: skip
    with openai.OpenAI(
        base_url=f"{published.asker.url}/v1", api_key=published.asker.record.api_key or "",
        http_client=httpx.Client(trust_env=False), max_retries=0,
    ) as client:  # fmt: skip
        if streamed:
            parts = [
                part.model_extra for part in client.chat.completions.create(**given, stream=True)
            ]
        else:
            parts = [client.chat.completions.create(**given).model_extra]
    (ids,) = [
        said["hearthnet"]["token_ids"]
        for said in parts
        if said is not None and "token_ids" in said.get("hearthnet", {})
    ]
    edits = (replace(EDITS[0], strength=4.0), EDITS[1])
    assert ids == greedy_ids(model, prompt, 40, edits)
    assert ids != greedy_ids(model, prompt, 40, ())


def test_the_openai_client_attaches_an_edit(published: House, model: Any) -> None:
    with openai.OpenAI(
        base_url=f"{published.asker.url}/v1", api_key=published.asker.record.api_key or "",
        http_client=httpx.Client(trust_env=False), max_retries=0,
    ) as client:  # fmt: skip
        answer = client.completions.create(
            model="builtin", prompt=PROMPT, max_tokens=20, temperature=0,
            extra_body={"ignore_eos": True, "wire_dtype": "fp32", "hearthnet": {"steer": WANTED}},
        )  # fmt: skip
    assert answer.model_extra is not None
    expected = greedy_ids(model, PROMPT, 20, EDITS)
    assert answer.model_extra["hearthnet"]["token_ids"] == expected


@pytest.mark.parametrize(
    ("steer", "param", "words"),
    [
        ([{"name": "clam"}], "hearthnet.steer.0.name", "clam"),
        ([{"name": "calm"}, {"name": "x"}], "hearthnet.steer.1.name", "'x'"),
        ([{"name": "calm", "strength": "much"}], "hearthnet.steer.0.strength", "number"),
        ([{"strength": 1.0}], "hearthnet.steer.0.name", "missing"),
        ([{"name": "calm", "weight": 1.0}], "hearthnet.steer.0.weight", "Unknown"),
        ([{"name": "calm", "strength": 1e6}] * 17, "hearthnet.steer", "16"),
    ],
)
def test_a_wrong_field_is_named(
    published: House, steer: list[dict[str, Any]], param: str, words: str
) -> None:
    answer = published.ask(steer)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"path": "model.layers.8"}, "path"),
        ({"path": "transformer.h.1"}, "path"),
        ({"path": "model.layers.1.mlp.nothing"}, "path"),
        ({"path": "model.layers.1.mlp.down_proj.weight"}, "path"),
        ({"side": "middle"}, "side"),
        ({"name": "../x"}, "name"),
        ({"tensors": "AAAA"}, "tensors"),
        ({"tensors": "?"}, "tensors"),
    ],
)
def test_what_cannot_be_published_is_refused(
    published: House, fields: dict[str, str], param: str
) -> None:
    import base64

    body = {
        "name": "fine", "model": "builtin", "path": "model.layers.1",
        "tensors": base64.b64encode(TENSORS).decode(), **fields,
    }  # fmt: skip
    answer = published.first.post("/mesh/v1/steering/publish", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_steered_answer_survives_the_loss_of_its_hop(published: House, model: Any) -> None:
    killed: list[LocalNode] = []

    def kill_the_serving_one() -> None:
        route = published.asker.get("/mesh/v1/status")["generations"][0]["route"]
        node = next(twin for twin in published.twins if twin.name == route[-1]["node"])
        node.kill()
        killed.append(node)

    facts = stream(published, 20, kill_the_serving_one)
    assert killed
    assert facts["failovers"] == 1
    assert facts["token_ids"] == greedy_ids(model, PROMPT, COUNT, EDITS)
    killed[0].start()
    killed[0].wait_ready()


def test_a_strong_edit_is_not_taken_for_a_broken_host(published: House, model: Any) -> None:
    answer = published.ask([{"name": "calm", "strength": 3000.0}], max_tokens=8).json()
    expected = greedy_ids(model, PROMPT, 8, [Edit(Site(LAYER), 3000.0, TENSORS)])
    assert answer["hearthnet"]["failovers"] == 0
    assert answer["hearthnet"]["token_ids"] == expected


def test_a_removed_edit_is_gone_everywhere(published: House) -> None:
    hearthnet(published.asker, "remove", "turn")
    until(published, {"calm"})
    answer = published.ask([{"name": "turn"}])
    assert answer.status_code == 400
    assert not list((Path(published.asker.state_dir) / "steering").glob("*.tmp"))
