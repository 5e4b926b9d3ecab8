"""A host notices that its weights in memory have changed, whatever changed them."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from mesh.models.load import load_span
from mesh.models.pages import PAGE_BYTES, set_writable
from mesh.shard.belongings import belongings
from mesh.shard.packed import packed_memory
from mesh.shard.torch_runtime import TorchRuntime
from mesh.shard.weight_check import WeightCheck
from mesh.types import LayerRange
from tests.interventions.worlds import CPU, checkpoint
from tests.shard.spans import changed_in_a_round, plain_kernels

SPAN = LayerRange(1, 5)


def runtime(family: str = "llama") -> TorchRuntime:
    loaded = load_span(checkpoint(family), SPAN, dtype=torch.float32, device=CPU)
    return TorchRuntime(loaded, device=CPU, dtype=torch.float32)


def check(span: TorchRuntime) -> WeightCheck:
    return WeightCheck(span.loaded.module, span.loaded.sha256)


def flip(tensor: torch.Tensor, at: int) -> None:
    """Change one bit, as a cosmic ray does: through no door of torch's."""
    address, _ = packed_memory(tensor) or (tensor.data_ptr(), 0)
    start = (address + at) // PAGE_BYTES * PAGE_BYTES
    set_writable(start, PAGE_BYTES, writable=True)
    byte = ctypes.c_ubyte.from_address(address + at)
    byte.value ^= 4


def tensors(span: TorchRuntime) -> dict[str, Any]:
    return {each.name: each.tensor for each in belongings(span.loaded.module)}


@pytest.mark.parametrize("packed", [True, False])
def test_one_bit_is_noticed_wherever_it_is(packed: bool) -> None:
    with nullcontext() if packed else plain_kernels():
        span = runtime()
    checking = check(span)
    assert changed_in_a_round(checking, 1000) == set()
    assert changed_in_a_round(checking) == set()
    for name, tensor in tensors(span).items():
        for at in (0, tensor.numel() * tensor.itemsize - 1):
            flip(tensor, at)
            assert len(found := changed_in_a_round(checking, 1000)) == 1, name
            assert tensors(span)[found.pop()] is not None
            flip(tensor, at)
            assert changed_in_a_round(checking, 1000) == set()


def test_what_was_wrong_before_the_first_round_is_noticed_where_it_is_as_stored() -> None:
    with plain_kernels():
        span = runtime()
    name = "layers.2.mlp.up_proj.weight"
    flip(tensors(span)[name], 77)
    assert changed_in_a_round(check(span), 1000) == {name}


def test_checking_keeps_no_weight_alive() -> None:
    span = runtime()
    checking = check(span)
    changed_in_a_round(checking, 1000)
    weight = weakref.ref(next(span.loaded.module.parameters()))
    del span
    gc.collect()
    assert weight() is None
    assert changed_in_a_round(checking, 1000) == set()


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="makes weights writable again")
