"""The ends of a model that has several streams of hidden states for one position.

What makes them of an embedding, and one state of them again, is written in the forward of its base
model, before and behind its layers. So that is what runs here, with one module in the place of all
layers.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from mesh.models.row_form import RowForm, StreamParts


class _AllLayers(nn.Module):
    """Stands for every layer: keeps what they would be given, and gives what is put there."""

    def __init__(self, *, among_others: bool) -> None:
        super().__init__()
        self.taken: torch.Tensor | None = None
        self.given: torch.Tensor | None = None
        self._among_others = among_others

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        self.taken = hidden_states
        given = hidden_states if self.given is None else self.given
        return (given, None) if self._among_others else given


class Streams(nn.Module):
    """The two halves of a base model around its layers; their list and its final norm are called
    `layers` and `norm`."""

    def __init__(
        self, base: Any, form: RowForm, parts: StreamParts, layers: str, norm: str
    ) -> None:
        super().__init__()
        self._form = form
        self._all = _AllLayers(among_others=parts.among_others)
        self._one = threading.Lock()  # prompts and answers may be computed on threads of their own
        self._gathered = [getattr(base, name) for name in parts.gathered]
        self._before = _around(base, layers, self._all, (*parts.gathered, norm))
        self._behind = _around(base, layers, self._all, parts.spread)

    def spread(self, embedded: torch.Tensor) -> torch.Tensor:
        """What the first layer is given of embedded tokens, (1, rows, hidden) to (1, rows, `states`
        of the form)."""
        with self._one:
            self._run(self._before, embedded)
            assert self._all.taken is not None  # noqa: S101 - its loop has called it
            return self._form.as_in_rows(self._all.taken)

    def gathered(self, states: torch.Tensor) -> torch.Tensor:
        """The one state of such, behind the final norm: (1, rows, hidden)."""
        with self._one:
            self._all.given = self._form.as_layers_take(states)
            try:
                return self._run(self._behind, states[..., : self._form.hidden])
            finally:
                self._all.given = None

    def widen(self) -> None:
        """Gather them in fp32."""
        for part in self._gathered:
            part.float()

    def _run(self, half: Any, hidden: torch.Tensor) -> torch.Tensor:
        more = {}
        if self._form.width:  # for all layers, of which there is one
            more["per_layer_inputs"] = hidden.new_empty((*hidden.shape[:2], 1, 0))
        found: torch.Tensor = half(inputs_embeds=hidden, use_cache=False, **more).last_hidden_state
        return found


def _around(base: Any, layers: str, all_layers: nn.Module, without: Iterable[str]) -> Any:
    """A copy of a base model with its weights, `all_layers` for its layers, and nothing done by the
    parts that it is `without`."""
    half = copy.copy(base)
    parts = {name: idle(getattr(base, name)) for name in without}
    # A copied module shares its dict of children; this one needs its own.
    half._modules = {**base._modules, layers: nn.ModuleList([all_layers]), **parts}  # noqa: SLF001
    if hasattr(half, "project_per_layer_inputs"):
        half.project_per_layer_inputs = _as_given
    return half


def _as_given(_: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    return given


def idle(part: nn.Module) -> nn.Module:
    """What takes the place of a module, or of each in a list, whose work is done elsewhere."""
    if isinstance(part, nn.ModuleList):
        return nn.ModuleList([nn.Identity() for _ in part])
    return nn.Identity()
