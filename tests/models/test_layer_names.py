"""Checkpoints whose config or names are odd are refused, at once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from mesh.errors import BadCheckpoint
from mesh.models.header import read_header
from mesh.models.layer_names import find_layers
from mesh.models.manifest import read_manifest
from tests.checkpoints import make_checkpoint

NAMES = [f"model.layers.{layer}.weight" for layer in range(4)]


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": 5},
        {"architectures": {"a": 1}},
        {"text_config": "x"},
        {"text_config": {}},
        {"model_type": ["llama"]},
        {"num_hidden_layers": 20_000_000},
        {"num_hidden_layers": 5},
    ],
)
def test_a_config_of_another_form_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    checkpoint = make_checkpoint(tmp_path / "toy", "llama", layers=4, hidden=64, vocab=300)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | changes))
    began = time.process_time()
    with pytest.raises(BadCheckpoint):
        read_manifest(checkpoint, is_hashed=False)
    assert time.process_time() - began < 1.0


def test_layers_are_counted_where_the_config_says_nothing_of_use() -> None:
    for text in ({}, {"num_hidden_layers": -1}, {"num_hidden_layers": "4"}):
        assert find_layers(Path(), NAMES, text) == ("model.layers.", 4)


@pytest.mark.parametrize("name", ["model.layers.\u00b2.weight", "model.layers." + "1" * 400_000])
def test_a_name_that_is_no_layer_s_takes_no_time(name: str) -> None:
    began = time.process_time()
    assert find_layers(Path(), [*NAMES, name], {}) == ("model.layers.", 4)
    assert time.process_time() - began < 1.0


def test_a_name_longer_than_any_is_refused(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"1" * 1000: entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(BadCheckpoint, match="1000 characters"):
        read_header(file)
