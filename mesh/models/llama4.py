"""Llama 4's experts, of each row those that it goes to.

transformers gives every row to every expert, multiplied by zero where it does not go, so that a
token reads the weights of all. What is zero gives zero: here such rows are left out. What goes in
and comes out is the same.
"""

from __future__ import annotations

from typing import Any

import torch


def only_those_met(base: Any) -> None:
    """Have the layers of `base` compute so."""
    for part in [each for each in base.modules() if type(each).__name__ == "Llama4TextExperts"]:
        if isinstance(part, _OnlyThoseMet):
            continue
        kind = type(part)
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        part.__class__ = type(kind.__name__, (_OnlyThoseMet, kind), names)
        # As transformers says it of experts that others may compute.
        part.is_transposed = part.is_concatenated = part.has_gate = True
        part.config = base.config


class _OnlyThoseMet:
    """The forward of the experts of a layer."""

    num_experts: int
    hidden_size: int
    act_fn: Any

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(experts * rows, hidden), all rows for the first expert, then for the next: the same."""
        given = hidden_states.view(self.num_experts, -1, self.hidden_size)
        met, found = given.any(-1), torch.zeros_like(given)
        for expert in met.any(-1).nonzero().flatten().tolist():
            rows = met[expert]
            gate, up = self._product("gate_up_proj", expert, given[expert, rows]).chunk(2, -1)
            found[expert, rows] = self._product("down_proj", expert, up * self.act_fn(gate))
        return found.view(-1, self.hidden_size)

    def _product(self, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        matrices: Any = getattr(self, name)
        product: torch.Tensor = (
            matrices.product(expert, x)
            if hasattr(matrices, "product")
            else x @ matrices[expert].to(x.dtype)
        )
        return product
