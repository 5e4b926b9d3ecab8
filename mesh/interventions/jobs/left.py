"""What a job leaves behind although its author may count on it, of what came with the request:
gradients of tensors, and values saved into containers. nnsight brings back nothing but names."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Set
from types import ModuleType
from typing import Any

import numpy as np
import torch
from nnsight.intervention.envoy import Envoy
from torch import nn
from torch.utils._pytree import tree_leaves

_PLAIN = (torch.Tensor, np.ndarray, np.generic, int, float, complex, str, bytes, type(None))
"""What is sent back whatever else there is."""


class LeftGradients:
    """The tensors that came with a request and may get gradients, which the client's never see."""

    def __init__(self, came: Mapping[str, Any]) -> None:
        """`came` are the request's values by the names that its author gave them."""
        self._trained = [
            (name, tensor, tensor._version)
            for name, value in came.items()
            for leaf in tree_leaves(value)
            for tensor in _trainable(leaf)
        ]

    def names(self, saved: Mapping[str, Any]) -> list[str]:
        """Of those whose gradient is not `saved`, and that nothing here was done by."""
        taken = {id(value) for value in tree_leaves(dict(saved))} if self._trained else set()
        left = {
            name
            for name, tensor, version in self._trained
            if tensor.grad is not None
            and id(tensor.grad) not in taken
            and tensor._version == version  # an optimiser writes to it
        }
        return sorted(left)


class FilledContainers:
    """The lists, dicts and the like that came with a request, and what was saved into them."""

    def __init__(self, local: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        """Values by their names: those of the client's frame, and those that are elsewhere."""
        self._came = [
            *((name, value, True) for name, value in local.items() if _is_container(value)),
            *((name, value, False) for name, value in others.items() if _is_container(value)),
            *(held for names in (local, others) for held in _held(names)),
        ]
        self._had = {id(leaf) for _, value, _ in self._came for leaf in tree_leaves(value)}

    def filled(self, now: Mapping[str, Any], saves: Set[int]) -> tuple[dict[str, Any], list[str]]:
        """Those of the client's frame that hold something new of `saves` (by identity) and still
        have their names in `now`: so they are what they would be on one machine; and the names of
        the others, whose client's own stay as they were."""
        back: dict[str, Any] = {}
        left: set[str] = set()
        for name, value, is_local in self._came:
            leaves = tree_leaves(value)
            if not any(id(leaf) in saves and id(leaf) not in self._had for leaf in leaves):
                continue
            if is_local and now.get(name) is value and all(isinstance(x, _PLAIN) for x in leaves):
                back[name] = value
            else:
                left.add(name)
        return back, sorted(left)


def _is_container(value: Any) -> bool:
    return isinstance(value, list | tuple | dict | deque)


def _held(names: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """What objects hold in their attributes."""
    for name, value in names.items():
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict) and not isinstance(value, nn.Module | ModuleType | Envoy):
            yield name, held, False


def _trainable(value: Any) -> Iterator[torch.Tensor]:
    tensors: tuple[Any, ...] = ()
    if isinstance(value, nn.Module):
        tensors = tuple(value.parameters())
    elif isinstance(value, torch.Tensor):
        tensors = (value,)
    yield from (tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad)
