"""A layer that this CPU, or this program, computes wrongly is not served."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, StableLmConfig

from mesh.errors import DeviceFailed
from mesh.models.families import family_of, family_of_config
from mesh.models.span import LoadedSpan
from mesh.shard import twins
from mesh.shard.compiled import parts
from mesh.shard.compiled.builder import DOWN
from mesh.shard.compiled.formats import BlockMatrix
from mesh.shard.compiled.parts import NotCompilable
from mesh.shard.compiled.proof import check_kernels, require_compilable
from mesh.shard.compiled.runtime import CompiledRuntime
from mesh.shard.runtime import Runtime
from mesh.shard.torch_runtime import TorchRuntime
from tests.shard.compiled.spans import compiled, span
from tests.shard.spans import CPU, checkpoint


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_right_kernels_pass_and_say_that_rows_are_alike(quant: str) -> None:
    assert "same bits in any chunk and batch" in check_kernels(compiled(quant))


def test_a_layer_that_is_off_is_refused() -> None:
    right = span("int8")
    layer = right.layers[0]
    matrix = layer.products[DOWN].matrix
    assert isinstance(matrix, BlockMatrix)
    wrong = replace(matrix, scales=matrix.scales * 1.3)  # as kernels that saturate are
    products = {**layer.products, DOWN: replace(layer.products[DOWN], matrix=wrong)}
    layers = (replace(layer, products=products), *right.layers[1:])
    runtime = CompiledRuntime(replace(right, layers=layers), threads=1, positions=64)
    with pytest.raises(DeviceFailed, match="Layer 0 in few bits is off by"):
        check_kernels(runtime)


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}


def test_heads_that_the_operator_does_not_take_are_refused() -> None:
    config = StableLmConfig(num_hidden_layers=2, hidden_size=160, **HEADS)
    with pytest.raises(NotCompilable, match="heads are 40 wide, which is no multiple of 16"):
        require_compilable(family_of_config(config), None)


def test_a_misread_family_is_refused_and_the_verdict_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = family_of(checkpoint("gemma2"))
    twins.settled.clear()
    monkeypatch.setitem(parts.ACTIVATION_NAMES, "gelu_pytorch_tanh", "silu")
    with pytest.raises(NotCompilable, match="its graphs differ by"):
        require_compilable(family, tmp_path)
    monkeypatch.undo()
    twins.settled.clear()
    with pytest.raises(NotCompilable, match="its graphs differ by"):
        require_compilable(family, tmp_path)  # as it is kept: the structure is the same
    twins.settled.clear()
    require_compilable(family, None)


def test_a_verdict_holds_until_any_file_of_the_package_is_another(tmp_path: Path) -> None:
    beside = tmp_path / "shard" / "compiled" / "products.py"
    beside.parent.mkdir(parents=True)
    beside.write_text("")
    source = Path(str(shutil.copy(str(twins.__file__), tmp_path / "shard")))
    spec = importlib.util.spec_from_file_location("twins_elsewhere", source)
    assert spec is not None
    assert spec.loader is not None
    elsewhere = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(elsewhere)
    tried: list[str] = []

    def refused(_: LoadedSpan) -> Runtime:
        tried.append("once more")
        raise NotCompilable("it is only tried")

    family = family_of(checkpoint("llama"))
    for text, count in (("", 1), ("", 1), ("SIZE = 2", 2)):
        beside.write_text(text)
        elsewhere.settled.clear()
        with pytest.raises(NotCompilable, match="only tried"):
            elsewhere.require_right(elsewhere.Way("a", "b", "c", refused), family, tmp_path)
        assert len(tried) == count


@pytest.mark.parametrize(("name", "misread"), [("eps", 1e-5), ("attn_logit_softcapping", None)])
def test_a_twin_shows_what_a_few_random_numbers_would_not(name: str, misread: object) -> None:
    def by_misread(loaded: LoadedSpan) -> TorchRuntime:
        for module in loaded.module.modules():
            if hasattr(module, name):
                setattr(module, name, misread)
        return TorchRuntime(loaded, device=CPU, dtype=torch.float32)

    way = twins.Way(f"with another {name}", "layers", "", by_misread)
    with pytest.raises(NotCompilable, match="its layers differ by"):
        twins.require_right(way, family_of_config(Gemma2Config(num_hidden_layers=4)), None)
