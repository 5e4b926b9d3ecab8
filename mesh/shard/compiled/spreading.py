"""Heads of which fewer numbers turn than attention's operator takes, which takes them by sixteen.

All of a head's numbers turn then, those that should not by nothing. Numbers turn with those half of
what turns further on: queries and keys are put into an `order` in which that holds for whole heads.
Both being in it, their products are the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mesh.shard.compiled.builder import GraphBuilder
from mesh.shard.compiled.parts import Attention, NotCompilable

_BY = 16


def needs_spreading(attention: Attention, turned: int) -> bool:
    """Whether the operator takes no heads of which `turned` numbers turn. Raises NotCompilable
    where it takes none of that width."""
    if turned and attention.width % _BY:
        raise NotCompilable(f"its heads are {attention.width} wide, which is no multiple of {_BY}")
    return turned % _BY > 0


def order(turned: int, width: int) -> list[int]:
    """Of a head that is `width` wide, where each number was."""
    half, rest = turned // 2, list(range(turned, width))
    middle = width // 2 - half
    return [*range(half), *rest[:middle], *range(half, turned), *rest[middle:]]


def spread_tables(tables: Mapping[str, torch.Tensor], width: int) -> dict[str, torch.Tensor]:
    """Those of a head that turns in whole; other tables as they are."""
    found = dict(tables)
    for name, value in (("cos", 1.0), ("sin", 0.0)):
        missing = width // 2 - tables[name].shape[1]
        found[name] = torch.nn.functional.pad(tables[name], (0, missing), value=value).contiguous()
    return found


def spread(graph: GraphBuilder, attention: Attention, projected: str, turned: int) -> str:
    """Queries and keys of what is `projected` in that order."""
    if attention.turns_pairs:  # neighbours turn with neighbours in whole heads as well
        return projected
    heads, width = attention.heads + attention.kv_heads, attention.width
    both, values = graph.split(projected, [heads * width, attention.kv_heads * width])
    each = graph.op("Reshape", [both, graph.numbers(0, 0, heads, width)])
    ordered = graph.op("Gather", [each, graph.numbers(*order(turned, width))], axis=-1)
    together = graph.op("Reshape", [ordered, graph.numbers(0, 0, heads * width)])
    return graph.op("Concat", [together, values], axis=-1)
