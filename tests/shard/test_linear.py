from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from mesh.shard import linear
from mesh.shard.linear import PACKED, PLAIN, PackedLinear, choose_kernels

CPU = torch.device("cpu")

needs_packing = pytest.mark.skipif(
    linear._packing_fails() is not None, reason="this CPU or torch has no packed bf16 linear"
)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    last = Conv1D(32, 96)
    nn.init.normal_(last.bias)
    module = nn.Sequential(nn.Linear(48, 96, bias=False), nn.GELU(), last)
    return module.to(torch.bfloat16).requires_grad_(requires_grad=False)


@needs_packing
@torch.inference_mode()
def test_packed_layers_give_what_the_plain_ones_gave() -> None:
    module = layers()
    inputs = torch.randn(1, 7, 48).bfloat16()
    expected = module(inputs).float()
    assert choose_kernels(module, torch.bfloat16, CPU).name == PACKED
    assert [type(part) for part in module] == [PackedLinear, nn.GELU, PackedLinear]
    assert float((module(inputs).float() - expected).norm() / expected.norm()) < 0.01


@needs_packing
def test_the_old_weights_are_freed() -> None:
    module = layers()
    old = [weakref.ref(module[0].weight), weakref.ref(module[2].weight)]
    choose_kernels(module, torch.bfloat16, CPU)
    gc.collect()
    assert [ref() for ref in old] == [None, None]


def test_fp32_and_gpus_keep_their_own_kernels() -> None:
    for dtype, device in ((torch.float32, CPU), (torch.bfloat16, torch.device("cuda"))):
        module = layers()
        assert choose_kernels(module, dtype, device).name == PLAIN
        assert isinstance(module[0], nn.Linear)


def test_a_kernel_that_is_missing_or_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_agrees", lambda *_: False)
    module = layers()
    kernels = choose_kernels(module, torch.bfloat16, CPU)
    assert kernels.name == PLAIN
    assert isinstance(module[0], nn.Linear)
    monkeypatch.setattr(linear, "_OPS", object())
    assert "no packed linear operator" in choose_kernels(module, torch.bfloat16, CPU).reason
