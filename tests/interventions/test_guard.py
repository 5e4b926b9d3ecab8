"""The look at each tensor operation: no write to the model runs, nor what would not fit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mesh.errors import BadRequest, LimitReached
from mesh.shard.taps.guard import GraphShare, OperationGuard
from mesh.shard.taps.meter import ENTRY_BYTES, MemoryMeter

LIMIT = 1 << 20
FAR = 1 << 50
"""Elements that no machine has room for: whoever begins to make them fails otherwise."""


def guarded(*model: torch.Tensor, limit: int = LIMIT) -> tuple[OperationGuard, MemoryMeter]:
    meter = MemoryMeter(limit)
    addresses = frozenset(tensor.untyped_storage().data_ptr() for tensor in model)
    return OperationGuard(addresses, meter), meter


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in_place": lambda w: w.add_(1),
    "view": lambda w: w.view(-1)[3:5].mul_(2),
    "transposed": lambda w: w.t().copy_(torch.ones(8, 8)),
    "as_strided": lambda w: w.as_strided((2, 2), (1, 1)).zero_(),
    "detached": lambda w: w.detach().fill_(0),
    "data": lambda w: w.data.fill_(0),
    "bytes": lambda w: w.view(torch.uint8).zero_(),
    "item": lambda w: w.__setitem__((0, 0), 1.0),
    "mask": lambda w: w.__setitem__(w > 0, 0.0),
    "index": lambda w: w.index_put_((torch.tensor([1]),), torch.zeros(8)),
    "index_add": lambda w: w.index_add_(0, torch.tensor([1]), torch.ones(1, 8)),
    "out": lambda w: torch.matmul(torch.ones(8, 8), torch.ones(8, 8), out=w),
    "out_among_others": lambda w: torch.max(torch.ones(8, 8), 0, out=(w[0], torch.empty(8).long())),
    "many": lambda w: torch._foreach_add_([torch.ones(8, 8), w], 1.0),
    "many_copied": lambda w: torch._foreach_copy_([w], [torch.ones(8, 8)]),
    "many_out": lambda w: torch._foreach_zero_([w[1:], w]),
    "optimizer": lambda w: torch._fused_sgd_(
        [w],
        [torch.ones(8, 8)],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=1.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    ),
    "masked": lambda w: w.masked_fill_(w > 0, 0.0),
    "scattered": lambda w: w.scatter_(0, torch.zeros(1, 8, dtype=torch.long), 1.0),
    "unbound": lambda w: w.unbind(0)[2].neg_(),
    "random": lambda w: w.normal_(),
    "transposed_itself": lambda w: w.t_(),
    "silu": lambda w: F.silu(w, inplace=True),
    "dropout": lambda w: F.dropout(w, 0.5, training=True, inplace=True),
    "batch_norm": lambda w: F.batch_norm(torch.ones(4, 8), w[0], w[1], training=True),
    "resized": lambda w: w.resize_(1),
    "set": lambda w: w.set_(torch.ones(3)),
}


@pytest.mark.parametrize("name", WRITES)
def test_nothing_writes_to_the_model(name: str) -> None:
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8), requires_grad=False)
    before, place = weight.clone(), (weight.data_ptr(), weight._version)
    guard, _ = guarded(weight)
    with guard, pytest.raises(BadRequest, match="would write to the model"):
        WRITES[name](weight)
    assert torch.equal(weight, before)
    assert (weight.data_ptr(), weight._version) == place
    with guard:  # and what is the job's own may be written to
        WRITES[name](before.clone())


MAKES: dict[str, Callable[[torch.Tensor], Any]] = {
    "zeros": lambda _: torch.zeros(FAR),
    "new_zeros": lambda t: t.new_zeros((FAR, 2)),
    "full": lambda _: torch.full((FAR,), 3),
    "arange": lambda _: torch.arange(FAR),
    "linspace": lambda _: torch.linspace(0, 1, FAR),
    "outer": lambda t: t.expand(1 << 25, -1)[:, :1] + t.new_ones(1).expand(1 << 25),
    "product": lambda t: t[:1].expand(1 << 25, 1) @ t[:1].expand(1, 1 << 25),
    "batches": lambda t: torch.bmm(
        t[:1].expand(1 << 20, 1 << 10, 1), t[:1].expand(1 << 20, 1, 1 << 20)
    ),
    "repeat": lambda t: t.repeat(FAR),
    "repeat_interleave": lambda t: t.repeat_interleave(FAR),
    "repeats_in_a_tensor": lambda t: torch.repeat_interleave(t[:1], torch.tensor([FAR])),
    "one_hot": lambda _: F.one_hot(torch.tensor([1]), FAR),
    "pad": lambda t: F.pad(t, (0, FAR)),
    "embedding": lambda t: F.embedding(
        torch.zeros(1, dtype=torch.long).expand(1 << 40), t.view(8, 8)
    ),
    "index": lambda t: t.view(8, 8)[torch.zeros(1, dtype=torch.long).expand(1 << 40)],
    "gather": lambda t: t.gather(0, torch.zeros(1, dtype=torch.long).expand(FAR)),
    "cat": lambda t: torch.cat([t[:1].expand(1 << 48)] * 4),
    "clone": lambda t: t[:1].expand(FAR).clone(),
    "widened": lambda t: t[:1].expand(FAR).double(),
    "contiguous": lambda t: t[:1].expand(FAR).contiguous(),
    "softmax": lambda t: t[:1].expand(FAR).softmax(0),
    "attention": lambda t: F.scaled_dot_product_attention(
        *[t[:1].expand(1, 1, 1 << 40, 64) for _ in range(3)]
    ),
    "histogram": lambda t: torch.histc(t, FAR),
    "counts": lambda _: torch.bincount(torch.tensor([FAR])),
    "combinations": lambda t: torch.cdist(t[:1].expand(1 << 25, 1), t[:1].expand(1 << 25, 1)),
    "resized": lambda t: t.clone().resize_(FAR),
    "out": lambda t: torch.add(t[:1].expand(FAR), 1, out=torch.empty(0)),
    "unfold": lambda t: F.unfold(t.view(1, 1, 8, 8).expand(1, 1 << 40, 8, 8), 3),
    "triangle": lambda _: torch.tril_indices(1 << 25, 1 << 25),
    "diagonal": lambda t: torch.diag_embed(t[:1].expand(1 << 25)),
    "random": lambda _: torch.rand(FAR),
    "upsampled": lambda t: F.interpolate(t.view(1, 1, 64), scale_factor=float(1 << 40)),
}


@pytest.mark.parametrize("name", MAKES)
def test_what_would_not_fit_is_never_begun(name: str) -> None:
    given = torch.linspace(0, 1, 64)
    guard, meter = guarded()
    with guard, pytest.raises(LimitReached, match="more than the 1048576"):
        MAKES[name](given)
    gc.collect()
    assert meter.held_bytes == 0


def test_what_is_made_counts_until_it_dies() -> None:
    guard, meter = guarded()
    with guard:
        first = torch.zeros(1000)
        view = first[10:20]
        assert meter.held_bytes == 4000 + ENTRY_BYTES
        empties = [torch.empty(0) for _ in range(7)]
        assert meter.held_bytes == 4000 + 8 * ENTRY_BYTES
    del first, empties
    assert meter.held_bytes == 4000 + ENTRY_BYTES
    del view
    assert meter.held_bytes == 0


def test_graphs_count_while_they_are_made() -> None:
    guard, meter = guarded()
    guard.graph = GraphShare(meter)
    grown = torch.ones(100, requires_grad=True)
    with guard, suppress(LimitReached):
        for _ in range(10_000):
            grown = grown.exp()
    assert meter.held_bytes > LIMIT - 4096
    guard.graph = None
    del grown
    gc.collect()
    assert meter.held_bytes == 0


def test_nodes_without_tensors_count_too() -> None:
    guard, meter = guarded()
    guard.graph = GraphShare(meter)
    start = chain = torch.ones(1, requires_grad=True)
    with guard, suppress(LimitReached):
        for _ in range(10_000):
            chain = chain.view(1)
    assert start is not chain
    assert meter.held_bytes > LIMIT - 4096
    guard.graph = None
    assert meter.held_bytes == 0
