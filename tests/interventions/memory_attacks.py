"""Ways to make a shard hold more than it allows, on the tap protocol itself. None asks for much at
once: each goes on until it is refused often enough, or has sent what would be far too much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mesh.errors import MeshError
from mesh.shard.taps.codec import EncodedKind
from tests.interventions.weight_attacks import Attacker

PATIENCE = 40
"""Refusals after which an attack gives up."""


class Greedy(Attacker):
    """Counts how often it was refused, in whatever way."""

    refusals = 0
    tag = 2_000

    def say(self, header: dict[str, Any], *tensors: torch.Tensor) -> dict[str, Any]:
        try:
            answer = super().say(header, *tensors)
        except MeshError as error:
            answer = {"op": "error", "error": error.to_dict()}
        self.refusals += answer["op"] == "error"
        return answer

    @property
    def is_patient(self) -> bool:
        return self.refusals < PATIENCE

    def call(
        self, *args: Any, tensors: tuple[torch.Tensor, ...] = (), **more: Any
    ) -> dict[str, Any]:
        """One module call; `more` changes the message."""
        header = {
            "op": "call", "path": f"{self.layer}.self_attn.q_proj", "changed": [], "watch": True,
            "grad": False, "attn": "sdpa", "obs": None, "sourced": [], "want": [],
            "value": self.arguments(*args),
        }  # fmt: skip
        return self.say(header | more, *tensors)

    def new(self, tensor: torch.Tensor, joint: int = 0) -> list[Any]:
        """The entry of a tensor that the shard does not have."""
        self.tag += 2
        return self.fresh(self.tag, tensor, joint)

    def rows(self, count: int) -> torch.Tensor:
        return torch.ones(1, count, self.width)

    @staticmethod
    def layer_arguments(cos: Any, sin: Any, cache: int | None = None) -> dict[str, Any]:
        """What a llama hands to its layers beside the hidden states."""
        return {
            "position_embeddings": [int(EncodedKind.TUPLE), [cos, sin]],
            "attention_mask": None,
            "past_key_values": None if cache is None else [int(EncodedKind.CACHE), cache],
        }


def _names(a: Greedy) -> None:
    """Operations to open up, by names that nothing has."""
    for number in range(400):
        if not a.is_patient:
            return
        names = [f"{a.layer}.x{number}.{i:x}{'y' * 60}" for i in range(10_000)]
        a.say({"op": "abort", "sourced": names})


def _one_long_name(a: Greedy) -> None:
    for number in range(200):
        if not a.is_patient:
            return
        a.say({"op": "abort", "sourced": [f"{a.layer}.{number}" + "y" * 3_000_000]})


def _wanted_visits(a: Greedy) -> None:
    """Forwards that stand still, each waiting for more than anybody can count."""
    one = a.rows(1)
    for number in range(16):
        place = f"{a.layer}.self_attn.q_proj.input"
        far = [[f"{a.layer}.y{number}", list(range(100_000))]]
        a.call(a.new(one), tensors=(one,), want=[[place, [0]], *far])


def _empty_tensors(a: Greedy) -> None:
    """Tensors of no elements, which take no bytes on the way."""
    empty = torch.empty(0)
    for _ in range(200):
        if not a.is_patient:
            return
        one = a.rows(1)
        entries = [a.new(empty) for _ in range(5_000)]
        a.call(a.new(one), tensors=(*[empty] * 5_000, one), changed=entries)


def _small_tensors(a: Greedy) -> None:
    """Ordinary values that are never let go of."""
    for _ in range(3_000):
        if not a.is_patient:
            return
        some = a.rows(200)
        a.call(a.new(some), tensors=(some,))


def _graphs(a: Greedy) -> None:
    """Forwards with gradients that stand still, as deep as they may be nested."""
    for _ in range(60):
        if not a.is_patient:
            return
        hidden, angles = a.rows(2_000), torch.ones(1, 2_000, 16)
        first = a.new(hidden, joint=2)
        group = a.arguments(**a.layer_arguments(a.new(angles), a.new(angles)))
        value = [int(EncodedKind.TUPLE), [first, [int(EncodedKind.LIST), [group]]]]
        a.call(
            op="span", start=a.layer, stop=a.layer + 2, calls=[0, 0], between=False, capture=[],
            grad=True, value=value, tensors=(hidden, angles, angles),
            want=[[f"{a.layer + 1}.mlp.down_proj.output", [0]]],
        )  # fmt: skip


def _chains(a: Greedy) -> None:
    """A graph that grows by a few nodes at a time and holds no values, through what is known."""
    one = a.rows(1)
    a.call(a.new(one), tensors=(one,), grad=True)
    tag = a.tag
    for number in range(20_000):
        if not a.is_patient:
            return
        joint = 2 * number + 2
        changed = [a.fresh(tag, one, joint)]
        a.call(a.known(tag), tensors=(one,), changed=changed, grad=True, unreachable=[joint])


def _many_joints(a: Greedy) -> None:
    one = a.rows(1)
    for number in range(20_000):
        if not a.is_patient:
            return
        a.call(a.new(one, 2 * number + 2), tensors=(one,), grad=True, release=True)


def _caches(a: Greedy) -> None:
    """Caches upon caches, never freed."""
    for number in range(2_000):
        if not a.is_patient:
            return
        hidden, angles = a.rows(400), torch.ones(1, 400, 16)
        first = a.new(hidden)
        named = a.layer_arguments(a.new(angles), a.new(angles), cache=number % 64)
        value = a.arguments(first, **named)
        a.call(
            tensors=(hidden, angles, angles), path=f"{a.layer}.self_attn", value=value, release=True
        )


def _broadcast(a: Greedy) -> None:
    """A value of few elements in a shape that meets another one of few, and becomes many."""
    for _ in range(5):
        hidden = a.rows(400)
        answer = a.say(
            {
                "op": "call", "path": f"{a.layer}.mlp", "changed": [], "watch": True, "grad": False,
                "attn": "sdpa", "obs": None, "sourced": [],
                "want": [[f"{a.layer}.mlp.gate_proj.output", [0]]],
                "value": a.arguments(a.new(hidden)),
            },
            hidden,
        )  # fmt: skip
        if answer["op"] != "hit":
            return
        tall = torch.ones(2_000, 1, 1)
        a.resume(a.new(tall), [], tall)


def _patterns(a: Greedy) -> None:
    """Every forward passes another set of places, which is remembered."""
    one = a.rows(1)
    places = [f"{a.layer}.mlp.{part}.output" for part in ("gate_proj", "up_proj", "down_proj")]
    for number in range(4_000):
        if not a.is_patient:
            return
        obs = [place for i, place in enumerate(places) if number >> i & 1]
        a.call(a.new(one), tensors=(one,), path=f"{a.layer}.mlp", obs=obs, release=True)


def _headers(a: Greedy) -> None:
    """A header of nothing but empty lists: an object each."""
    nothing: list[Any] = []
    for _ in range(30):
        if not a.is_patient:
            return
        a.say({"op": "abort", "nothing": [[nothing] * 100_000 for _ in range(30)]})


ATTACKS: dict[str, Callable[[Greedy], None]] = {
    "names": _names,
    "one_long_name": _one_long_name,
    "wanted_visits": _wanted_visits,
    "empty_tensors": _empty_tensors,
    "small_tensors": _small_tensors,
    "graphs": _graphs,
    "chains": _chains,
    "many_joints": _many_joints,
    "caches": _caches,
    "broadcast": _broadcast,
    "patterns": _patterns,
    "headers": _headers,
}
