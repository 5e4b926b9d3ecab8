"""Weights that are codes with scales give the numbers that they stand for, to the last bit."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import BadCheckpoint, UnsupportedFamily
from mesh.models.coded.gathering import gathered
from mesh.models.coded.numbers import decoded
from mesh.models.coded.scheme import Scheme, scheme_of
from mesh.models.header import TensorEntry
from mesh.models.load import load_span
from mesh.models.manifest import Manifest, read_manifest
from mesh.models.stored_dtypes import STORED_DTYPES
from mesh.types import LayerRange
from tests import coded_files
from tests.coded_files import Form, Written, write_coded
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


_EXPERTS: dict[str, tuple[str, Form, str]] = {
    "mxfp4": ("gpt_oss", coded_files.mxfp4(), "mxfp4"),
    "stacks in fp8": ("mistral4", coded_files.stacks_of_fp8(), "fp8"),
    **{
        f"one by one, {form}": ("qwen3_moe", *FORMS[form])
        for form in ("fp8 in blocks", "packed int4", "gptq")
    },
}


@pytest.mark.parametrize("form", _EXPERTS)
def test_experts(form: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    family, written, dtype = _EXPERTS[form]
    plain = write_coded(checkpoint(family, layers=3), tmp_path / "coded", written)
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


_MATRICES = FORMS | {
    "packed int4 out of order": (
        coded_files.packed(4, 32, symmetric=False, shuffled=True), "packed-int4",
    ),
    "int8 by rows with zero points": (coded_files.rows_of_int8(symmetric=False), "int8"),
}  # fmt: skip
_USELESS_ALONE = ("weight_shape", "input_scale", "activation_scale", "bias")
_NEED_NOT_BE = ("weight_zero_point", "weight_g_idx", "g_idx")


@pytest.mark.parametrize("form", _MATRICES)
def test_a_matrix_is_what_its_writer_means_and_no_part_may_be_another(form: str) -> None:
    written, dtype = _MATRICES[form]
    # Its rows are no whole number of words of zero points, where that may be.
    rows = 60 if form.startswith(("packed", "int8", "fp8")) else 64
    weight = torch.randn(rows, 128, generator=torch.Generator().manual_seed(1)) + 0.3
    found = written.write(weight)
    stored = _entries(found)
    scheme = scheme_of({"quantization_config": written.config}, "m")
    entry = gathered(stored, scheme)["x.weight"]
    assert entry.coding is not None
    assert entry.dtype.lower() == dtype
    assert torch.equal(_meant(entry, found), found.numbers)
    says_size = None if form.startswith(("awq", "gptq")) else entry.coding.parts["codes"]
    for name, part in stored.items():
        if not name.endswith(_USELESS_ALONE):
            for spoilt in _spoilt(part, says_size=says_size is part):
                with pytest.raises(BadCheckpoint):
                    gathered(stored | {name: spoilt}, scheme)
            if not name.endswith(_NEED_NOT_BE):
                with pytest.raises(BadCheckpoint):
                    gathered({other: stored[other] for other in stored if other != name}, scheme)


@pytest.mark.parametrize("form", ["fp8 in blocks", "packed int4"])
def test_a_matrix_that_is_decoded_in_parts(form: str) -> None:
    """Of 262 rows, which are no whole number of blocks; the last is shorter."""
    written, _ = FORMS[form]
    found = written.write(torch.randn(270, 4000, generator=torch.Generator().manual_seed(1)))
    stored = _entries(found)
    entry = gathered(stored, scheme_of({"quantization_config": written.config}, "m"))["x.weight"]
    assert torch.equal(_meant(entry, found), found.numbers)


@pytest.mark.parametrize(("group", "is_said"), [(96, True), (128, False), (256, True)])
def test_a_last_group_that_is_shorter_is_not_taken_for_two_that_are_alike(
    group: int, is_said: bool
) -> None:
    """Of 192 columns, where nothing says in which group a column is."""
    written = coded_files.gptq(4, group, symmetric=False)
    found = written.write(torch.randn(64, 192, generator=torch.Generator().manual_seed(1)))
    del found.stored["g_idx"], found.stored["bias"]
    stored = _entries(found)
    scheme = scheme_of({"quantization_config": written.config}, "m")
    if not is_said:
        with pytest.raises(BadCheckpoint):
            gathered(stored, scheme)
        return
    entry = gathered(stored, scheme)["x.weight"]
    assert torch.equal(_meant(entry, found), found.numbers)


def _entries(found: Written) -> dict[str, TensorEntry]:
    """What is stored of a matrix x."""
    return {
        f"x.{end}": TensorEntry(f"x.{end}", Path("f"), _DTYPES[part.dtype], tuple(part.shape), 0, 8)
        for end, part in found.stored.items()
    }


def _meant(entry: TensorEntry, found: Written) -> torch.Tensor:
    assert entry.coding is not None
    parts = {
        what: found.stored[part.name.removeprefix("x.")].contiguous()
        for what, part in entry.coding.parts.items()
    }
    return decoded(entry, parts, torch.float32)


def _spoilt(part: TensorEntry, *, says_size: bool) -> list[TensorEntry]:
    """Of another shape, unless it alone says that, or of numbers of another kind."""
    shape, sizes = part.shape, (0,) if says_size else (0, 7)
    shapes = [(*shape[:at], size, *shape[at + 1 :]) for at in range(len(shape)) for size in sizes]
    wrong = [replace(part, shape=each) for each in (*shapes, *([] if says_size else [(*shape, 2)]))]
    return [*wrong, replace(part, dtype="I64")]


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


_INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}
_FP8 = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 64]}


def _compressed(*weights: object, **more: object) -> dict[str, Any]:
    groups = {str(number): {"weights": each} for number, each in enumerate(weights)}
    said = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    return {"quantization_config": said | {"config_groups": groups} | more}


def test_what_a_config_says_of_compressed_tensors() -> None:
    assert scheme_of(_compressed(_INT4 | {"actorder": "group"}, _FP8), "m") == Scheme(
        "compressed-tensors", 4, 128, (128, 64), reorders=True
    )
    text = _FP8 | {"block_structure": "128x64"}
    assert scheme_of(_compressed(text), "m") == Scheme("compressed-tensors", block=(128, 64))
    by_rows = _INT4 | {"strategy": "channel", "group_size": None}
    plain = _compressed(by_rows, sparsity_config={"format": "dense"})
    assert scheme_of(plain, "m") == Scheme("compressed-tensors", 4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (_compressed(), "the form mixed"),
        (_compressed(3), "no weights"),
        (_compressed(_INT4, format="sparse"), "the form sparse"),
        (_compressed(config_groups={"0": 3}), "no weights"),
        (_compressed(config_groups={"0": {"weights": _INT4, "format": "nvfp4"}}), "form nvfp4"),
        (_compressed(_INT4 | {"strategy": "tensor"}), "as int by tensor"),
        (_compressed(_INT4 | {"type": "sparse"}), "as sparse by group"),
        (_compressed(_INT4 | {"group_size": 0}), "blocks of 0"),
        (_compressed(_INT4 | {"group_size": True}), "blocks of True"),
        (_compressed(_FP8 | {"num_bits": 4}), "in 4 bits"),
        (_compressed(_FP8 | {"block_structure": "128x"}), "blocks of"),
        (_compressed(_FP8, _FP8 | {"block_structure": [64, 64]}), "several kinds"),
        (_compressed(_INT4, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (_compressed(_INT4, sparsity_config="x"), "sparsity_config"),
        ({"quantization_config": {"quant_method": "gptq", "dynamic": ["x"]}}, "rules"),
        ({"quantization_config": 3}, "in an unknown way"),
    ],
)
def test_what_is_not_read_is_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedFamily, match=reason):
        scheme_of(config, "m")


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
