"""A small model to trace, in a file of its own: `.source` reads it beside the trace's."""

from __future__ import annotations

import linecache
from typing import Any

import nnsight
import torch


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, 2 * width)
        self.act = torch.nn.ReLU()
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.act(self.up(hidden)))


class Toy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(8) for _ in range(3)])
        self.head = torch.nn.Linear(8, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def _stack_invokes(envoy: Any, invokes: list[Any], fn: Any) -> tuple[Any, Any]:
    return (torch.cat([args[0] for args, _ in invokes]),), {}


def toy() -> Toy:
    """The same module with the same weights, wherever it is made."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return Toy().eval().requires_grad_(False)


def model() -> nnsight.NNsight:
    """The same model, wherever it is made."""
    # A plain module does not know how to batch; a class of ours would not load elsewhere.
    nnsight.NNsight._batch = _stack_invokes
    linecache.getlines(__file__)  # `.source` reads it, in a process that cannot open it
    return nnsight.NNsight(toy())
