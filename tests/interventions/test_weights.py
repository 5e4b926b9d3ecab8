"""The model's weights: a job sees copies, its edits last as long as its trace, nothing gets out."""

# ruff: noqa: RET504 - the block is the trace, which gives names their values at its end

from __future__ import annotations

import gc
import hashlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import nnsight
import pytest
import torch

from mesh.shard.belongings import belongings
from mesh.shard.taps.session import TapLimits, TapSession
from mesh.shard.taps.tree import SpanTree
from mesh.types import LayerRange
from tests.interventions.cases import CASES, PROMPT, Parts
from tests.interventions.test_limits import own_whole
from tests.interventions.weight_attacks import JOBS, PROTOCOL, Attacker, linear_of
from tests.interventions.worlds import SPLITS, equal, remote, tree, whole


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def state(of: SpanTree) -> dict[str, Any]:
    """All there is to know of a tree's tensors, and of the plain attributes of its modules."""
    plain = {
        f"{path}.{name}": repr(value)
        for path, module in of.loaded.module.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str | tuple | list)
    }
    return plain | {
        each.name: (
            id(each.tensor), each.tensor.dtype, each.tensor.shape, each.tensor.requires_grad,
            each.tensor.grad, each.tensor._version,
            hashlib.sha256(each.tensor.detach().contiguous().view(torch.uint8).numpy()).hexdigest(),
        )
        for each in belongings(of.loaded.module)
    }  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_no_trace_changes_the_model(name: str) -> None:
    trees = [tree("llama", held) for _, held in SPLITS[3]]
    before = [state(each) for each in trees]
    with suppress(Exception):
        JOBS[name](Parts(remote("llama", 3).model))
    assert [state(each) for each in trees] == before
    equal(
        CASES["logits"](Parts(remote("llama", 3).model)),
        CASES["logits"](Parts(whole("llama"))),
        0.0,
    )


@pytest.mark.parametrize("name", PROTOCOL)
def test_no_message_changes_the_model(name: str) -> None:
    held = tree("llama", LayerRange(1, 6))
    before = state(held)
    session = TapSession(held, LayerRange(1, 4), TapLimits())

    def exchange(message: bytes) -> bytes:
        answer = session.exchange(message)
        while answer is None:
            answer = session.go_on()
        return answer

    PROTOCOL[name](Attacker(exchange, 2, 64))
    assert state(held) == before
    session.close()
    assert state(held) == before
    gc.collect()
    assert session.meter.held_bytes == 0


# What an edit means


def edited(change: Callable[[torch.Tensor], Any]) -> Callable[[Parts], Any]:
    """A generation in which the weight of a layer is edited as its second token is computed."""

    def job(p: Parts) -> Any:
        op = linear_of(p)
        with p.model.generate(PROMPT, max_new_tokens=4, do_sample=False) as tracer:
            seen = nnsight.save([])
            for step in tracer.iter[:4]:
                args, _ = op.inputs
                if step == 1:
                    change(
                        next(w for w in args if w is not None and w.dim() == 2 and w.shape[0] > 1)
                    )
                seen.append(p.out(2).output)
                seen.append(p.model.lm_head.output)
        return seen

    return job


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.mul_(-3),
        lambda w: w[3:9].zero_(),
        lambda w: w.T.mul_(1.5),
        lambda w: w.detach()[0].fill_(0.5),
    ],
)
def test_an_edit_of_a_weight_lasts_as_long_as_its_trace(
    family: str, change: Callable[[torch.Tensor], Any]
) -> None:
    spread = Parts(remote(family, 3).model)
    equal(edited(change)(spread), edited(change)(own_whole(family)), 0.0)
    equal(CASES["logits"](spread), CASES["logits"](Parts(whole(family))), 0.0)


def test_a_view_of_a_weight_is_edited_as_the_weight_itself() -> None:
    """What one operation makes of a weight is a view of it; who edits that edits the weight."""

    def job(p: Parts) -> Any:
        op = p.out(2).source.torch_addmm_0
        with p.model.trace(PROMPT):
            args, _ = op.inputs
            bias = args[0]
            bias.view(8, 8)[2:4].add_(1)
            seen = p.out(2).output.save()
            out = p.model.output.logits.save()
        return seen, out

    spread = Parts(remote("gpt2", 3).model)
    equal(job(spread), job(own_whole("gpt2")), 0.0)


def test_gradients_of_a_weight_that_a_trace_asks_for() -> None:
    def job(p: Parts) -> Any:
        op = linear_of(p)
        with p.model.trace(PROMPT):
            args, _ = op.inputs
            weight = args[1]
            weight.requires_grad_(True)
            loss = p.model.output.logits.pow(2).sum()
            loss.backward()
            grad = nnsight.save(weight.grad)
        return grad

    spread = Parts(remote("llama", 3).model)
    equal(job(spread), job(own_whole("llama")), 1e-4)
    assert not any(
        each.tensor.requires_grad
        for each in belongings(tree("llama", SPLITS[3][1][1]).loaded.module)
    )
    equal(CASES["logits"](spread), CASES["logits"](Parts(whole("llama"))), 0.0)
