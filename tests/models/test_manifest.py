"""What a manifest says of a checkpoint, what it refuses, and that nothing is hashed twice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mesh.config import Config
from mesh.errors import BadCheckpoint, ModelNotFound
from mesh.models import hashing, header
from mesh.models.hashing import hash_tensors
from mesh.models.local import find_local_models, local_manifest
from mesh.models.manifest import read_manifest
from mesh.types import LayerRange, ModelId
from tests.models.conftest import Checkpoint


@pytest.fixture
def copied(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A small llama checkpoint that a test may damage."""
    return shutil.copytree(checkpoint("llama", layers=3), tmp_path / "copied")


@pytest.fixture
def sharded(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """The same in several files."""
    return shutil.copytree(checkpoint("llama", layers=3, sharded=True), tmp_path / "sharded")


def test_manifest_of_a_checkpoint(checkpoint: Checkpoint) -> None:
    directory = checkpoint("llama", layers=3)
    manifest = read_manifest(directory)
    assert manifest.model_id == directory.name
    assert manifest.model_type == "llama"
    assert (manifest.total_layers, manifest.hidden_size, manifest.vocab_size) == (3, 64, 384)
    assert manifest.max_positions == 1024
    assert manifest.dtype == "float32"
    assert manifest.eos_ids == (2,)
    assert not manifest.tied
    assert len(set(manifest.layer_bytes)) == 1
    assert manifest.ends_bytes == (2 * 384 * 64 + 64) * 4
    stored = load_file(directory / "model.safetensors")
    for name, entry in manifest.tensors.items():
        content = stored[name].numpy().tobytes()
        assert entry.nbytes == len(content)
        assert entry.sha256 == sha256(content).hexdigest()
    assert read_manifest(directory, model_id=ModelId("house/tiny")).model_id == "house/tiny"


def test_weights_hash_follows_its_documented_encoding(checkpoint: Checkpoint) -> None:
    directory = checkpoint("llama", layers=3)
    stored = load_file(directory / "model.safetensors")
    lines = [
        json.dumps(
            [name, "F32", list(tensor.shape), sha256(tensor.numpy().tobytes()).hexdigest()],
            separators=(",", ":"),
        )
        + "\n"
        for name, tensor in sorted(stored.items())
    ]
    expected = sha256("".join(lines).encode()).hexdigest()
    assert read_manifest(directory).weights_sha256 == expected


def test_weights_hash_does_not_depend_on_the_files(checkpoint: Checkpoint) -> None:
    single = read_manifest(checkpoint("llama", layers=3))
    sharded = read_manifest(checkpoint("llama", layers=3, sharded=True))
    assert sharded.weights_sha256 == single.weights_sha256


def test_weights_hash_changes_with_one_byte(copied: Path) -> None:
    before = read_manifest(copied)
    entry = before.layer_tensors(LayerRange(1, 2))[0]
    with entry.file.open("r+b") as stream:
        stream.seek(entry.offset + 5)
        byte = stream.read(1)[0]
        stream.seek(entry.offset + 5)
        stream.write(bytes([byte ^ 1]))
    after = read_manifest(copied)
    assert after.weights_sha256 != before.weights_sha256
    changed = [n for n in before.tensors if before.tensors[n].sha256 != after.tensors[n].sha256]
    assert changed == [entry.name]


def test_second_start_hashes_nothing(copied: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = read_manifest(copied, cache_dir=cache)
    assert first.bytes_hashed == sum(entry.nbytes for entry in first.tensors.values())
    second = read_manifest(copied, cache_dir=cache)
    assert second.bytes_hashed == 0
    assert second.weights_sha256 == first.weights_sha256
    assert second.tensors == first.tensors


def test_changed_file_is_hashed_again(copied: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = read_manifest(copied, cache_dir=cache)
    weights = load_file(copied / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    second = read_manifest(copied, cache_dir=cache)
    assert second.bytes_hashed > 0
    assert second.weights_sha256 != first.weights_sha256


def test_an_interrupted_start_goes_on_with_the_file_it_was_at(
    sharded: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    whole = read_manifest(sharded)
    last = max(entry.file for entry in whole.tensors.values())
    assert last != min(entry.file for entry in whole.tensors.values())
    cut = {
        name: replace(entry, offset=entry.offset + (1 << 30)) if entry.file == last else entry
        for name, entry in whole.tensors.items()
    }
    with pytest.raises(BadCheckpoint, match="ended"):
        hash_tensors(cut, cache_dir=cache)
    again = read_manifest(sharded, cache_dir=cache)
    left = sum(entry.nbytes for entry in whole.tensors.values() if entry.file == last)
    assert again.bytes_hashed == left
    assert again.weights_sha256 == whole.weights_sha256
    assert read_manifest(sharded, cache_dir=cache).bytes_hashed == 0


def test_a_cache_that_cannot_be_written_is_done_without(
    copied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").touch()
    manifest = read_manifest(copied, cache_dir=tmp_path / "cache")
    assert manifest.weights_sha256 == read_manifest(copied).weights_sha256
    assert "cannot be kept" in caplog.text


def test_what_takes_long_is_said_and_only_then(
    copied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    read_manifest(copied, cache_dir=tmp_path / "one")
    assert caplog.messages == []
    monkeypatch.setattr(hashing, "_LONG_BYTES", 1)
    read_manifest(copied, cache_dir=tmp_path / "cache")
    read_manifest(copied, cache_dir=tmp_path / "cache")
    (said,) = caplog.messages
    assert said.startswith("hashing ")
    assert str(copied) in said


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"version": 1}', b'{"version": 99}'])
def test_damaged_cache_is_replaced(copied: Path, tmp_path: Path, damage: bytes) -> None:
    cache = tmp_path / "cache"
    first = read_manifest(copied, cache_dir=cache)
    (file,) = cache.iterdir()
    file.write_bytes(damage)
    again = read_manifest(copied, cache_dir=cache)
    assert again.bytes_hashed > 0
    assert again.weights_sha256 == first.weights_sha256
    assert read_manifest(copied, cache_dir=cache).bytes_hashed == 0
    assert list(cache.iterdir()) == [file]


def test_a_kept_hash_that_is_none_is_not_believed(copied: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = read_manifest(copied, cache_dir=cache)
    (file,) = cache.iterdir()
    kept = json.loads(file.read_bytes())
    kept["tensors"] = dict.fromkeys(kept["tensors"], "0")
    file.write_text(json.dumps(kept))
    again = read_manifest(copied, cache_dir=cache)
    assert again.weights_sha256 == first.weights_sha256


def test_reading_a_manifest_imports_neither_torch_nor_transformers(checkpoint: Checkpoint) -> None:
    code = (
        "import sys; from pathlib import Path; from mesh.models.manifest import read_manifest;"
        "read_manifest(Path(sys.argv[1]));"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    directory = str(checkpoint("llama", layers=3))
    subprocess.run([sys.executable, "-c", code, directory], check=True, timeout=60)


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound) as caught:
        read_manifest(tmp_path / "nothing")
    assert caught.value.code == "model_not_found"


def test_of_a_model_that_is_not_held_it_is_said_what_brings_it_up(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound) as caught:
        local_manifest({}, ModelId("tea"), tmp_path)
    assert "hearthnet deploy" in caught.value.fix


def test_a_file_is_not_a_checkpoint(copied: Path) -> None:
    with pytest.raises(BadCheckpoint, match="not a directory"):
        read_manifest(copied / "model.safetensors")


def test_true_is_no_number_in_a_config(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    said = {"max_position_embeddings": True, "n_positions": 12, "eos_token_id": [True, 5]}
    (copied / "config.json").write_text(json.dumps(config | said))
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": True}))
    manifest = read_manifest(copied)
    assert (manifest.max_positions, manifest.eos_ids) == (12, (5,))


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{", b"[" * 100_000])
def test_missing_or_damaged_config(copied: Path, content: bytes | None) -> None:
    (copied / "config.json").unlink()
    if content is not None:
        (copied / "config.json").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        read_manifest(copied)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "last.ckpt"])
def test_pickled_weights_are_refused_with_the_way_out(copied: Path, name: str) -> None:
    (copied / "model.safetensors").rename(copied / name)
    with pytest.raises(BadCheckpoint, match="pickle") as caught:
        read_manifest(copied)
    assert caught.value.code == "bad_checkpoint"
    assert name in caught.value.message
    assert "save_pretrained" in caught.value.fix


def test_no_weights_at_all(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match="neither"):
        read_manifest(copied)


def test_missing_part_of_a_sharded_checkpoint_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match="model-00002-of-00004"):
        read_manifest(sharded)


def _edit_index(directory: Path, name: str, file: str | None) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    if file is None:
        del index["weight_map"][name]
    else:
        index["weight_map"][name] = file
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("name", "file", "why"),
    [
        ("model.norm.weight", None, "model.norm.weight lies in"),
        ("model.extra.weight", "model-00001-of-00004.safetensors", "lacks tensor model.extra"),
        ("model.norm.weight", "../../etc/passwd", "not a file of this directory"),
    ],
)
def test_index_that_disagrees_with_the_files(
    sharded: Path, name: str, file: str | None, why: str
) -> None:
    _edit_index(sharded, name, file)
    with pytest.raises(BadCheckpoint, match=why):
        read_manifest(sharded)


def test_index_beside_the_whole_file_does_not_count(copied: Path) -> None:
    left = {"weight_map": {"model.norm.weight": "model-00001-of-00004.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(left))
    assert read_manifest(copied).total_layers == 3


def test_missing_layers_are_named(copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    kept = {name: value for name, value in weights.items() if ".layers.1." not in name}
    save_file(kept, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match="lacks layers 1: 1 of 3"):
        read_manifest(copied)


def test_truncated_file_is_named_with_its_numbers(copied: Path) -> None:
    file = copied / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(size - 100)
    with pytest.raises(BadCheckpoint, match=rf"truncated.*byte {size}.*{size - 100}") as caught:
        read_manifest(copied)
    assert str(file) in caught.value.message


def _header(fields: Any, body: bytes = b"\0" * 64) -> bytes:
    raw = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return len(raw).to_bytes(8, "little") + raw + body


def _tensor(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\1\2", "2 bytes long"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "limit is 26214400"),
        ((5000).to_bytes(8, "little") + b"{}", "header needs 5008 bytes, the file has 10"),
        (_header(b"not json"), "not JSON"),
        (_header(b"[]"), "not a JSON object"),
        (_header({"a": {"dtype": "F32"}}), "not understood"),
        (_header({"a": _tensor(0, 4, [1]) | {"dtype": []}}), "not understood"),
        (_header({"a": 3}), "not understood"),
        (_header({"a": _tensor(0, 8, [2], "F33")}), "not understood"),
        (_header({"a": _tensor(0, 8, [-2])}), "not understood"),
        (_header({"a": _tensor(-8, 0, [2])}), "not understood"),
        (_header({"a": _tensor(0, 12, [2])}), "12 bytes; F32 .2. needs 8"),
        (_header({"a": _tensor(0, 80, [20])}), "truncated: tensor a ends at"),
        (_header({"a": _tensor(0, 8, [2]), "b": _tensor(4, 12, [2])}), "a and b over one another"),
    ],
)
def test_malformed_header(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=why):
        header.read_header(file)


@given(st.binary(max_size=200))
def test_random_bytes_are_never_taken_for_weights(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "noise.safetensors"
    file.write_bytes(noise)
    with pytest.raises(BadCheckpoint):
        header.read_header(file)


def test_scalar_and_empty_tensors(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"scalar": torch.tensor(2.0), "empty": torch.zeros(0, 3)}, file)
    entries = header.read_header(file)
    assert (entries["scalar"].shape, entries["scalar"].nbytes) == ((), 4)
    assert (entries["empty"].shape, entries["empty"].nbytes) == ((0, 3), 0)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("models--acme--tiny-llama-3.2", "acme/tiny-llama-3.2"),
        ("models--gpt2", "gpt2"),
        ("datasets--acme--tiny", None),
        ("models--a--b--c", None),
    ],
)
def test_a_snapshot_of_the_hub_cache_has_its_repository_s_name(
    checkpoint: Checkpoint, tmp_path: Path, folder: str, name: str | None
) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    blobs, snapshot = tmp_path / folder / "blobs", tmp_path / folder / "snapshots" / commit
    shutil.copytree(checkpoint("llama", layers=3), blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():  # as the hub's own client lays it out
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    (tmp_path / "latest").symlink_to(snapshot)
    for path in (snapshot, tmp_path / "latest"):
        assert read_manifest(path).model_id == (name or commit)
        (local,) = find_local_models(Config(model=[str(path)]), tmp_path / "cache")
        assert local.model_id == (name or commit)
    (local,) = find_local_models(Config(model=[f"{snapshot}=mine"]), tmp_path / "cache")
    assert local.model_id == "mine"
    (local,) = find_local_models(Config(model=[os.path.relpath(snapshot)]), tmp_path / "cache")
    assert local.directory == str(snapshot), "what lies there has one place"
