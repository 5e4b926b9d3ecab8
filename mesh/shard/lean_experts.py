"""Mixtures of experts without their blocks: the model's own router, and experts that are packed.

A row has the same bits in any company, as everything that a row goes through by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import nn

from mesh.shard.compiled.parts import Experts, ExpertsBeside
from mesh.shard.lean_parts import LeanNorm, Product, lean_feed_forward, lean_product, of_each

_ALONE = 32
"""Rows of the largest batch of steps; more are a prompt."""


def lean_mixture(part: Experts) -> Product:
    """What it makes of (rows, hidden)."""
    experts, chosen = part.up.owner, _chosen_by(part.router.module, part.router.block)
    shared = None if part.shared is None else lean_feed_forward(part.shared)
    gate, narrowed, widened = (
        None if each is None else lean_product((each,))
        for each in (part.shared_gate, part.narrowing, part.widening)
    )

    def mixed(x: torch.Tensor) -> torch.Tensor:
        weights, index = chosen(x)
        y: torch.Tensor = experts(x if narrowed is None else narrowed(x), index, weights)
        y = y if widened is None else widened(y)
        y = y if part.scale == 1.0 else y * part.scale
        if shared is None:
            return y
        others = shared(x)
        if gate is not None:
            others = others * of_each(gate(x), torch.sigmoid)
        return (y + others) / 2 if part.averaged else y + others

    return mixed


class LeanExpertsBeside(nn.Module):
    """See `ExpertsBeside`."""

    def __init__(self, part: ExpertsBeside) -> None:
        super().__init__()
        self._experts = (part.up.owner,)  # no child: its weights are not this one's
        self._chosen = _chosen_by(part.router, None)
        self.before, self.after = LeanNorm(part.before), LeanNorm(part.after)
        self.after_feed_forward = LeanNorm(part.after_feed_forward)

    def run(self, x: torch.Tensor, fed: torch.Tensor) -> torch.Tensor:
        """(rows, hidden), and what feed-forward gave of them: as that."""
        weights, index = self._chosen(x)
        y = self._experts[0](self.before.run(x), index, weights)
        return self.after_feed_forward.run(fed) + self.after.run(y)


def _chosen_by(
    router: Any, block: Any
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """What tells of (rows, hidden) how much each of which experts counts, (rows, chosen) both. A
    router's product of several rows may have other bits than that of one."""
    # Some blocks hand their router a tensor of theirs, and all call it as the router does.
    _, *others = signature(router.forward).parameters
    # Arcee's, which is a linear layer in a module, takes (texts, rows, hidden).
    is_of_texts = "expert_bias" in others and hasattr(router, "gate")

    def chosen(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        beside = {name: getattr(block, name, None) for name in others}
        each = torch.split(x, 1) if len(x) <= _ALONE else [x]
        each = [rows[None] for rows in each] if is_of_texts else each
        _, weights, index = zip(*(router(rows, **beside) for rows in each), strict=True)
        return torch.cat(weights), torch.cat(index)

    return chosen
