"""A changed weight inside onnxruntime is noticed by what its layer answers."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from mesh.shard.compiled.builder import DOWN, INPUTS_GATE, INPUTS_PROJECTION, OUTPUT, QKV, UP
from mesh.shard.compiled.formats import BlockMatrix
from mesh.shard.compiled.runtime import CompiledRuntime
from tests.shard.compiled.spans import compiled, span
from tests.shard.spans import changed_in_a_round


class Tipping(CompiledRuntime):
    """A span of which one code has changed, once `tipped` is set."""

    tipped: CompiledRuntime | None = None

    def probe(self, layer: int, number: int = 0) -> torch.Tensor:
        if self.tipped is None:
            return super().probe(layer, number)
        return self.tipped.probe(layer, number)


def test_one_code_that_has_changed_is_noticed() -> None:
    runtime = Tipping(span("int8"), threads=1, positions=64)
    check = runtime.weight_check()
    assert changed_in_a_round(check, 1) == set()
    assert changed_in_a_round(check, 1) == set()
    changed = span("int8")
    matrix = changed.layers[2].products[DOWN].matrix
    assert isinstance(matrix, BlockMatrix)
    matrix.codes[17, 1, 5] ^= 1  # what a bit that has tipped over in its memory would be
    runtime.tipped = CompiledRuntime(changed, threads=1, positions=64)
    assert changed_in_a_round(check, 1) == {"layer 2"}


@pytest.mark.parametrize("name", [QKV, OUTPUT, UP, DOWN, INPUTS_GATE, INPUTS_PROJECTION])
def test_a_bit_that_has_tipped_over_in_any_product_is_noticed(name: str) -> None:
    check_of = Tipping(span("int4", "gemma4_e"), threads=1, positions=64)
    check = check_of.weight_check()
    assert changed_in_a_round(check, 1) == set()
    changed = span("int4", "gemma4_e")
    matrix = changed.layers[3].products[name].matrix  # which sees keys of another
    assert isinstance(matrix, BlockMatrix)
    matrix.codes[7, 0, 5] ^= 4
    check_of.tipped = CompiledRuntime(changed, threads=1, positions=64)
    assert "layer 3" in changed_in_a_round(check, 1) | changed_in_a_round(check, 1)


def test_a_code_of_any_expert_that_has_changed_is_noticed() -> None:
    """The first row that a layer is asked with meets two of the four."""
    runtime = Tipping(span("int8", "gpt_oss"), threads=1, positions=64)
    check = runtime.weight_check()
    for _ in range(2 * runtime.probes):
        assert changed_in_a_round(check, 1) == set()
    for expert in range(4):
        changed = span("int8", "gpt_oss")
        matrix = changed.layers[2].products[DOWN].matrix
        assert isinstance(matrix, BlockMatrix)
        matrix.codes[64 * expert + 17, 1, 5] ^= 64
        runtime.tipped = CompiledRuntime(changed, threads=1, positions=64)
        found = [changed_in_a_round(check, 1) for _ in range(2 * runtime.probes)]
        assert {"layer 2"} in found
        assert set() in found


def test_a_check_keeps_no_weights() -> None:
    runtime = compiled("int8")
    check, gone = runtime.weight_check(), weakref.ref(runtime)
    check.step(1)
    del runtime
    gc.collect()
    assert gone() is None
    assert check.step(1) is None
    assert torch.is_grad_enabled()
