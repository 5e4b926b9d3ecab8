"""Files whose settings are nonsense are refused, and no error but the two typed ones comes out."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from mesh.errors import BadCheckpoint, MeshError, UnsupportedFamily
from mesh.models.families import family_of
from mesh.models.gguf.vocabulary import gguf_tokenizer
from mesh.models.load import load_ends, load_span
from mesh.models.manifest import read_manifest
from mesh.types import LayerRange
from tests.gguf_files import write_gguf
from tests.models.chain import CPU
from tests.models.conftest import Checkpoint

_VALUES: tuple[Any, ...] = (
    0,
    1,
    3,
    (1 << 32) - 1,
    -1.0,
    0.0,
    float("nan"),
    float("inf"),
    True,
    "x",
)
_YARN = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 256,
    }
}  # fmt: skip


_FAMILIES = (
    "llama", "qwen2", "gemma3", "phi3", "gpt2", "qwen3_moe", "qwen3_5", "qwen3_next", "glm4_moe",
    "gemma4",
)  # fmt: skip


@pytest.mark.parametrize("family", _FAMILIES)
def test_nonsense_in_any_setting(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    mixed = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    more: dict[str, Any] = {"qwen2": _YARN, "qwen3_moe": mixed, "qwen3_next": mixed}
    directory = checkpoint(family, layers=3, **more.get(family, {}))
    names: list[str] = []
    write_gguf(directory, tmp_path / "good.gguf", edit=lambda writer: names.extend(_said(writer)))
    assert len(names) > 5
    outcomes = set()
    for name in names:
        for value in _VALUES:
            file = write_gguf(
                directory,
                tmp_path / "bad.gguf",
                edit=lambda writer, name=name, value=value: _say(writer, name, value),
                tokenizer=False,
            )
            outcomes.add(_outcome(file))
    assert BadCheckpoint in outcomes


def test_layers_that_nobody_has_take_no_memory(checkpoint: Checkpoint, tmp_path: Path) -> None:
    file = write_gguf(
        checkpoint("gemma3", layers=2),
        tmp_path / "deep.gguf",
        edit=lambda writer: _say(writer, "gemma3.block_count", 2_000_000),
    )
    tracemalloc.start()
    try:
        with pytest.raises(BadCheckpoint, match="it says 2000000 layers"):
            read_manifest(file)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_words_without_an_embedding(checkpoint: Checkpoint, tmp_path: Path) -> None:
    file = write_gguf(
        checkpoint("llama", layers=2),
        tmp_path / "wordy.gguf",
        edit=lambda writer: writer.add_token_list(["word"] * 385),
        tokenizer=False,
    )
    with pytest.raises(BadCheckpoint, match="no list of at most 384 words"):
        read_manifest(file)


@pytest.mark.parametrize("numbers", [None, [0.5], [0.5] * 3])
def test_a_number_for_each_layer_is_there_for_each(
    numbers: list[float] | None, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    def edit(writer: Any) -> None:
        del writer.kv_data[0]["xielu.beta"]
        if numbers is not None:
            writer.add_array("xielu.beta", numbers)

    file = write_gguf(checkpoint("apertus", layers=2), tmp_path / "odd.gguf", edit=edit)
    with pytest.raises(BadCheckpoint, match=r"xielu\.beta is no number for each of 2 layers"):
        read_manifest(file)


def test_nonsense_in_settings_of_the_tokenizer(checkpoint: Checkpoint, tmp_path: Path) -> None:
    names = ("bos_token_id", "eos_token_id", "padding_token_id", "unknown_token_id", "pre")
    are_read = set()
    for name in names:
        for value in (-1, 1 << 40, [1, 2], "x"):
            file = write_gguf(
                checkpoint("llama", layers=2),
                tmp_path / "odd.gguf",
                edit=lambda writer, name=name, value=value: _say_odd(writer, name, value),
            )
            with suppress(BadCheckpoint):
                gguf_tokenizer(file, None)
                are_read.add((name, str(value)))
    # That there is none.
    assert are_read >= {(name, "-1") for name in names[1:4]}


def _say_odd(writer: Any, name: str, value: Any) -> None:
    key = f"tokenizer.ggml.{name}"
    writer.kv_data[0].pop(key, None)
    add = {int: writer.add_int64, list: writer.add_array}
    add.get(type(value), writer.add_string)(key, value)


def _said(writer: Any) -> list[str]:
    architecture = f"{writer.arch}."
    return [key for key in writer.kv_data[0] if key.startswith(architecture)]


def _say(writer: Any, name: str, value: Any) -> None:
    del writer.kv_data[0][name]
    add = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
    add.get(type(value), writer.add_string)(name, value)


def _outcome(file: Path) -> type[MeshError] | None:
    try:
        manifest = read_manifest(file)
        family_of(manifest)
        load_ends(manifest, dtype=torch.float32, device=CPU)
        load_span(manifest, LayerRange(0, 1), dtype=torch.float32, device=CPU)
    except (BadCheckpoint, UnsupportedFamily) as error:
        return type(error)
    return None
