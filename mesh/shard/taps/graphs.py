"""How much memory autograd graphs keep, counted: every saved tensor's storage once."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import Node


@cache
def _saved_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_"))


def kept_bytes(roots: Iterable[Node], shared: Collection[int]) -> int:
    """Bytes that the graphs behind `roots` keep alive; storages at the addresses `shared` do not
    count."""
    seen: set[Node] = set()
    storages: dict[int, int] = {}
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [source for source, _ in node.next_functions if source is not None]
        for name in _saved_names(type(node)):
            for tensor in _tensors(node, name):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(size for address, size in storages.items() if address not in shared)


def _tensors(node: Node, name: str) -> list[torch.Tensor]:
    try:
        saved = getattr(node, name)
    except RuntimeError:  # freed by a backward, or overwritten: either way it keeps nothing
        return []
    found = saved if isinstance(saved, list | tuple) else (saved,)
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]
