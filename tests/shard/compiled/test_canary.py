"""A changed weight inside onnxruntime is noticed by what its layer answers."""

from __future__ import annotations

import gc
import weakref

import torch

from mesh.shard.compiled.canary import CanaryCheck
from mesh.shard.compiled.engine import compiled as session_of
from mesh.shard.compiled.formats import BlockMatrix
from mesh.shard.compiled.graph import DOWN, layer_model
from tests.shard.compiled.spans import compiled, span


def a_round(check: CanaryCheck) -> set[str]:
    rounds, found = check.rounds, set()
    while check.rounds == rounds:
        found.add(check.step(1))
    return {name for name in found if name is not None}


def test_one_code_that_has_changed_is_noticed() -> None:
    runtime = compiled("int8")
    check = runtime.weight_check()
    assert a_round(check) == set()
    assert a_round(check) == set()
    layer = span("int8").layers[2]
    matrix = layer.products[DOWN].matrix
    assert isinstance(matrix, BlockMatrix)
    matrix.codes[17, 1, 5] ^= 1  # what a bit that has tipped over in its memory would be
    runtime._sessions[2] = session_of(layer_model(layer.parts, layer.products), 1)
    assert a_round(check) == {"layer 2"}


def test_a_check_keeps_no_weights() -> None:
    runtime = compiled("int8")
    check, gone = runtime.weight_check(), weakref.ref(runtime)
    check.step(1)
    del runtime
    gc.collect()
    assert gone() is None
    assert check.step(1) is None
    assert torch.is_grad_enabled()
