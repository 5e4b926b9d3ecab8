"""Partial checkpoints: what is there is right, what is not there is said, a crash costs little."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mesh.errors import BadCheckpoint, Busy, DiskFull, WeightsMissing
from mesh.models.load import load_ends, load_span
from mesh.models.manifest import Manifest, read_manifest
from mesh.models.partial import (
    JOURNAL,
    PIECE_BYTES,
    RECORD,
    PartialRecord,
    partial_directory,
    read_journal,
)
from mesh.models.partial_draft import SparseFile, create_partial
from mesh.models.partial_writer import PartialWriter, WriteOutcome, pieces_of, remove_partial
from mesh.types import LayerRange
from tests.models.conftest import Checkpoint

CPU = torch.device("cpu")


def empty_copy(whole: Manifest, root: Path) -> Path:
    """A partial checkpoint without tensors."""
    record = PartialRecord(
        1,
        whole.model_id,
        whole.weights_sha256,
        "",
        {name: entry.sha256 for name, entry in whole.tensors.items()},
    )
    sparse, small = {}, {}
    for file in whole.directory.iterdir():
        data = file.read_bytes()
        if file.suffix == ".safetensors":
            header = data[: 8 + int.from_bytes(data[:8], "little")]
            sparse[file.name] = SparseFile(header, len(data))
        else:
            small[file.name] = data
    directory = partial_directory(root, whole.model_id, whole.weights_sha256)
    create_partial(directory, record, sparse, small)
    return directory


def stored(whole: Manifest, name: str) -> bytes:
    entry = whole.tensors[name]
    with entry.file.open("rb") as stream:
        stream.seek(entry.offset)
        return stream.read(entry.nbytes)


def put_all(writer: PartialWriter, whole: Manifest, names: list[str]) -> None:
    for name in names:
        data = stored(whole, name)
        for start, stop in pieces_of(len(data)):
            outcome = writer.put(name, start, [data[start:stop]])
        assert outcome is WriteOutcome.COMPLETE


def test_some_layers_are_loaded_as_from_the_whole(checkpoint: Checkpoint, tmp_path: Path) -> None:
    whole = read_manifest(checkpoint("llama"))
    directory = empty_copy(whole, tmp_path)
    layers = LayerRange(2, 4)
    with PartialWriter(directory) as writer:
        put_all(writer, whole, [entry.name for entry in whole.layer_tensors(layers)])
    partial = read_manifest(directory)
    assert partial.weights_sha256 == whole.weights_sha256
    assert partial.layer_bytes == whole.layer_bytes
    ours = load_span(partial, layers, dtype=torch.float32, device=CPU)
    theirs = load_span(whole, layers, dtype=torch.float32, device=CPU)
    for (_, one), (_, other) in zip(
        ours.module.named_parameters(), theirs.module.named_parameters(), strict=True
    ):
        assert torch.equal(one, other)
    with pytest.raises(WeightsMissing, match="partial checkpoint"):
        load_span(partial, LayerRange(3, 5), dtype=torch.float32, device=CPU)
    with pytest.raises(WeightsMissing):
        load_ends(partial, dtype=torch.float32, device=CPU)


def test_wrong_bytes_are_refused_and_leave_no_trace(checkpoint: Checkpoint, tmp_path: Path) -> None:
    whole = read_manifest(checkpoint("llama"))
    directory = empty_copy(whole, tmp_path)
    name = whole.layer_tensors(LayerRange(0, 1))[0].name
    wrong = bytearray(stored(whole, name))
    wrong[3] ^= 1
    with PartialWriter(directory) as writer:
        assert writer.put(name, 0, [wrong]) is WriteOutcome.WRONG
        assert not writer.has(name)
    assert not read_manifest(directory).tensors[name].present


def test_pieces_of_a_large_tensor_survive_and_the_wrong_one_is_named(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    whole = read_manifest(checkpoint("llama", hidden=512, vocab=5000, layers=1))
    name = max(whole.tensors.values(), key=lambda entry: entry.nbytes).name
    data = stored(whole, name)
    pieces = pieces_of(len(data))
    assert len(pieces) == 3
    directory = empty_copy(whole, tmp_path)
    with PartialWriter(directory) as writer:
        assert writer.put(name, 0, [data[:PIECE_BYTES]]) is WriteOutcome.WRITTEN
    with PartialWriter(directory) as writer:
        assert writer.missing(name) == list(pieces[1:])
        (_, (start, stop), (start2, stop2)) = pieces
        lie = bytes(stop - start)
        assert writer.put(name, start2, [data[start2:stop2]]) is WriteOutcome.WRITTEN
        assert writer.put(name, start, [lie]) is WriteOutcome.WRONG
        assert writer.missing(name) == list(pieces)
        assert not read_journal(directory, sorted(whole.tensors)).pieces
        for start, stop in pieces:
            outcome = writer.put(name, start, [data[start:stop]])
        assert outcome is WriteOutcome.COMPLETE
        assert writer.differing(name) == [1]
        assert writer.has(name)
        assert (writer.missing(name), writer.settle(name)) == ([], WriteOutcome.COMPLETE)
    assert read_manifest(directory).tensors[name].present
    with PartialWriter(directory) as writer:
        assert (writer.missing(name), writer.settle(name)) == ([], WriteOutcome.COMPLETE)
        writer.drop(name)
        assert (writer.missing(name), writer.settle(name)) == (list(pieces), WriteOutcome.WRITTEN)
    assert not read_manifest(directory).tensors[name].present
    with PartialWriter(directory) as writer:
        for start, stop in reversed(pieces):
            outcome = writer.put(name, start, [data[start : start + 5], data[start + 5 : stop]])
        assert outcome is WriteOutcome.COMPLETE
    assert stored(read_manifest(directory), name) == data


def test_a_torn_line_is_forgotten_and_a_damaged_one_said(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    whole = read_manifest(checkpoint("llama"))
    directory = empty_copy(whole, tmp_path)
    names = sorted(whole.tensors)[:2]
    with PartialWriter(directory) as writer:
        put_all(writer, whole, names)
        with pytest.raises(Busy):
            PartialWriter(directory)
    journal = directory / JOURNAL
    journal.write_bytes(journal.read_bytes() + b"c 1")
    with PartialWriter(directory) as writer:
        assert writer.complete == set(names)
        put_all(writer, whole, sorted(whole.tensors)[2:3])
    assert sum(entry.present for entry in read_manifest(directory).tensors.values()) == 3
    for damaged in (b"hello", b"c %d" % len(whole.tensors)):
        journal.write_bytes(b"c 0\n%b\nc 1\n" % damaged)
        with pytest.raises(BadCheckpoint, match=f"damaged: {damaged!r}"):
            read_manifest(directory)


def test_headers_that_are_not_the_records_are_refused(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    whole = read_manifest(checkpoint("llama"))
    directory = empty_copy(whole, tmp_path)
    other = checkpoint("llama", hidden=128) / "model.safetensors"
    (directory / "model.safetensors").write_bytes(other.read_bytes())
    with pytest.raises(BadCheckpoint, match="not of the checkpoint"):
        read_manifest(directory)
    record = json.loads((directory / RECORD).read_text())
    record["tensors"].pop(min(record["tensors"]))
    (directory / RECORD).write_text(json.dumps(record))
    with pytest.raises(BadCheckpoint, match="names other tensors"):
        read_manifest(directory)


def test_a_new_one_harms_nothing_that_is_in_its_place(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    whole = read_manifest(checkpoint("llama"))
    directory = partial_directory(tmp_path, whole.model_id, whole.weights_sha256)
    directory.mkdir()
    (directory / "letter").write_text("dear")
    with pytest.raises(BadCheckpoint, match="is in the way"):
        empty_copy(whole, tmp_path)
    assert [file.name for file in directory.iterdir()] == ["letter"]
    (directory / "letter").unlink()
    empty_copy(whole, tmp_path)
    with PartialWriter(directory) as writer:
        put_all(writer, whole, sorted(whole.tensors)[:1])
    empty_copy(whole, tmp_path)
    assert sum(entry.present for entry in read_manifest(directory).tensors.values()) == 1
    with pytest.raises(DiskFull, match="cannot be written"):
        empty_copy(whole, directory / "config.json")


def test_what_a_crash_left_of_a_new_one_is_swept_up_by_a_later_one(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    whole = read_manifest(checkpoint("llama"))
    young, old = (empty_copy(whole, tmp_path / age) for age in ("young", "old"))
    drafts = tmp_path / ".drafts"
    drafts.mkdir()
    for each in (young, old):
        each.rename(drafts / each.parent.name)
    os.utime(drafts / "old", (0, 0))
    empty_copy(whole, tmp_path)
    assert [each.name for each in drafts.iterdir()] == ["young"], "somebody may be at it"


def test_a_piece_that_comes_twice_is_not_written_over_what_was_hashed(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    whole = read_manifest(checkpoint("llama", hidden=512, vocab=5000, layers=1))
    name = max(whole.tensors.values(), key=lambda entry: entry.nbytes).name
    data, directory = stored(whole, name), empty_copy(whole, tmp_path)
    first, second, third = pieces_of(len(data))
    with PartialWriter(directory) as writer:
        for start, stop in (first, second, third):
            writer.put(name, start, [data[start:stop]])
            writer.put(name, first[0], [bytes(first[1])])
        assert writer.has(name)
    assert stored(read_manifest(directory), name) == data


def test_nothing_is_done_with_files_that_are_closed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Their numbers may be those of other files by then."""
    whole = read_manifest(checkpoint("llama"))
    directory, (name, *_) = empty_copy(whole, tmp_path), sorted(whole.tensors)
    (directory / JOURNAL).write_bytes(b"p 0 0\n")
    writer = PartialWriter(directory)
    writer.close()
    for late in (lambda: writer.settle(name), writer.commit):
        with pytest.raises(Busy):
            late()


def test_what_was_moved_to_another_disk_is_removed_there(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = empty_copy(read_manifest(checkpoint("llama")), tmp_path / "models")
    elsewhere = tmp_path / "large" / directory.name
    elsewhere.parent.mkdir()
    directory.rename(elsewhere)
    directory.symlink_to(elsewhere)
    assert read_manifest(directory).total_layers
    remove_partial(directory)
    assert [*elsewhere.parent.iterdir()] == []
    assert [*directory.parent.glob("*/*")] == []


def test_kills_at_random_leave_no_tensor_that_is_noted_and_not_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.models.partial_kills", "1", "40", str(tmp_path / "toy")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["killed"] > 10


_WRITER = """
import sys
from pathlib import Path
from mesh.models.manifest import read_manifest
from mesh.models.partial_writer import PartialWriter, pieces_of
whole, writer = read_manifest(Path(sys.argv[1])), PartialWriter(Path(sys.argv[2]))
for name, entry in whole.tensors.items():
    with entry.file.open("rb") as stream:
        stream.seek(entry.offset)
        data = stream.read(entry.nbytes)
    for start, stop in pieces_of(len(data)):
        writer.put(name, start, [data[start:stop]])
    writer.commit()
    print(name, flush=True)
print("idle", flush=True)
sys.stdin.read()
"""


def test_what_was_said_to_be_complete_is_so_after_a_kill(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source = checkpoint("llama")
    whole = read_manifest(source)
    directory = empty_copy(whole, tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(source), str(directory)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdin is not None
    said = [child.stdout.readline().strip() for _ in range(5)]
    os.kill(child.pid, signal.SIGKILL)
    child.wait(10)
    child.stdout.close()
    child.stdin.close()
    present = {e.name for e in read_manifest(directory).tensors.values() if e.present}
    assert present >= set(said)
    for name in present:
        assert stored(read_manifest(directory), name) == stored(whole, name)
