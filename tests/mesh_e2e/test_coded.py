"""The built-in model stored as codes with scales, over two nodes: answers and traces as ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from nnsight.modeling import huggingface
from nnsight.modeling.transformers import TransformersModel

from mesh.cli.local_node import LocalNode
from mesh.models.builtin import checkpoint_dir
from tests.coded_files import awq, fp8, write_coded
from tests.mesh_e2e.conftest import StartNode, starter
from tests.mesh_e2e.spread import hugging_face
from tests.mesh_e2e.test_losing_nodes import PROMPT, serving, stream
from tests.ndif import client
from tests.waiting import wait_until

COUNT = 60

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Stored(NamedTuple):
    """A checkpoint of codes, and one of the numbers that they stand for."""

    coded: Path
    plain: Path


@pytest.fixture(scope="module")
def in_fp8(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    coded = tmp_path_factory.mktemp("fp8") / "coded"
    return Stored(coded, write_coded(checkpoint_dir(), coded, fp8((128, 128))))


@pytest.fixture(scope="module")
def asker(in_fp8: Stored, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNode]:
    """It holds no layers; attic has the first half, barn the second."""
    with starter(tmp_path_factory.mktemp("nodes")) as start:
        held = {"attic": "0-3", "barn": "4-7"}
        yield _house(start, held, in_fp8.coded, "--dtype", "fp32", "--quant", "none")[0]


def _house(start: StartNode, held: dict[str, str], path: Path, *more: str) -> list[LocalNode]:
    """Who asks, and who holds layers."""
    model = "--model", f"{path}=builtin", "--layers"
    holders = [start(name, *model, layers, *more) for name, layers in held.items()]
    asker = start("sofa", *model, "none", *more)
    for node in (*holders, asker):
        node.wait_ready()
    wait_until(lambda: serving(asker) == set(held))
    return [asker, *holders]


def test_the_answer_is_hugging_faces_over_the_numbers(asker: LocalNode, in_fp8: Stored) -> None:
    expected, _ = hugging_face(in_fp8.plain, PROMPT, COUNT)
    facts, _, ids, _ = stream(asker, 10**9, lambda: None, max_tokens=COUNT)
    assert ids == expected
    assert [hop["node"] for hop in facts["route"]] == ["attic", "barn"]
    (tags,) = asker.get("/api/tags")["models"]
    assert tags["details"]["quantization_level"] == "FP8"


def test_a_trace_sees_the_numbers(
    asker: LocalNode, in_fp8: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.configure(monkeypatch, HOST=asker.url, APIKEY=asker.record.api_key)
    monkeypatch.setitem(huggingface._ID_CACHE, str(checkpoint_dir()), "builtin")
    model = client.model()
    local = TransformersModel(
        str(in_fp8.plain), task="text-generation", dispatch=True, dtype=torch.float32
    )
    with model.trace("The attic is", remote=True):
        hidden = model.model.layers[5].output.save()
        weight = model.model.layers[5].mlp.down_proj.weight.save()
    with local.trace("The attic is"):
        here = local.model.layers[5].output.save()
    torch.testing.assert_close(hidden, here, rtol=1e-4, atol=1e-4)
    assert torch.equal(weight, local.model.layers[5].mlp.down_proj.weight)


def test_four_bits_over_two_nodes_are_those_on_one(tmp_path: Path) -> None:
    """By themselves both choose int4, which is computed as it is stored."""
    write_coded(checkpoint_dir(), tmp_path / "coded", awq(64))
    answers = []
    for held in ({"attic": "0-3", "barn": "4-7"}, {"solo": "0-7"}):
        with starter(tmp_path / "-".join(held)) as start:
            asker, *holders = _house(start, held, tmp_path / "coded", "--quant", "auto")
            facts, _, ids, text = stream(
                asker, 10**9, lambda: None, max_tokens=COUNT, wire_dtype="fp32"
            )
            assert [hop["node"] for hop in facts["route"]] == list(held)
            shards = [node.get("/mesh/v1/status")["shards"] for node in holders]
            assert [each["dtype"] for (each,) in shards] == ["int4"] * len(held)
            answers.append((ids, text))
    assert answers[0] == answers[1]
    assert len(set(answers[0][1].split())) > 10
