"""Ways to write to a weight of the served model: as a job's code, and on the tap protocol itself.

Each takes what it can get; whether it was refused or had no effect is for the test to see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import nnsight
import torch
from torch import nn

from mesh.shard.taps.codec import EncodedKind, unpack, write_tensor
from tests.interventions.cases import PROMPT, Parts
from tests.interventions.raw_messages import raw_message

Reach = Callable[[torch.Tensor], None]

REACHES: dict[str, Reach] = {
    "in_place": lambda w: w.mul_(-3),
    "fill": lambda w: w.fill_(0.25),
    "item": lambda w: w.__setitem__((0, 0), 9.0),
    "slice": lambda w: w[1:3].zero_(),
    "transposed": lambda w: w.T.mul_(2),
    "as_strided": lambda w: w.as_strided((4, 4), (1, 4)).zero_(),
    "flat": lambda w: w.view(-1)[:7].fill_(5.0),
    "detached": lambda w: w.detach().mul_(2),
    "data": lambda w: w.data.mul_(2),
    "data_assigned": lambda w: setattr(w, "data", torch.zeros_like(w)),
    "base": lambda w: (w if w._base is None else w._base).mul_(2),
    "storage": lambda w: w.untyped_storage().fill_(1),
    "out": lambda w: torch.zeros(w.shape, out=w),
    "copied_to": lambda w: w.copy_(torch.ones_like(w)),
    "bytes": lambda w: w.view(torch.uint8).zero_(),
    "set": lambda w: w.set_(torch.zeros_like(w)),
    "resized": lambda w: w.resize_(1, 1),
    "retyped": lambda w: setattr(w, "data", w.data.double()),
    "requires_grad": lambda w: w.requires_grad_(True),
    "foreach": lambda w: torch._foreach_mul_([torch.ones(2), w], 2.0),
    "foreach_copy": lambda w: torch._foreach_copy_([w], [torch.ones_like(w)]),
    "indexed": lambda w: w.index_put_((torch.tensor([1]),), torch.zeros(w.shape[1])),
    "masked": lambda w: w.masked_fill_(w > 0, 0.0),
    "into_a_part": lambda w: torch.add(w[:1], 1, out=w[:1]),
    "unbound": lambda w: w.unbind(0)[2].neg_(),
    "initialised": lambda w: torch.nn.init.constant_(w, 1.0),
    "stepped": lambda w: w.addcmul_(torch.ones_like(w), torch.ones_like(w)),
    "grad_assigned": lambda w: setattr(w, "grad", torch.ones_like(w)),
    "detached_in_place": lambda w: w.detach_(),
    "set_data": lambda w: w.data.set_(torch.zeros_like(w)),
    "resized_to_more": lambda w: w.data.resize_(w.shape[0] * 2, w.shape[1]),
    "device": lambda w: setattr(w, "data", w.data.to("meta")),
    "transposed_in_place": lambda w: w.t_(),
    "squeezed_in_place": lambda w: w.unsqueeze_(0),
    "swapped": lambda w: torch.utils.swap_tensors(w, torch.zeros_like(w)),
}  # fmt: skip
"""What code does with a tensor of the model's that it has in its hands."""


def weights_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an operation's inputs, but the first, which is the activation."""
    args, kwargs = value
    yield from (item for item in (*args[1:], *kwargs.values()) if isinstance(item, torch.Tensor))


def linear_of(p: Parts) -> Any:
    """The operation in which a layer multiplies with its weight."""
    out = p.out(2)
    name = "F_linear_0" if isinstance(out._module, nn.Linear) else "torch_addmm_0"
    return getattr(out.source, name)


def reaching(reach: Reach) -> Callable[[Parts], None]:
    """A trace that does `reach` to the weights of one layer."""

    def job(p: Parts) -> None:
        op = linear_of(p)
        with p.model.trace(PROMPT):
            args, _ = op.inputs
            for weight in args:
                if isinstance(weight, torch.Tensor) and weight.dim() == 2:
                    reach(weight)
            p.model.output.logits.save()

    return job


def _written_by_the_model(place: Callable[[Parts], Any]) -> Callable[[Parts], None]:
    """A weight is put where the model's own code writes to what it finds."""

    def job(p: Parts) -> None:
        op, other = linear_of(p), place(p)
        with p.model.trace(PROMPT):
            args, _ = op.inputs
            weight = next(w for w in args if isinstance(w, torch.Tensor) and w.dim() == 2)
            changed, kwargs = other.inputs
            other.inputs = ((weight, *changed[1:]), {**kwargs, "inplace": True})
            p.model.output.logits.save()

    return job


def _as_the_result_of(p: Parts) -> None:
    """A weight is named as the place for a result."""
    op = linear_of(p)
    with p.model.trace(PROMPT):
        args, kwargs = op.inputs
        weight = next(w for w in args if isinstance(w, torch.Tensor) and w.dim() == 2)
        op.inputs = (args, {**kwargs, "out": weight})
        p.model.output.logits.save()


def _norm(p: Parts) -> None:
    """The weight of a norm, shown as an output or an input of one of its operations."""
    with p.model.trace(PROMPT):
        for op in p.first_norm(3).source:
            value = op.inputs
            for item in (*value[0], *value[1].values()):
                if isinstance(item, torch.Tensor) and item.dim() == 1:
                    item.zero_()
        p.model.output.logits.save()


def _attributes(p: Parts) -> None:
    """What else a layer has: numbers, buffers, its configuration."""
    attention, norm = p.layers[2].self_attn, p.layers[2].input_layernorm
    with p.model.trace(PROMPT):
        attention._module.scaling = 3.0
        norm._module.variance_epsilon = 1e3
        norm._module.register_buffer("weight_too", torch.zeros(3))
        p.model._module.config.rms_norm_eps = 1e3
        norm._module.weight = torch.nn.Parameter(torch.zeros(64))
        p.model.output.logits.save()


def _rotary(p: Parts) -> None:
    """The frequencies' cosines and sines, which all layers are given."""
    with p.model.trace(PROMPT):
        _, kwargs = p.layers[2].self_attn.inputs
        for table in kwargs["position_embeddings"]:
            table.zero_()
        p.model.output.logits.save()


def _kept_for_the_next_trace(p: Parts) -> None:
    op = linear_of(p)
    with p.model.session():
        with p.model.trace(PROMPT):
            args, _ = op.inputs
            weight = nnsight.save(args[1])
        weight.zero_()
        with p.model.trace(PROMPT):
            args, kwargs = op.inputs
            op.inputs = ((args[0], weight, *args[2:]), kwargs)
            p.model.output.logits.save()


JOBS: dict[str, Callable[[Parts], None]] = {
    **{f"linear/{name}": reaching(reach) for name, reach in REACHES.items()},
    "silu_in_place": _written_by_the_model(
        lambda p: p.layers[2].mlp.act_fn.source.nn_functional_silu_0
    ),
    "out_of_linear": _as_the_result_of,
    "norm": _norm,
    "attributes": _attributes,
    "rotary": _rotary,
    "kept": _kept_for_the_next_trace,
}
"""Traces of a llama that want to change it."""


# On the protocol

Exchange = Callable[[bytes], bytes]
"""A whole message to the shard, and its whole answer."""

LOCATION = "{layer}.self_attn.q_proj.source.F_linear_0.input"


class Attacker:
    """Speaks the tap protocol by itself."""

    def __init__(
        self, exchange: Exchange, layer: int, width: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self._exchange = exchange
        self.layer, self.width, self.dtype = layer, width, dtype
        self.path = f"{layer}.self_attn.q_proj"
        self.said: list[str] = []
        """What it was refused with."""

    def say(self, header: dict[str, Any], *tensors: torch.Tensor) -> dict[str, Any]:
        """One message; `tensors` are those that the header describes, in its order."""
        buffers: list[memoryview] = []
        for tensor in tensors:
            write_tensor(tensor, buffers)
        answer, _ = unpack(self._exchange(raw_message(header, buffers)))
        if answer["op"] == "error":
            self.said.append(answer["error"]["message"])
        return answer

    def hidden(self) -> torch.Tensor:
        """What a layer computes with."""
        return torch.ones(1, 2, self.width, dtype=self.dtype)

    def shown_weight(self, *, grad: bool = False) -> int:
        """Have the weight of a linear layer shown; its tag. The forward stands still."""
        hidden = self.hidden()
        answer = self.say(
            {
                "op": "call", "path": self.path, "changed": [], "watch": True, "grad": grad,
                "attn": "sdpa", "obs": None, "sourced": [],
                "want": [[f"{self.path}.source.F_linear_0.input", [0]]],
                "value": self.arguments(self.fresh(1000, hidden)),
            },
            hidden,
        )  # fmt: skip
        assert answer["op"] == "hit", answer
        args = answer["value"][1][0][1]
        return int(args[1][1])

    @staticmethod
    def arguments(*args: Any, **kwargs: Any) -> list[Any]:
        """Positional and named arguments of a call."""
        pairs = [[name, value] for name, value in kwargs.items()]
        return [
            int(EncodedKind.TUPLE),
            [[int(EncodedKind.TUPLE), list(args)], [int(EncodedKind.DICT), pairs]],
        ]

    @staticmethod
    def fresh(tag: int, tensor: torch.Tensor, joint: int = 0) -> list[Any]:
        """The entry of a tensor whose bytes come along."""
        description = write_tensor(tensor, [])
        return [int(EncodedKind.TENSOR), tag, joint, description]

    @staticmethod
    def known(tag: int, joint: int = 0) -> list[Any]:
        """The entry of a tensor that the shard has."""
        return [int(EncodedKind.TENSOR), tag, joint, None]

    def resume(self, value: Any, changed: list[Any], *tensors: torch.Tensor) -> dict[str, Any]:
        """Go on with `value`, after `changed`."""
        header = {"op": "resume", "changed": changed, "want": [], "obs": None, "sourced": []}
        return self.say({**header, "value": value}, *tensors)


def _overwrite(a: Attacker) -> None:
    weight = a.shown_weight()
    zeros = torch.zeros(a.width, a.width)
    a.resume(a.arguments(a.known(1000), a.known(weight), None), [a.fresh(weight, zeros)], zeros)


def _overwrite_as_another_dtype(a: Attacker) -> None:
    weight = a.shown_weight()
    zeros = torch.zeros(a.width, a.width, dtype=torch.float64)
    a.resume(a.arguments(a.known(1000), a.known(weight), None), [a.fresh(weight, zeros)], zeros)


def _overwrite_in_another_shape(a: Attacker) -> None:
    weight = a.shown_weight()
    zeros = torch.zeros(1)
    a.resume(a.arguments(a.known(1000), a.known(weight), None), [a.fresh(weight, zeros)], zeros)


def _overwrite_with_a_gradient(a: Attacker) -> None:
    weight = a.shown_weight(grad=True)
    zeros = torch.zeros(a.width, a.width)
    a.resume(a.arguments(a.known(1000), a.known(weight), None), [a.fresh(weight, zeros, 2)], zeros)


def _give_a_gradient(a: Attacker) -> None:
    weight = a.shown_weight(grad=True)
    a.resume(a.arguments(a.known(1000), a.known(weight, 2), None), [])


def _give_a_gradient_as_changed(a: Attacker) -> None:
    weight = a.shown_weight(grad=True)
    a.resume(a.arguments(a.known(1000), a.known(weight), None), [a.known(weight, 2)])


def _as_the_result(a: Attacker) -> None:
    weight = a.shown_weight()
    a.resume(a.arguments(a.known(1000), a.known(weight), None, out=a.known(weight)), [])


def _as_the_input_of_another_module(a: Attacker) -> None:
    """An activation that works in place, called on the weight while the forward stands still."""
    weight = a.shown_weight()
    a.say(
        {
            "op": "call", "path": f"{a.layer}.mlp.act_fn", "changed": [], "watch": True,
            "grad": False, "attn": "sdpa", "obs": None, "sourced": [],
            "want": [[f"{a.layer}.mlp.act_fn.source.nn_functional_silu_0.input", [0]]],
            "value": a.arguments(a.known(weight)),
        }
    )  # fmt: skip
    a.resume(a.arguments(a.known(weight), inplace=True), [])
    a.say({"op": "abort"})


def _in_a_later_trace(a: Attacker) -> None:
    weight = a.shown_weight()
    a.resume(a.arguments(a.known(1000), a.known(weight), None), [])
    zeros = torch.zeros(a.width, a.width)
    a.say(
        {
            "op": "call", "path": a.path, "changed": [a.fresh(weight, zeros)], "watch": False,
            "grad": False, "attn": "sdpa", "obs": None, "sourced": [], "want": [],
            "value": a.arguments(a.known(1000)),
        },
        zeros,
    )  # fmt: skip


def _observed(a: Attacker) -> None:
    """A weight that was only looked at on its way."""
    place, hidden = f"{a.path}.source.F_linear_0.input", a.hidden()
    call = {
        "op": "call", "path": a.path, "changed": [], "watch": True, "grad": False, "attn": "sdpa",
        "sourced": [], "want": [], "value": a.arguments(a.fresh(1000, hidden)),
    }  # fmt: skip
    answer = a.say({**call, "obs": [place], "obs_grad": True}, hidden)
    weight = answer["observed"][0][1][1][0][1][1][1]
    zeros = torch.zeros(a.width, a.width)
    changed = [a.fresh(weight, zeros)]
    value = a.arguments(a.known(1000))
    a.say({**call, "obs": [], "changed": changed, "value": value}, zeros)


PROTOCOL: dict[str, Callable[[Attacker], None]] = {
    "overwrite": _overwrite,
    "overwrite_as_another_dtype": _overwrite_as_another_dtype,
    "overwrite_in_another_shape": _overwrite_in_another_shape,
    "overwrite_with_a_gradient": _overwrite_with_a_gradient,
    "give_a_gradient": _give_a_gradient,
    "give_a_gradient_as_changed": _give_a_gradient_as_changed,
    "as_the_result": _as_the_result,
    "as_the_input_of_another_module": _as_the_input_of_another_module,
    "in_a_later_trace": _in_a_later_trace,
    "observed": _observed,
}
"""What a process says that has broken out of the fence, or never was in one."""
