"""What a job leaves behind although its author may count on it, of what came with the request:
gradients of tensors, and values saved into containers. nnsight brings back nothing but names."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Filled:
    """What a job did to the lists, dicts and objects that came with its request."""

    back: dict[str, Any]
    """What has something saved in it, and so is what it would be on one machine."""
    left: list[str]
    """What has as well, and cannot be given back."""
    unsaved: list[str]
    """What is changed, by nothing that was saved."""


class CameContainers:
    """The lists, dicts and the like that came with a request."""

    def __init__(self, local: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        """Values by their names: those of the client's frame, and those that are elsewhere."""
        came = [
            *((name, value, True) for name, value in local.items() if _is_container(value)),
            *((name, value, False) for name, value in others.items() if _is_container(value)),
            *(held for names in (local, others) for held in _held(names)),
        ]
        self._came = [(*each, list(map(id, tree_leaves(each[1])))) for each in came]

    def filled(self, now: Mapping[str, Any], saves: Set[int]) -> Filled:
        """Behind the job; `now` has the client's frame, `saves` says by identity what was saved."""
        found = Filled({}, [], [])
        for name, value, is_local, had in self._came:
            leaves = tree_leaves(value)
            if {id(leaf) for leaf in leaves}.difference(had).isdisjoint(saves):
                if _is_container(now.get(name)) and list(map(id, leaves)) != had:
                    found.unsaved.append(name)
            elif is_local and now.get(name) is value and _is_plain(leaves):
                found.back[name] = value
            else:
                found.left.append(name)
        return found


def _is_plain(leaves: list[Any]) -> bool:
    return all(isinstance(leaf, _PLAIN) for leaf in leaves)


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
