"""Where in an autograd graph a tensor is, and what leads where. Knows no joint and no session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Place = tuple[Node, int]
"""A node of a graph and which of its outputs."""


def place_of(tensor: torch.Tensor | GradientEdge) -> Place:
    """Where a tensor is that has a gradient."""
    edge = tensor if isinstance(tensor, GradientEdge) else get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def next_stops(place: Place, stops: Mapping[Place, Sequence[int]]) -> list[int]:
    """The `stops` that the graph leads back to from a place, itself included, and not only through
    another stop; in order. Of several at one place, which lead to each other, the last."""
    found: set[int] = set()
    seen: set[Node] = set()
    places: list[tuple[Node | None, int]] = [place]
    while places:
        node, output = places.pop()
        here = None if node is None else stops.get((node, output))
        if here is not None:
            found.add(here[-1])
        elif node is not None and node not in seen:
            seen.add(node)
            places.extend(node.next_functions)
    return sorted(found)


def leads_from_any(nodes: Iterable[Node], place: Place) -> bool:
    """Whether the graph leads back to a place from one of these nodes."""
    goal, output = place
    born = _born(goal)
    younger = [node for node in nodes if _born(node) > born]
    seen: set[Node] = set()
    while younger:
        for source, number in younger.pop().next_functions:
            if source is None or source in seen:
                continue
            if source == goal and number == output:
                return True
            if _born(source) >= born:
                seen.add(source)
                younger.append(source)
    return False


def in_order_of_making(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those with a history, so that none comes after what was computed from it."""
    made = [tensor for tensor in tensors if tensor.grad_fn is not None]
    return sorted(made, key=lambda tensor: _born(get_gradient_edge(tensor).node))


def _born(node: Node) -> int:
    # The engine numbers nodes as they are made; leaves get the largest number there is.
    number: int = node._sequence_nr()
    return number if number < 1 << 63 else -1
