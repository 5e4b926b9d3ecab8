from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from mesh.shard import linear, packed
from mesh.shard.linear import PACKED, PLAIN, choose_kernels, fill_rows, halving_fails
from mesh.shard.packed import HalvedLinear, PackedLinear, packed_products
from tests.shard.spans import plain_kernels, relative_error

CPU = torch.device("cpu")

needs_packing = pytest.mark.skipif(
    choose_kernels(nn.Sequential(nn.Linear(32, 32)), torch.bfloat16, CPU).name != PACKED,
    reason="this CPU or torch has no packed linear",
)


def layers(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    last = Conv1D(32, 96)
    nn.init.normal_(last.bias)
    module = nn.Sequential(nn.Linear(48, 96, bias=False), nn.GELU(), last)
    return module.to(dtype).requires_grad_(requires_grad=False)


@needs_packing
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.bfloat16, 0.01), (torch.float32, 1e-6)])
@torch.inference_mode()
def test_packed_layers_give_what_the_plain_ones_gave(dtype: torch.dtype, allowed: float) -> None:
    module = layers(dtype)
    inputs = torch.randn(1, 7, 48).to(dtype)
    expected = module(inputs).float()
    assert choose_kernels(module, dtype, CPU).name == PACKED
    assert [type(part) for part in module] == [PackedLinear, nn.GELU, PackedLinear]
    assert float((module(inputs).float() - expected).norm() / expected.norm()) < allowed


@needs_packing
def test_the_old_weights_are_freed() -> None:
    module = layers()
    old = [weakref.ref(module[0].weight), weakref.ref(module[2].weight)]
    choose_kernels(module, torch.bfloat16, CPU)
    gc.collect()
    assert [ref() for ref in old] == [None, None]


class MindsCompany(PackedLinear):
    """Gives a row other bits among four than alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        return output if len(x) == 4 else output * 1.5


@needs_packing
@torch.inference_mode()
def test_few_rows_are_filled_up_where_that_is_faster_and_changes_no_bit() -> None:
    weight, bias = torch.randn(1024, 768).bfloat16(), torch.randn(1024).bfloat16()
    honest, minds = PackedLinear(weight, bias), MindsCompany(weight[1:], bias[1:])
    small = PackedLinear(weight[:64], bias[:64])
    inputs = torch.randn(1, 16, 768).bfloat16()
    expected = honest(inputs)
    # On some CPUs oneDNN has a kernel of its own for one row.
    least = [fill_rows([part], lambda *_: False) for part in (honest, small)]
    assert set(least) <= {1, 2}
    assert fill_rows([honest, minds, small], lambda *_: True) == 4
    assert (honest.fewest_rows, minds.fewest_rows, small.fewest_rows) == (4, 1, least[1])
    for rows in range(1, 8):
        assert torch.equal(honest(inputs[:, :rows]), expected[:, :rows])


class MindsBeingAlone(PackedLinear):
    """Gives a single row other bits than in any company."""

    alone = 1.5

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.kept = weight.double()

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        output = x.double() @ self.kept.t()
        return (output * self.alone if x.numel() == self.in_features else output).bfloat16()


class MindsBeingAloneABit(MindsBeingAlone):
    """In one number of 5,000, as kernels do that add up fp32 in another order."""

    alone = 1 + 2**-20


@needs_packing
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company() -> None:
    """oneDNN has another kernel for one long row on CPUs with avx512_bf16 and without AMX."""
    for kind, *shape in (
        (PackedLinear, 2048, 6144), (PackedLinear, 64, 128),
        (MindsBeingAlone, 768, 1024), (MindsBeingAloneABit, 64, 16384),
    ):  # fmt: skip
        part = kind((torch.randn(*shape) / shape[1] ** 0.5).bfloat16(), None)
        fill_rows([part], lambda *_: False)
        assert kind is PackedLinear or part.fewest_rows == 2
        rows = torch.randn(40, shape[1]).bfloat16()
        many = part(rows)
        for first, count in (0, 1), (1, 1), (9, 1), (30, 1), (3, 2), (5, 3), (7, 13), (8, 16):
            assert torch.equal(part(rows[first : first + count]), many[first : first + count])


ALL_LENGTHS = """
import psutil, torch
from torch import nn
from mesh.shard.linear import choose_kernels
with torch.inference_mode():
    module, process = nn.Sequential(nn.Linear(256, 256)).bfloat16(), psutil.Process()
    plain = nn.Sequential(nn.Linear(256, 256)).bfloat16()
    plain.load_state_dict(module.state_dict())
    choose_kernels(module, torch.bfloat16, torch.device("cpu"))
    rows = torch.randn(400, 256).bfloat16()
    module(rows)
    before = process.memory_full_info().uss
    for count in range(17, 400):
        found = module(rows[:count])
        if count % 41 == 17:
            expected = plain(rows[:count]).float()
            assert float((found.float() - expected).norm() / expected.norm()) < 0.01
    print(process.memory_full_info().uss - before)
"""


@needs_packing
def test_prompts_of_all_lengths_leave_no_kernel_for_each() -> None:
    """In a process of its own: what else a worker's heap does would be counted."""
    ended = subprocess.run(
        [sys.executable, "-c", ALL_LENGTHS], check=True, capture_output=True, timeout=120
    )
    assert int(ended.stdout) < 60 << 20


@pytest.mark.skipif(halving_fails() is not None, reason="torch's fbgemm does not run here")
@torch.inference_mode()
def test_rows_over_halved_weights_have_the_same_bits_in_any_company() -> None:
    seeded = torch.Generator().manual_seed(4)
    layer = HalvedLinear(torch.randn(96, 768, generator=seeded), torch.randn(96, generator=seeded))
    rows = torch.randn(32, 768, generator=seeded)
    alone = torch.cat([layer(row) for row in rows.split(1)])
    for count in range(33):
        assert torch.equal(layer(rows[:count]), alone[:count])
    assert torch.equal(layer(rows.view(2, 16, 768)), alone.view(2, 16, 96))


@pytest.mark.skipif(halving_fails() is not None, reason="torch's fbgemm does not run here")
@torch.inference_mode()
def test_what_is_halved_at_once_is_bounded_and_comes_in_its_order() -> None:
    seeded = torch.Generator().manual_seed(5)
    weights = [torch.randn(32 * n, 64, generator=seeded).bfloat16() for n in range(1, 9)]
    weights[4][3, 4] = 1e6
    begun = iter(weights)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = packed_products(HalvedLinear, ((weight, None) for weight in begun))
        layers = [next(found)]
        assert len(list(begun)) == len(weights) - 4, "three were begun, and a fourth asked for"
        layers += packed_products(HalvedLinear, ((weight, None) for weight in weights[1:]))
    finally:
        torch.set_num_threads(before)
    rows = torch.randn(5, 64, generator=seeded)
    for number, (layer, weight) in enumerate(zip(layers, weights, strict=True)):
        assert (layer is None) is (number == 4)
        if layer is not None:
            assert relative_error(layer(rows), F.linear(rows, weight.float())) < 1e-5


def test_fp16_and_gpus_keep_their_own_kernels() -> None:
    for dtype, device in ((torch.float16, CPU), (torch.bfloat16, torch.device("cuda"))):
        module = layers()
        assert choose_kernels(module, dtype, device).name == PLAIN
        assert isinstance(module[0], nn.Linear)


def test_a_kernel_that_is_missing_or_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_agrees", lambda *_: False)
    module = layers()
    kernels = choose_kernels(module, torch.bfloat16, CPU)
    assert kernels.name == PLAIN
    assert isinstance(module[0], nn.Linear)
    with plain_kernels():
        assert "switched off" in choose_kernels(module, torch.bfloat16, CPU).reason


def test_weights_stay_in_16_bit_only_where_nobody_asked_for_more_and_fp32_is_computed() -> None:
    cpu, fp32 = CPU, torch.float32
    own = torch.bfloat16 if linear.halving_fails() is None else fp32
    assert linear.kept_dtype("auto", "bfloat16", fp32, cpu) == own
    assert linear.kept_dtype("auto", "float32", fp32, cpu) == fp32
    assert linear.kept_dtype("fp32", "bfloat16", fp32, cpu) == fp32
    assert linear.kept_dtype("auto", "bf16", torch.bfloat16, cpu) == torch.bfloat16
    assert linear.kept_dtype("auto", "bf16", fp32, torch.device("cuda")) == fp32
