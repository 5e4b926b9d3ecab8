"""Steering edits made ready for a session: from the bytes that came with it to hooks on a device.

The arithmetic is that of a Hugging Face forward hook which returns ``output + strength * vector``
or ``output + strength * ((output @ a) @ b)``, on the session's own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mesh.errors import SAME_VERSION, BadSteering
from mesh.models.edits import PARTS, EditTensors, check_edits, read_edit
from mesh.shard.hooks import Hook, module_at, unfit
from mesh.types import Edit, LayerRange, Site

if TYPE_CHECKING:
    from mesh.shard.runtime import Runtime


@dataclass(frozen=True, slots=True, eq=False)
class _Added:
    site: Site
    offset: torch.Tensor  # (hidden,), strength included

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        _check_width(self.site, hidden, len(self.offset))
        return hidden + self.offset


@dataclass(frozen=True, slots=True, eq=False)
class _LowRank:
    site: Site
    strength: float
    a: torch.Tensor  # (hidden, rank)
    b: torch.Tensor  # (rank, hidden)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        _check_width(self.site, hidden, len(self.a))
        return hidden + self.strength * ((hidden @ self.a) @ self.b)


@dataclass(frozen=True, slots=True, eq=False)
class _Finite:
    """Tells an edit that is too strong from a machine that computes nonsense."""

    site: Site

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if not bool(torch.isfinite(hidden).all()):
            raise BadSteering(
                f"Steered like this, what leaves layer {self.site.layer} is not finite any more.",
                fix="Lower the strength.",
                param="strength",
            )
        return hidden


@dataclass(frozen=True, slots=True)
class SessionEdits:
    """The checked edits of one session, which runs on `layers`."""

    layers: LayerRange
    edits: tuple[tuple[Edit, EditTensors], ...] = ()

    @classmethod
    def check(cls, edits: Sequence[Edit], layers: LayerRange, hidden_size: int) -> SessionEdits:
        """Read the edits. Raises BadSteering for one of other layers, of another width or form."""
        check_edits(edits)
        read = tuple((edit, read_edit(edit.data)) for edit in edits)
        for edit, tensors in read:
            if edit.site.layer not in layers:
                raise BadSteering(
                    f"An edit is for layer {edit.site.layer}, the session for layers {layers}.",
                    fix=SAME_VERSION,
                    param="path",
                )
            if edit.site.part in PARTS and tensors.hidden_size != hidden_size:
                raise BadSteering(
                    f"An edit is for hidden states of width {tensors.hidden_size}; this model's"
                    f" have {hidden_size}.",
                    fix="Use an edit that was made for this model.",
                    param="tensors",
                )
        return cls(layers, read)

    def hooks(self, runtime: Runtime) -> tuple[Hook, ...]:
        """What is called while the session computes. Raises BadSteering for unknown modules."""
        if not self.edits:
            return ()
        edits = (_hook(edit, tensors, runtime) for edit, tensors in self.edits)
        return (*edits, _Finite(Site(self.layers.stop - 1)))


def _check_width(site: Site, hidden: torch.Tensor, width: int) -> None:
    if hidden.shape[2] != width:
        raise unfit(site, f"passes rows of width {hidden.shape[2]}, the edit is for {width},")


def _hook(edit: Edit, tensors: EditTensors, runtime: Runtime) -> Hook:
    module_at(runtime.layer(edit.site.layer), edit.site)
    device, dtype = runtime.device, runtime.dtype
    if tensors.vector is not None:
        # Scaled in fp32, rounded once.
        offset = edit.strength * torch.from_numpy(tensors.vector)
        return _Added(edit.site, offset.to(device, dtype))
    assert tensors.a is not None and tensors.b is not None  # noqa: S101, PT018 - one of two forms
    a, b = (torch.from_numpy(factor).to(device, dtype) for factor in (tensors.a, tensors.b))
    return _LowRank(edit.site, edit.strength, a, b)
