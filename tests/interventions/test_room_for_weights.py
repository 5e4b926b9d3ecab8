"""A job reads more weights than it has room for: those that nothing else has are let go of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nnsight
import pytest
import torch

from tests.interventions.cases import CASES, PROMPT, Parts
from tests.interventions.test_limits import own_whole
from tests.interventions.worlds import Remote, equal, module_of, remote


def no_room() -> Remote:
    return remote("llama", 3, kept_bytes=0)


def norms(p: Parts) -> list[float]:
    """Of all weights, which reads each of them."""
    with torch.no_grad():
        return [float(weight.norm()) for weight in module_of(p.model).parameters()]


def test_all_weights_can_be_read_again_and_again_and_the_layers_stay_where_they_are() -> None:
    def job(p: Parts) -> Any:
        with p.model.session():
            seen = nnsight.save([norms(p), norms(p)])
            seen.append(p.out(1).weight is p.out(1).weight)
            with p.model.trace(PROMPT):
                out = p.model.output.logits.save()
        return seen, out

    world = no_room()
    equal(job(Parts(world.model)), job(own_whole("llama")), 0.0)
    assert world.log == []


def test_what_is_let_go_of_is_fetched_anew_and_what_there_is_room_for_is_not() -> None:
    roomy, tight = remote("llama", 3), no_room()
    first, again, traced = [], [], []
    for world in (roomy, tight):
        norms(Parts(world.model))
        first.append(world.channel.messages)
        norms(Parts(world.model))
        again.append(world.channel.messages - first[-1])
        CASES["logits"](Parts(world.model))
        traced.append(world.channel.messages - again[-1] - first[-1])
    assert first[0] == first[1]
    assert again == [0, first[1]]
    assert traced[0] == traced[1]


def test_weights_that_there_is_no_room_for_together_meet_in_one_operation() -> None:
    def job(p: Parts) -> Any:
        one, other = (p.out(layer).weight for layer in (2, 3))
        aliases = [weight.detach() for weight in (one, other)]
        met = one @ other, torch.maximum(other, one), torch.stack([*aliases, one])
        return *met, torch.nn.functional.linear(*aliases)

    equal(job(Parts(no_room().model)), job(own_whole("llama")), 1e-6)


def _view(w: Any) -> Callable[[], Any]:
    transposed = w.T
    return lambda: transposed.mul(2)


def _array(w: Any) -> Callable[[], Any]:
    array = w.numpy()
    return lambda: torch.from_numpy(array) * 2


def _graph(w: Any) -> Callable[[], Any]:
    given = torch.linspace(0, 1, w.shape[1]).requires_grad_()
    loss = (w @ given).pow(2).sum()

    def grad() -> Any:
        loss.backward()
        return given.grad

    return grad


def _edited_graph(w: Any) -> Callable[[], Any]:
    backward = _graph(w)

    def is_refused() -> Any:
        w.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward()
        return w * 1

    return is_refused


def _alias(w: Any) -> Callable[[], Any]:
    float(w.norm())
    alias = w.detach()
    return lambda: alias.mul_(2) + w


def _mark(w: Any) -> Callable[[], Any]:
    w.mark = 7
    return lambda: torch.tensor(w.mark)


def _edit(w: Any) -> Callable[[], Any]:
    w.mul_(3)
    return lambda: w * 1


def _edit_later(w: Any) -> Callable[[], Any]:
    row = w[0]
    return lambda: row.mul_(2) + w[0]


def _gradient(w: Any) -> Callable[[], Any]:
    w.requires_grad_(True)

    def grad() -> Any:
        w.pow(2).sum().backward()
        w.requires_grad_(False)
        return w.grad

    return grad


@pytest.mark.parametrize(
    "use",
    [_view, _array, _alias, _graph, _edited_graph, _mark, _edit, _edit_later, _gradient],
    ids=lambda use: use.__name__,
)
def test_what_somebody_still_has_is_kept(use: Callable[[Any], Callable[[], Any]]) -> None:
    def job(p: Parts) -> Any:
        later = use(p.out(2).weight)
        norms(p)
        return later(), p.out(2).weight.norm()

    with torch.enable_grad():
        equal(job(Parts(no_room().model)), job(own_whole("llama")), 1e-6)


def test_a_layer_that_was_changed_runs_in_the_job_with_its_own_weights() -> None:
    def job(p: Parts) -> Any:
        with p.model.session():
            p.out(2).weight.mul_(0.5)
            with p.model.trace(PROMPT):
                out = p.model.output.logits.save()
            seen = nnsight.save(norms(p))
            with p.model.trace(PROMPT):
                again = p.model.output.logits.save()
        return out, seen, again

    world = no_room()
    equal(job(Parts(world.model)), job(own_whole("llama")), 1e-5)
    assert len(world.log) == 1


def test_an_ordinary_job_is_the_same() -> None:
    equal(CASES["logits"](Parts(no_room().model)), CASES["logits"](own_whole("llama")), 0.0)
