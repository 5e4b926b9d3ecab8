"""Integers that a checkpoint stores with their scales reach the graphs as they are, where the
format has room for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mesh.models.load import load_ends, load_span
from mesh.models.manifest import Manifest, read_manifest
from mesh.shard.compiled.formats import BITS, Quant, quantise
from mesh.shard.compiled.runtime import CompiledRuntime
from mesh.shard.compiled.store import quantised_span
from mesh.shard.device import Choice, choose_quant
from mesh.shard.ends import EndsPlan, load_computed
from mesh.shard.runtime import StepInput
from mesh.types import LayerRange
from tests import coded_files
from tests.checkpoints import make_checkpoint
from tests.coded_files import Form, write_coded

CPU = torch.device("cpu")
_ALL = LayerRange(0, 2)
_EXACT: dict[str, tuple[Form, tuple[Quant, ...]]] = {
    "packed": (coded_files.packed(4, 32, symmetric=True), ("int4", "int8")),
    "packed with zero points": (coded_files.packed(4, 64, symmetric=False), ("int4", "int8")),
    "packed int8": (coded_files.packed(8, 64, symmetric=True), ("int8",)),
    "packed by rows": (coded_files.packed(4, None, symmetric=False), ("int4", "int8")),
    "int8": (coded_files.rows_of_int8(), ("int8",)),
    "awq": (coded_files.awq(64), ("int4", "int8")),
    "gptq": (coded_files.gptq(4, 64, symmetric=False), ("int4", "int8")),
    "gptq in 8 bit": (coded_files.gptq(8, 32, symmetric=True), ("int8",)),
    "gptq out of order": (coded_files.gptq(4, 32, symmetric=True, shuffled=True), ()),
    "groups that are no blocks": (coded_files.packed(4, 16, symmetric=True), ()),
    "fp8": (coded_files.fp8((128, 128)), ()),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama") / "one", "llama", layers=2, hidden=128)


def _manifest(form: Form, checkpoint: Path, directory: Path) -> Manifest:
    write_coded(checkpoint, directory / "coded", form)
    return read_manifest(directory / "coded")


@pytest.mark.parametrize("quant", ["int4", "int8"])
@pytest.mark.parametrize("form", _EXACT)
def test_codes_that_fit_stand_for_exactly_what_is_stored(
    form: str, quant: Quant, checkpoint: Path, tmp_path: Path
) -> None:
    written, exact = _EXACT[form]
    manifest = _manifest(written, checkpoint, tmp_path)
    plain = dict(load_span(manifest, _ALL, dtype=torch.float32, device=CPU).module.named_modules())
    loaded = load_span(manifest, _ALL, dtype=torch.float32, device=CPU, defer=True)
    assert len(loaded.deferred) == 14  # of all linear layers, none lies decoded in memory
    quantised_span(loaded, quant, "0" * 64, None)
    for name in loaded.deferred:
        layer = name.removesuffix(".weight")
        found, dense = loaded.module.get_submodule(layer).weight, plain[layer].weight
        if quant in exact:
            assert torch.equal(found, dense)
        else:
            assert torch.equal(found, quantise(dense, quant).dense())


def test_who_stores_4_bit_is_served_in_4_bit(checkpoint: Path, tmp_path: Path) -> None:
    for number, (form, exact) in enumerate(_EXACT.values()):
        manifest = _manifest(form, checkpoint, tmp_path / str(number))
        assert manifest.is_int4 == ("int4" in exact)
        chosen = choose_quant("auto", CPU, is_int4=manifest.is_int4)
        assert chosen.value == ("int4" if "int4" in exact else "int8")


def test_zero_points_beyond_4_bit_are_rounded_once_more(checkpoint: Path, tmp_path: Path) -> None:
    """The first form of GPTQ adds one to what it stores, and may mean 16."""
    manifest = _manifest(coded_files.gptq(4, 64, symmetric=True), checkpoint, tmp_path)
    entry = next(each for each in manifest.tensors.values() if each.name.endswith(".qzeros"))
    with entry.file.open("r+b") as stream:
        stream.seek(entry.offset)
        stream.write(b"\xff")
    decoded = load_span(manifest, _ALL, dtype=torch.float32, device=CPU).module
    layer = entry.name.removesuffix(".qzeros").removeprefix("model.")
    dense = decoded.get_submodule(layer).weight.detach()
    exact: dict[Quant, bool] = {"int8": True, "int4": False}
    for quant, is_exact in exact.items():
        loaded = load_span(manifest, _ALL, dtype=torch.float32, device=CPU, defer=True)
        quantised_span(loaded, quant, "0" * 64, None)
        assert torch.equal(loaded.module.get_submodule(layer).weight, dense) == is_exact


def test_a_span_of_codes_is_compiled_and_kept(checkpoint: Path, tmp_path: Path) -> None:
    manifest = _manifest(coded_files.awq(64), checkpoint, tmp_path)
    layers, cache = LayerRange(1, 2), tmp_path / "cache"
    plain = load_span(manifest, layers, dtype=torch.float32, device=CPU)
    rows = torch.randn(1, 5, 128, generator=torch.Generator().manual_seed(3))
    places = torch.arange(5).unsqueeze(0)
    with torch.no_grad():
        expected = plain.module(inputs_embeds=rows, position_ids=places).last_hidden_state
    for _ in range(2):  # made, and kept
        loaded = load_span(manifest, layers, dtype=torch.float32, device=CPU, defer=True)
        span = quantised_span(loaded, "int4", manifest.weights_sha256, cache)
        runtime = CompiledRuntime(span, threads=1, positions=64)
        (found,) = runtime.forward([StepInput(runtime.new_cache(5), 0, rows)])
        assert float((found - expected).norm() / (expected - rows).norm()) < 0.04
    assert load_ends(manifest, dtype=torch.float32, device=CPU, defer=True).deferred_head is None


@pytest.mark.parametrize(
    ("form", "quant", "head"),
    [("awq", "auto", "int8"), ("awq", "int4", "int8"), ("awq", "int8", "int8"),
     ("fp8", "auto", "int8"), ("fp8", "int4", "int4")],
)  # fmt: skip
def test_ends_beside_codes_are_as_they_are_stored(
    form: str, quant: str, head: str, tmp_path: Path
) -> None:
    """Not as the layers are; a head is not rounded to 4 bit where the layers were not."""
    made = make_checkpoint(tmp_path / "bf16", "llama", layers=2, hidden=128, dtype="bfloat16")
    manifest = _manifest(_EXACT[form][0], made, tmp_path)
    computed = Choice(torch.float32, "")
    loaded = load_computed(EndsPlan(manifest, CPU, "auto", computed, quant, 1, None))
    assert loaded.reasons == ("dtype fp32: embedding as stored, bf16", f"head compiled: {head}")


@pytest.mark.parametrize(
    ("family", "form"), [("gpt_oss", coded_files.mxfp4()), ("qwen3_moe", coded_files.fp8((32, 32)))]
)
def test_experts_are_rounded_as_what_they_stand_for(
    family: str, form: Form, tmp_path: Path
) -> None:
    everywhere = {"decoder_sparse_step": 1, "mlp_only_layers": []} if family != "gpt_oss" else {}
    made = make_checkpoint(tmp_path / "made", family, layers=2, **everywhere)
    plain = read_manifest(write_coded(made, tmp_path / "coded", form))
    rows = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(3))
    outputs = []
    for manifest in (read_manifest(tmp_path / "coded"), plain):
        loaded = load_span(manifest, _ALL, dtype=torch.float32, device=CPU, defer=True)
        assert loaded.late
        span = quantised_span(loaded, "int8", manifest.weights_sha256, None)
        runtime = CompiledRuntime(span, threads=1, positions=64)
        outputs += runtime.forward([StepInput(runtime.new_cache(5), 0, rows)])
    assert torch.equal(*outputs)


def test_experts_in_mxfp4_lose_nothing_in_8_bit(tmp_path: Path) -> None:
    mixed = make_checkpoint(tmp_path / "mixed", "gpt_oss", layers=2, hidden=128)
    manifest = _manifest(coded_files.mxfp4(), mixed, tmp_path)
    plain, loaded = (
        load_span(manifest, _ALL, dtype=torch.float32, device=CPU, defer=defer)
        for defer in (False, True)
    )
    assert len(loaded.late) == 2
    rounded = quantised_span(loaded, "int8", "", None).loaded
    for theirs, ours in zip(plain.module.layers, rounded.module.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            stored, kept = (getattr(each.mlp.experts, name) for each in (theirs, ours))
            assert all(torch.equal(kept[number], stored[number]) for number in range(4))


@pytest.mark.parametrize("form", ["packed", "packed with zero points", "gptq", "fp8"])
def test_experts_that_fit_stand_for_exactly_what_is_stored(form: str, tmp_path: Path) -> None:
    made = make_checkpoint(
        tmp_path / "made", "qwen3_moe", layers=2, decoder_sparse_step=1, mlp_only_layers=[]
    )
    written, exact = _EXACT[form]
    manifest = _manifest(written, made, tmp_path)
    assert manifest.is_int4 == ("int4" in exact)
    plain = load_span(manifest, _ALL, dtype=torch.float32, device=CPU).module.layers[1].mlp.experts
    for quant in BITS:
        loaded = load_span(manifest, _ALL, dtype=torch.float32, device=CPU, defer=True)
        experts = quantised_span(loaded, quant, "0" * 64, None).loaded.module.layers[1].mlp.experts
        for stack in ("gate_up_proj", "down_proj"):
            for expert, dense in enumerate(getattr(plain, stack)):
                found = getattr(experts, stack)[expert]
                same = dense if quant in exact else quantise(dense, quant).dense()
                assert torch.equal(found, same)
