"""What a job is shown of the model's own tensors: copies, for as long as its trace lasts.

On one machine an edit of a weight is seen by whatever reads the weight afterwards. So it is here,
within the trace: the first view of a weight that is shown makes a copy of the whole weight, the
view is shown as a part of that, and as soon as the copy is edited, or is to have a gradient, the
modules compute with it until the trace ends. Other sessions, and chat, never do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mesh.shard.taps.codec import storage_of

if TYPE_CHECKING:
    from mesh.shard.taps.tree import SpanTree  # which a job's process has no use for

_ALIGNMENT = 64
"""Kernels may give other last bits on memory that is aligned otherwise."""


@dataclass(slots=True, eq=False)
class _Copy:
    """A weight, its copy, and the views of that which were shown, by where in it they lie."""

    weight: torch.Tensor
    copy: torch.Tensor
    version: int
    views: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)

    @property
    def is_changed(self) -> bool:
        """Whether the weight itself would not do in its place."""
        return self.copy._version != self.version or any(t.requires_grad for t in self._shown())

    def _shown(self) -> Iterator[torch.Tensor]:
        yield self.copy
        yield from self.views.values()


class WeightCopies:
    """The copies of one session's trace."""

    def __init__(self, model: SpanTree) -> None:
        self._model = model
        self._copies: dict[int, _Copy] = {}

    def clear(self) -> None:
        """The trace has ended."""
        self._copies.clear()

    def shown(self, tensor: torch.Tensor) -> torch.Tensor:
        """What to show for `tensor`: itself, unless it lies in memory of the model's."""
        if not self._model.is_weight(tensor):
            return tensor
        owner = self._model.owner(tensor)
        known = self._copies.get(id(owner))
        if known is None:
            copy = _aligned_copy(owner)
            known = self._copies[id(owner)] = _Copy(owner, copy, copy._version)
        if tensor is owner or _place(tensor) == _place(owner):
            return known.copy
        return self._view(known, tensor)

    def seen(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight as the trace has it: its copy once that was changed."""
        known = self._copies.get(id(weight))
        return weight if known is None or not known.is_changed else known.copy

    def unchanged(self, answer: Any, value: Any) -> bool:
        """Whether `answer` is just what was shown for `value`: the weights themselves will do."""
        if isinstance(value, torch.Tensor):
            return answer is value or self._stands_for(answer, value)
        if type(answer) is not type(value):
            return False
        if isinstance(value, dict):
            return answer.keys() == value.keys() and all(
                self.unchanged(answer[key], item) for key, item in value.items()
            )
        if isinstance(value, list | tuple):
            return len(answer) == len(value) and all(map(self.unchanged, answer, value))
        return answer is value or bool(answer == value)

    def _stands_for(self, shown: object, tensor: torch.Tensor) -> bool:
        return (
            self._model.is_weight(tensor)
            and shown is self.shown(tensor)
            and not self._copies[id(self._model.owner(tensor))].is_changed
        )

    def apply(self) -> None:
        """Have the modules compute with what was changed."""
        for known in self._copies.values():
            if known.is_changed:
                self._model.replace(known.weight, known.copy)

    @staticmethod
    def _view(known: _Copy, tensor: torch.Tensor) -> torch.Tensor:
        place = _place(tensor)
        view = known.views.get(place)
        if view is None:
            apart = int(tensor.storage_offset()) - int(known.weight.storage_offset())
            first = known.copy.storage_offset() + apart
            with torch.no_grad():
                view = known.copy.detach().as_strided(tensor.shape, tensor.stride(), first)
            known.views[place] = view
        return view


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _aligned_copy(weight: torch.Tensor) -> torch.Tensor:
    """A tensor of its own with the same values, strides and alignment; no view of another."""
    weight = weight.detach()
    steps = zip(weight.shape, weight.stride(), strict=True)
    extent = (1 + sum((count - 1) * step for count, step in steps)) * weight.itemsize
    room = torch.empty(extent + 2 * _ALIGNMENT, dtype=torch.uint8, device=weight.device)
    apart = (weight.data_ptr() - room.data_ptr()) % _ALIGNMENT
    first = apart // weight.itemsize  # both are aligned to their elements
    copy = torch.empty(0, dtype=weight.dtype, device=weight.device)
    copy.set_(storage_of(room), first, weight.shape, weight.stride())
    copy.copy_(weight)
    return copy
