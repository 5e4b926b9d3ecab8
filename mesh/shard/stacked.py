"""Weights of linear layers that read the same rows, behind each other in one piece of memory.

The layers keep theirs, as views of it: whoever goes through them notices nothing, and who computes
all of them at once multiplies by the whole. For devices on which a product of its own costs more
than what it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mesh.shard.compiled.parts import NotCompilable


def stack(linears: Sequence[nn.Module]) -> bool:
    """Move their weights together; False, with nothing changed, for what are no plain layers."""
    if len({(type(each), each.weight.dtype, each.bias is None) for each in linears}) > 1:
        return False
    if type(linears[0]) is not nn.Linear:
        return False
    for name in ("weight", "bias"):
        parts: list[Any] = [getattr(each, name) for each in linears]
        if parts[0] is None:
            continue
        whole = torch.cat([part.detach() for part in parts])
        views = torch.split(whole, [len(part) for part in parts])
        for linear, view in zip(linears, views, strict=True):
            setattr(linear, name, nn.Parameter(view, requires_grad=False))
    return True


def whole_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """What they are views of, one behind the other. Raises NotCompilable where they are not."""
    first, at = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != at or part.shape[1:] != first.shape[1:] or not part.is_contiguous():
            raise NotCompilable("its products do not lie behind each other")
        at += part.nbytes
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    whole: torch.Tensor = first.detach().as_strided(shape, first.stride(), first.storage_offset())
    return whole
