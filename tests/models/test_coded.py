"""Weights that are codes with scales give the numbers that they stand for, to the last bit."""

from __future__ import annotations

import contextlib
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import BadCheckpoint
from mesh.models.coded.gathering import gathered
from mesh.models.coded.numbers import decoded
from mesh.models.coded.scheme import scheme_of
from mesh.models.header import TensorEntry
from mesh.models.load import load_span
from mesh.models.manifest import Manifest, read_manifest
from mesh.models.stored_dtypes import STORED_DTYPES
from mesh.types import LayerRange
from tests import coded_files
from tests.coded_files import Form, write_coded
from tests.models.chain import CPU, prompt_chunks, run_parts, run_whole
from tests.models.conftest import Checkpoint

FORMS: dict[str, tuple[Form, str]] = {
    "fp8 in blocks": (coded_files.fp8((128, 128)), "fp8"),
    "fp8 in blocks that do not fit": (coded_files.fp8((48, 40)), "fp8"),
    "fp8 with one scale": (coded_files.fp8(None), "fp8"),
    "fp8 with one scale of another name": (coded_files.fp8(None, old=True), "fp8"),
    "fp8 with a scale for each row": (coded_files.rows_of_fp8(), "fp8"),
    "packed int4": (coded_files.packed(4, 32, symmetric=True), "packed-int4"),
    "packed int4 with zero points": (coded_files.packed(4, 64, symmetric=False), "packed-int4"),
    "packed int8 by rows": (coded_files.packed(8, None, symmetric=True), "packed-int8"),
    "int8 by rows": (coded_files.rows_of_int8(), "int8"),
    "awq": (coded_files.awq(64), "awq-int4"),
    "gptq": (coded_files.gptq(4, 32, symmetric=True), "gptq-int4"),
    "gptq with zero points": (coded_files.gptq(4, 64, symmetric=False), "gptq-int4"),
    "gptq in 8 bit": (coded_files.gptq(8, 64, symmetric=True, second=True), "gptq-int8"),
    "gptq out of order": (coded_files.gptq(4, 32, symmetric=False, shuffled=True), "gptq-int4"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_gives_the_tokens_of_the_numbers_it_stands_for(
    form: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    written, dtype = FORMS[form]
    directory = checkpoint("llama", layers=3, hidden=128)
    plain = write_coded(directory, tmp_path / "coded", written)
    manifest = read_manifest(tmp_path / "coded")
    assert (manifest.dtype, manifest.total_layers, manifest.tied) == (dtype, 3, False)
    _compare(manifest, plain)


def test_experts_in_mxfp4(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = checkpoint("gpt_oss", layers=3)
    plain = write_coded(directory, tmp_path / "coded", coded_files.mxfp4())
    manifest = read_manifest(tmp_path / "coded")
    assert manifest.dtype == "mxfp4"
    _compare(manifest, plain)


@pytest.mark.parametrize("form", ["fp8 in blocks", "packed int4", "gptq"])
def test_experts_one_by_one(form: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    written, dtype = FORMS[form]
    plain = write_coded(checkpoint("qwen3_moe", layers=3), tmp_path / "coded", written)
    manifest = read_manifest(tmp_path / "coded")
    assert manifest.dtype == dtype
    _compare(manifest, plain)


def _compare(manifest: Manifest, plain: Path) -> None:
    chunks = prompt_chunks((13, 7, 1))
    expected, ids = run_parts(read_manifest(plain), (0, 1, 3), chunks, decode=4, copied=True)
    found, found_ids = run_parts(manifest, (0, 1, 3), chunks, decode=4, copied=True)
    assert found_ids == ids == run_whole(plain, chunks, decode=4)[1]
    for step, other in zip(found, expected, strict=True):
        assert torch.equal(step, other)


_SIZES = st.sampled_from([0, 1, 2, 8, 16, 32, 64, 128])
_DTYPES = {dtype: name for name, dtype in STORED_DTYPES.items()}


@pytest.mark.parametrize("form", [*FORMS, "mxfp4"])
@given(data=st.data())
def test_whatever_headers_say_is_refused_or_understood(form: str, data: st.DataObject) -> None:
    written, tensors = _written(form)
    stored = {}
    for end, tensor in tensors.items():
        shape = list(tensor.shape)
        if data.draw(st.booleans()):
            shape = [data.draw(st.one_of(st.just(each), _SIZES)) for each in shape]
        name = f"x{end}" if form == "mxfp4" else f"x.{end}"
        stored[name] = TensorEntry(name, Path("f"), _DTYPES[tensor.dtype], tuple(shape), 0, 8)
    with contextlib.suppress(BadCheckpoint):
        scheme = scheme_of({"quantization_config": written.config}, "m")
        (entry,) = (each for each in gathered(stored, scheme).values() if each.coding)
        assert entry.coding is not None
        parts = {
            what: torch.zeros(part.shape, dtype=STORED_DTYPES[part.dtype])
            for what, part in entry.coding.parts.items()
        }
        assert decoded(entry, parts, torch.float32).shape == entry.shape


@cache
def _written(form: str) -> tuple[Form, coded_files.Tensors]:
    """A weight in this form."""
    is_mxfp4 = form == "mxfp4"
    written = coded_files.mxfp4() if is_mxfp4 else FORMS[form][0]
    return written, written.write(torch.ones(2, 64, 64) if is_mxfp4 else torch.ones(64, 64)).stored


def test_a_bias_that_the_model_has_no_place_for_is_refused(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Those of zeros, which GPTQ's writers give to all layers, are left out."""
    write_coded(checkpoint("llama", layers=2), tmp_path / "coded", FORMS["gptq"][0])
    manifest = read_manifest(tmp_path / "coded")
    entry = manifest.tensors["model.layers.1.mlp.up_proj.bias"]
    with entry.file.open("r+b") as stream:
        stream.seek(entry.offset)
        stream.write(b"\x00\x3c")
    load_span(manifest, LayerRange(0, 1), dtype=torch.float32, device=CPU)
    with pytest.raises(BadCheckpoint, match=r"up_proj\.bias"):
        load_span(manifest, LayerRange(1, 2), dtype=torch.float32, device=CPU)
