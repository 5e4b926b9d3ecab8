"""Experts in a library's own layout, without the blocks that they are in: which bits a row has, who
else computes with them, and what becomes of the tensors that they were."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from mesh.models.load import load_span
from mesh.shard.hooks import Hook
from mesh.shard.packed import HalvedLinear
from mesh.shard.packed_experts import PackedMatrices
from mesh.shard.runtime import StepInput
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import Site
from tests.shard.spans import CPU, WHOLE, changed_in_a_round, checkpoint, relative_error, rows, step
from tests.shard.spans import runtime as by_modules
from tests.shard.test_lean import halved, needs_packed_bf16, needs_packing, runtime

pytestmark = needs_packing
FAMILIES = ("qwen3_moe", "gpt_oss", "qwen2_moe", "granitemoehybrid", "nemotron_h", "afmoe")
MIXED = 1
"""A layer that has experts, in each of them."""
SESSIONS = 24
"""More than the rows of the longest step."""


def experts_of(span: TorchRuntime) -> Any:
    """transformers' module of them."""
    named = span.layer(MIXED).named_modules()
    return next(each for name, each in named if name.endswith(".experts"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_halved", [pytest.param(False, marks=needs_packed_bf16), True])
def test_sessions_that_are_computed_together_have_the_bits_that_they_have_alone(
    family: str, *, is_halved: bool
) -> None:
    span = halved(family)[0] if is_halved else runtime(family, dtype=torch.bfloat16)
    assert span.is_lean

    def steps() -> list[StepInput]:
        found = []
        for i in range(SESSIONS):
            cache, past = span.new_cache(64), rows(1 + i, seed=i).to(span.dtype)
            step(span, cache, 0, past)
            found.append(StepInput(cache, 1 + i, rows(1, seed=50 + i).to(span.dtype)))
        return found

    alone = [span.forward([each])[0] for each in steps()]
    assert all(map(torch.equal, span.forward(steps()), alone))


class Seen:
    """A hook that keeps what comes out of the experts' block."""

    def __init__(self) -> None:
        self.site = Site(MIXED, "mlp")
        self.rows: list[torch.Tensor] = []

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows.append(hidden)
        return hidden


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_step_with_hooks_goes_through_the_block_and_the_same_experts(family: str) -> None:
    span, plain, found = runtime(family), by_modules(family), []
    assert isinstance(experts_of(span).down_proj, PackedMatrices)
    assert not isinstance(experts_of(plain).down_proj, PackedMatrices)
    for each in (span, plain):
        hook = Seen()
        hooks: tuple[Hook, ...] = (hook,)
        (output,) = each.forward([StepInput(each.new_cache(64), 0, rows(20), hooks)])
        found.append((output, *hook.rows))
    for mine, expected in zip(*found, strict=True):
        assert relative_error(mine, expected) < 1e-5


def test_the_tensors_that_were_packed_are_gone() -> None:
    loaded = load_span(checkpoint("qwen3_moe"), WHOLE, dtype=torch.float32, device=CPU)
    stack = weakref.ref(loaded.module.layers[MIXED].mlp.experts.gate_up_proj)
    span = TorchRuntime(loaded, device=CPU, dtype=torch.float32, lean=True)
    gc.collect()
    assert span.is_lean
    assert stack() is None


@torch.inference_mode()
def test_experts_of_which_fp16_does_not_hold_all_weights_stay_as_they_are() -> None:
    outputs = []
    for is_narrow in (True, False):
        loaded = load_span(checkpoint("qwen3_moe"), WHOLE, dtype=torch.bfloat16, device=CPU)
        loaded.module.layers[MIXED].mlp.experts.down_proj[1, 3, 4] = 7e4
        if not is_narrow:
            loaded.module.float()
        span = TorchRuntime(loaded, device=CPU, dtype=torch.float32, lean=is_narrow)
        assert span.is_lean is is_narrow
        assert isinstance(experts_of(span).gate_up_proj, PackedMatrices) is is_narrow
        assert not isinstance(experts_of(span).down_proj, PackedMatrices)
        outputs.append(step(span, span.new_cache(64), 0, rows(30)))
    assert relative_error(*outputs) < 1e-5


def test_an_expert_that_changes_is_noticed() -> None:
    narrow, _ = halved("qwen3_moe")
    checking = narrow.weight_check()

    assert changed_in_a_round(checking) == set()
    parts = experts_of(narrow).down_proj.modules()
    first, second, *_ = (part for part in parts if isinstance(part, HalvedLinear))
    vars(second).update(vars(first))
    assert changed_in_a_round(checking) == {f"layers.{MIXED}.mlp.experts.down_proj._each.1"}
