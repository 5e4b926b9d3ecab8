"""The built-in model from a GGUF file, over two nodes: answers, traces and edits as ever."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nnsight.modeling import huggingface
from nnsight.modeling.transformers import TransformersModel
from safetensors.torch import save
from transformers import AutoTokenizer

from mesh.cli.local_node import LocalNode
from mesh.models.builtin import checkpoint_dir
from mesh.models.manifest import read_manifest
from tests.gguf_files import write_gguf
from tests.mesh_e2e.conftest import StartNode, starter
from tests.mesh_e2e.spread import hugging_face
from tests.mesh_e2e.test_losing_nodes import PROMPT, serving, stream
from tests.ndif import client
from tests.waiting import wait_until

COUNT = 60

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(checkpoint_dir(), tmp_path_factory.mktemp("gguf") / "small-f16.gguf", "F16")


@pytest.fixture(scope="module")
def asker(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNode]:
    """It holds no layers; attic has the first half, barn the second, of the file's directory."""
    with starter(tmp_path_factory.mktemp("nodes")) as start:
        yield _house(start, {"attic": (file, "0-3"), "barn": (file.parent, "4-7")}, file)


def _house(
    start: StartNode, held: dict[str, tuple[Path, str]], file: Path, *more: str
) -> LocalNode:
    for name, (path, layers) in held.items():
        start(name, "--model", f"{path}=builtin", "--layers", layers, "--dtype", "fp32", *more)
    asker = start(
        "sofa", "--model", f"{file}=builtin", "--layers", "none", "--dtype", "fp32", *more
    )
    asker.wait_ready()
    wait_until(lambda: serving(asker) == set(held))
    return asker


def test_the_answer_is_hugging_faces_over_the_checkpoint(asker: LocalNode) -> None:
    expected, _ = hugging_face(checkpoint_dir(), PROMPT, COUNT)
    facts, _, ids, text = stream(asker, 10**9, lambda: None, max_tokens=COUNT)
    assert ids == expected
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_dir())
    assert text == tokenizer.decode(ids, skip_special_tokens=True)
    assert [hop["node"] for hop in facts["route"]] == ["attic", "barn"]


def test_a_chat_follows_the_template_of_the_file_and_ends_where_it_says(asker: LocalNode) -> None:
    said = asker.post(
        "/v1/chat/completions",
        {
            "model": "builtin", "temperature": 0, "max_tokens": 200,
            "messages": [{"role": "user", "content": "Who are you?"}],
        },
    ).json()  # fmt: skip
    assert said["choices"][0]["finish_reason"] == "stop"
    assert said["choices"][0]["message"]["content"].strip()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_dir())
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who are you?"}], add_generation_prompt=True, tokenize=False
    )
    assert said["usage"]["prompt_tokens"] == len(tokenizer(prompt)["input_ids"])


def test_a_trace_gives_the_values_of_the_checkpoint(
    asker: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.configure(monkeypatch, HOST=asker.url, APIKEY=asker.record.api_key)
    monkeypatch.setitem(huggingface._ID_CACHE, str(checkpoint_dir()), "builtin")
    model = client.model()
    local = TransformersModel(
        str(checkpoint_dir()), task="text-generation", dispatch=True, dtype=torch.float32
    )
    with model.trace("The attic is", remote=True):
        hidden = model.model.layers[5].output.save()
        model.model.layers[6].output[:] = hidden * 0.5
        logits = model.output.logits.save()
    with local.trace("The attic is"):
        here = local.model.layers[5].output.save()
        local.model.layers[6].output[:] = here * 0.5
        logits_here = local.output.logits.save()
    torch.testing.assert_close(hidden, here, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, logits_here, rtol=1e-3, atol=1e-3)


def test_steering_reaches_its_layers(asker: LocalNode, tmp_path: Path) -> None:
    edit = save({"vector": torch.full((192,), 3.0)})
    body: dict[str, Any] = {
        "name": "cheerful", "model": "builtin", "path": "model.layers.5",
        "tensors": base64.b64encode(edit).decode(),
    }  # fmt: skip
    asker.post("/mesh/v1/steering/publish", body).raise_for_status()
    expected, _ = hugging_face(checkpoint_dir(), PROMPT, COUNT)
    steered = {"steer": [{"name": "cheerful", "strength": 1.0}]}
    _, _, ids, _ = stream(asker, 10**9, lambda: None, max_tokens=COUNT, hearthnet=steered)
    assert len(ids) == COUNT
    assert ids != expected


def test_blocks_over_two_nodes_are_those_on_one(tmp_path: Path) -> None:
    """Q8_0 in int8, which is computed as it is stored; who is alone says the same."""
    file = write_gguf(checkpoint_dir(), tmp_path / "small-q8.gguf", "Q8_0")
    assert read_manifest(file).dtype == "q8_0"
    answers = []
    for held in ({"attic": (file, "0-3"), "barn": (file, "4-7")}, {"solo": (file, "0-7")}):
        with starter(tmp_path / "-".join(held)) as start:
            asker = _house(start, held, file, "--quant", "int8")
            # In fp16 what goes from one to the other is rounded, which may turn a near tie.
            facts, _, ids, text = stream(
                asker, 10**9, lambda: None, max_tokens=COUNT, wire_dtype="fp32"
            )
            assert [hop["node"] for hop in facts["route"]] == list(held)
            answers.append((ids, text))
    assert answers[0] == answers[1]
    assert len(answers[0][0]) == COUNT
    assert len(set(answers[0][1].split())) > 10
