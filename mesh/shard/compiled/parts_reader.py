"""The modules of one decoder layer by their names, none passed over unseen; and what norms are.

`NotCompilable` says what is not known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import nn

_OWN_EPSILON = 1e-5
"""Of OLMo's norms, which say none."""


class NotCompilable(Exception):
    """The layer does something that no graph is built for; the text says what."""


@dataclass(frozen=True, slots=True)
class Norm:
    """``x / rms(x) * gamma``, or with a `beta` ``(x - mean) / std * gamma + beta``."""

    gamma: torch.Tensor
    beta: torch.Tensor | None
    epsilon: float


@dataclass(frozen=True, slots=True)
class OutputGate:
    """What rows are multiplied by behind a mixer: numbers of the same row that went around it,
    through an `activation` (None: as they are). A `norm` of each head comes before that, or behind
    it where the gate `is_first`; `gamma` is what the rows are multiplied by behind the norm where
    that differs from head to head. Where it is of `heads`, there is one number for each of them."""

    activation: str | None
    norm: Norm | None = None
    is_first: bool = False
    gamma: torch.Tensor | None = None
    heads: int = 0


@dataclass(slots=True)
class PartsReader:
    """A layer and which of its modules were understood."""

    layer: nn.Module
    read: set[int] = field(default_factory=set)

    def find(self, *paths: str) -> nn.Module | None:
        """The first of these that it has."""
        for path in paths:
            try:
                found = self.layer.get_submodule(path)
            except AttributeError:
                continue
            self.read.add(id(found))
            return found
        return None

    def get(self, *paths: str) -> nn.Module:
        """As `find`. Raises NotCompilable when it has none."""
        found = self.find(*paths)
        if found is None:
            raise NotCompilable(f"it has no {paths[0]}")
        return found

    def norm(self, *paths: str, width: int = 0) -> Norm | None:
        """The norm there, if there is one; some know no `width`. Raises NotCompilable for what is
        none."""
        found = self.find(*paths)
        if found is None or isinstance(found, nn.Identity):
            return None
        return norm_of(found, width, self._device())

    def _device(self) -> torch.device:
        """Where the weights are that it has by now."""
        tensors = chain(self.layer.parameters(), self.layer.buffers())
        there = (each.device for each in tensors if not each.is_meta)
        return next(there, torch.device("cpu"))

    def require_all_read(self) -> None:
        """Raise NotCompilable when a module with weights was passed over."""
        for name, module in self.layer.named_modules():
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if own and id(module) not in self.read:
                raise NotCompilable(f"it has a {type(module).__name__} called {name}")


def norm_of(module: nn.Module, width: int, device: torch.device) -> Norm:
    """What it does over so many numbers, which most know, as they know where. Raises NotCompilable
    for what is no norm."""
    named = (getattr(module, name, None) for name in ("variance_epsilon", "eps"))
    epsilon = next((each for each in named if each is not None), None)
    weight = getattr(module, "weight", None)
    if weight is None and width and not any(True for _ in module.parameters()):
        weight = torch.ones(width, device=device)
        epsilon = _OWN_EPSILON if hasattr(module, "normalized_shape") else epsilon
    if epsilon is None or weight is None or weight.dim() != 1:
        raise NotCompilable(f"it normalises by {type(module).__name__}")
    plain, bias = weight.detach().float(), getattr(module, "bias", None)
    beta = torch.zeros_like(plain) if bias is None else bias.detach().float()
    if type(module) is nn.LayerNorm:
        return Norm(plain, beta, epsilon)
    # Some multiply by the weight, some by one more than it, and some take away the mean before.
    rows = torch.arange(len(weight), dtype=torch.float32, device=weight.device)[None] + 1
    given = rows.to(weight.dtype) if isinstance(module, nn.LayerNorm) else rows
    with torch.inference_mode():
        found = module(given)[0].float()
    scaled = (rows * torch.rsqrt(rows.square().mean()))[0]
    centred = nn.functional.layer_norm(rows, weight.shape)[0]
    ways = [(each, plain + more) for each in (scaled, centred) for more in (0, 1)]
    errors = torch.stack([(found - each * gamma - beta).norm() for each, gamma in ways])
    normed, gamma = ways[int(errors.argmin())]
    return Norm(gamma, beta if normed is centred else None, epsilon)


def rows_out(linear: nn.Module) -> int:
    """How many numbers a linear layer gives. Raises NotCompilable for what is none."""
    rows = getattr(linear, "out_features", None) or getattr(linear, "nf", None)
    if not isinstance(rows, int):
        raise NotCompilable(f"it projects by {type(linear).__name__}")
    return rows
