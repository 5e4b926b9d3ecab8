"""What was rounded is kept, and is not believed without its hash."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
import torch

from mesh.models.load import load_ends
from mesh.shard.compiled import store
from mesh.shard.compiled.formats import BlockLinear, BlockMatrix
from mesh.shard.compiled.head import compile_head
from mesh.shard.compiled.runtime import CompiledRuntime
from mesh.shard.compiled.store import GraphSpan
from mesh.types import LayerRange
from tests.full_disk import file_size_limit
from tests.shard.compiled.spans import span
from tests.shard.spans import CPU, checkpoint, relative_error, rows, step

SPAN = LayerRange(1, 3)


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors"))


def answer(graphs: GraphSpan) -> torch.Tensor:
    runtime = CompiledRuntime(graphs, threads=1, positions=64)
    return step(runtime, runtime.new_cache(64), 0, rows(5))


def mapped(graphs: GraphSpan) -> bool:
    return all(product.stored for layer in graphs.layers for product in layer.products.values())


def head_answer(cache_dir: Path) -> torch.Tensor:
    manifest = checkpoint("llama")
    ends = load_ends(manifest, dtype=torch.float32, device=CPU)
    compile_head(ends, manifest.weights_sha256, cache_dir, 1, "int8")
    return ends.logits(rows(3))


def test_a_head_whose_model_asks_for_its_weight_is_computed_without() -> None:
    manifest = checkpoint("mamba")
    ends = load_ends(manifest, dtype=torch.float32, device=CPU)
    expected = ends.logits(rows(3))
    compile_head(ends, manifest.weights_sha256, None, 1, "int8")
    assert relative_error(ends.logits(rows(3)), expected) < 0.03


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_a_second_start_reads_what_the_first_has_rounded(tmp_path: Path, quant: str) -> None:
    expected = answer(span(quant, layers=SPAN))
    assert torch.equal(answer(span(quant, layers=SPAN, cache_dir=tmp_path)), expected)
    first, second = files(tmp_path)
    assert (first.name, second.name) == ("1.safetensors", "2.safetensors")
    before = first.stat().st_mtime_ns
    graphs = span(quant, layers=SPAN, cache_dir=tmp_path)
    assert mapped(graphs)
    assert torch.equal(answer(graphs), expected)
    assert first.stat().st_mtime_ns == before


def test_a_second_start_reads_the_head_that_the_first_has_rounded(tmp_path: Path) -> None:
    first = head_answer(tmp_path)
    (kept,) = files(tmp_path)
    assert kept.name == "head.safetensors"
    before = kept.stat().st_mtime_ns
    assert torch.equal(head_answer(tmp_path), first)
    assert kept.stat().st_mtime_ns == before
    _flip_last_byte(kept)
    assert torch.equal(head_answer(tmp_path), first)
    assert kept.stat().st_mtime_ns != before


def test_a_damaged_file_is_made_again(tmp_path: Path) -> None:
    expected = answer(span("int8", layers=SPAN, cache_dir=tmp_path))
    for damage in (_flip_last_byte, _cut_short, _empty, _rename_a_tensor, _flip_a_dtype):
        damage(files(tmp_path)[0])
        assert torch.equal(answer(span("int8", layers=SPAN, cache_dir=tmp_path)), expected)


def _flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _empty(file: Path) -> None:
    os.truncate(file, 0)


def _rename_a_tensor(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"codes", b"coder", 1))


def _flip_a_dtype(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"U8"', b'"I8"', 1))


def test_codes_of_another_version_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    span("int8", layers=SPAN, cache_dir=tmp_path)
    before = files(tmp_path)[0].stat().st_mtime_ns
    monkeypatch.setattr(store, "VERSION", store.VERSION + 1)
    span("int8", layers=SPAN, cache_dir=tmp_path)
    assert files(tmp_path)[0].stat().st_mtime_ns > before


def test_where_nothing_can_be_kept_the_weights_stay_in_memory(tmp_path: Path) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    graphs = span("int8", layers=SPAN, cache_dir=blocked)
    assert not mapped(graphs)
    assert torch.equal(answer(graphs), answer(span("int8", layers=SPAN)))


def test_where_the_disk_is_full_the_weights_stay_in_memory(tmp_path: Path) -> None:
    with file_size_limit(4096):
        graphs = span("int8", layers=SPAN, cache_dir=tmp_path)
    assert not mapped(graphs)
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []


def test_what_a_killed_process_left_half_written_goes(tmp_path: Path) -> None:
    span("int8", layers=SPAN, cache_dir=tmp_path)
    first, second = files(tmp_path)
    abandoned, in_use = (first.with_name(f"{each.name}abc.part") for each in (first, second))
    for each in (first, second):
        each.unlink()
    abandoned.write_bytes(bytes(100))
    with in_use.open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert mapped(span("int8", layers=SPAN, cache_dir=tmp_path))
    assert sorted(tmp_path.rglob("*.*")) == [first, second, in_use]


def test_no_dense_weight_is_left() -> None:
    graphs = span("int4", layers=SPAN)
    module = graphs.loaded.module
    linears = [part for part in module.modules() if isinstance(part, BlockLinear)]
    assert len(linears) == 7 * len(SPAN)
    assert max(parameter.dim() for parameter in module.parameters()) == 1
    matrices = [p.matrix for layer in graphs.layers for p in layer.products.values()]
    assert all(isinstance(matrix, BlockMatrix) for matrix in matrices)
    # The modules' rows are parts of the products', not copies of them.
    theirs = {part.codes.untyped_storage().data_ptr() for part in linears}
    assert theirs == {m.codes.untyped_storage().data_ptr() for m in matrices}
