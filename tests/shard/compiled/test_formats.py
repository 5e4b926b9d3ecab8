"""Rounding to few bits."""

from __future__ import annotations

import pytest
import torch

from mesh.routing import machines
from mesh.routing.machines import ITEMSIZE
from mesh.shard.compiled.formats import (
    BITS,
    MIXED_SIZE,
    BlockLinear,
    Quant,
    bytes_per_weight,
    quantise,
)


def noise(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def test_what_was_in_mxfp4_is_exact_in_8_bit() -> None:
    levels = torch.tensor(
        [0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32
    )
    chosen = torch.randint(0, len(levels), (64, 8, 32), generator=torch.Generator().manual_seed(0))
    scales = 2.0 ** torch.arange(-9.0, 7.0).repeat(32).view(64, 8, 1)
    weight = (levels[chosen] * scales).view(64, 256)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(weight.to(dtype).float(), weight)
        assert torch.equal(quantise(weight.to(dtype), "int8").dense(), weight)
    other = quantise(noise(64, 256), "int8")
    assert torch.equal(other.scales, noise(64, 256).view(64, 8, 32).abs().amax(-1) / 127)


@pytest.mark.parametrize(("quant", "most"), [("int8", 0.006), ("int4", 0.08)])
def test_what_is_kept_is_close_and_as_small_as_said(quant: Quant, most: float) -> None:
    weight = noise(96, 256)
    matrix = quantise(weight, quant)
    assert (matrix.dense() - weight).norm() / weight.norm() < most
    assert matrix.nbytes == bytes_per_weight(quant) * weight.numel()


def test_four_bits_beat_rounding_around_zero() -> None:
    weight = noise(64, 256)
    blocks = weight.view(64, -1, 32)
    step = blocks.abs().amax(-1, keepdim=True) / 7
    plain = (blocks / step).round() * step
    ours = quantise(weight, "int4").dense()
    assert (ours - weight).norm() < 0.83 * (plain - blocks).norm()


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_any_shape_any_dtype_and_blocks_of_nothing(quant: Quant) -> None:
    weight = noise(5, 70)  # neither a whole block nor an even number of them
    weight[2] = 0
    weight[3, :32] = 1.5
    matrix = quantise(weight.bfloat16(), quant)
    dense = matrix.dense()
    assert dense.shape == (5, 70)
    assert torch.equal(dense[2], torch.zeros(70))
    assert torch.allclose(dense[3, :32], torch.full((32,), 1.5), atol=1e-2)
    assert torch.isfinite(dense).all()


def test_a_linear_layer_multiplies_by_what_its_codes_stand_for() -> None:
    matrix = quantise(noise(8, 64), "int4")
    bias = torch.arange(8.0)
    linear = BlockLinear(matrix, bias)
    x = noise(3, 64)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, linear.weight, bias))
    assert linear.weight.shape == (8, 64)


def test_plans_count_the_bytes_of_these_formats() -> None:
    assert {quant: ITEMSIZE[quant] for quant in BITS} == {q: bytes_per_weight(q) for q in BITS}
    assert machines.MIXED_SIZE == MIXED_SIZE
