"""Mixtures of experts without their blocks: the model's own router, and experts that are packed.

A row has the same bits in any company, as everything that a row goes through by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mesh.shard.compiled.experts import Experts, Router
from mesh.shard.lean_parts import Product, lean_feed_forward, lean_product, of_each

_ALONE = 32
"""Rows of the largest batch of steps; more are a prompt."""


def lean_mixture(part: Experts) -> Product:
    """What it makes of (rows, hidden)."""
    experts, chosen = part.up.owner, _chosen_by(part.router)
    shared = None if part.shared is None else lean_feed_forward(part.shared)
    gate = None if part.shared_gate is None else lean_product((part.shared_gate,))

    def mixed(x: torch.Tensor) -> torch.Tensor:
        weights, index = chosen(x)
        y: torch.Tensor = experts(x, index, weights)
        if shared is None:
            return y
        others = shared(x)
        if gate is not None:
            others = others * of_each(gate(x), torch.sigmoid)
        return y + others

    return mixed


def _chosen_by(router: Router) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """What tells of (rows, hidden) how much each of which experts counts, (rows, chosen) both. A
    router's product of several rows may have other bits than that of one."""
    module: Any = router.module
    block: Any = router.block

    def chosen(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # LFM 2 has the bias beside its router, if it has one.
        takes_bias = hasattr(block, "use_expert_bias")
        beside = (getattr(block, "expert_bias", None),) if takes_bias else ()
        each = torch.split(x, 1) if len(x) <= _ALONE else [x]
        _, weights, index = zip(*(module(rows, *beside) for rows in each), strict=True)
        return torch.cat(weights), torch.cat(index)

    return chosen
