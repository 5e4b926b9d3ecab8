"""The tensors that belong to a module: its parameters, its buffers, and those it has as attributes.

Plain attributes count like the others: rotary frequencies and packed weights are kept as such.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

TABLES = ("_parameters", "_buffers")
"""Where a module has its weights."""
_DEPTH = 4


@dataclass(frozen=True, slots=True, eq=False)
class Belonging:
    """`tensor`, called `name` in the whole module; ``table[key]`` where it can be exchanged."""

    name: str
    tensor: torch.Tensor
    table: dict[str, Any] | None
    key: str


def belongings(module: nn.Module) -> Iterator[Belonging]:
    """Each place of each tensor; one that is shared comes once for every place."""
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        own = vars(part)
        for kind in TABLES:
            table: dict[str, Any] = own[kind]
            for key, tensor in dict.items(table):
                if tensor is not None:
                    yield Belonging(prefix + key, tensor, table, key)
        for key, value in own.items():
            if key in TABLES or key == "_modules":
                continue
            if isinstance(value, torch.Tensor):
                yield Belonging(prefix + key, value, own, key)
            else:
                for tensor in _inside(value, _DEPTH):
                    yield Belonging(prefix + key, tensor, None, key)


def _inside(value: object, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict) and depth:
        for item in value.values():
            yield from _inside(item, depth - 1)
    elif isinstance(value, list | tuple | set | frozenset) and depth:
        for item in value:
            yield from _inside(item, depth - 1)
