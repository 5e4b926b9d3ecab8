"""What a job leaves behind although its author may count on it: gradients of what came with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


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


def _trainable(value: Any) -> Iterator[torch.Tensor]:
    tensors: tuple[Any, ...] = ()
    if isinstance(value, torch.nn.Module):
        tensors = tuple(value.parameters())
    elif isinstance(value, torch.Tensor):
        tensors = (value,)
    yield from (tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad)
