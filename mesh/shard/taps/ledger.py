"""Which tensors both ends of an intervention session hold, so that each crosses once.

A tensor the other end knows is named by its tag, without bytes. One that was changed in place since
then goes as new bytes, and is copied into *the same object* there: whoever holds that object, the
model's residual stream or a name in the user's code, sees the edit, as on one machine. Gradients
are `joints`' business, reached through `Origins`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from mesh.errors import BadRequest, DeviceFailed
from mesh.shard.taps.codec import Buffers, Kind, read_tensor, write_tensor

_FIX = "Run the same hearthnet version on both machines."


class Origins(Protocol):
    """How one end joins the autograd graphs of both."""

    def leaving(self, tag: int, tensor: torch.Tensor) -> int:
        """The number under which the other end asks for this tensor's gradient; 0 for none."""

    def arriving(self, joint: int, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, with a history that leads to the other end."""

    def asked(self, joint: int, tensor: torch.Tensor) -> None:
        """A known tensor now has a gradient though its values are the same."""

    def settled(self, tag: int, tensor: torch.Tensor) -> None:
        """The other end knows this tensor exactly as it is now."""


class Ledger:
    """One end's tensors by tag. The two ends number theirs even and odd."""

    def __init__(
        self, *, odd: bool, device: torch.device, max_bytes: int, origins: Origins
    ) -> None:
        self._next = 1 if odd else 2
        self._device = device
        self._max_bytes = max_bytes
        self._origins = origins
        self._tensors: dict[int, torch.Tensor] = {}
        self._tags: dict[int, int] = {}
        self._versions: dict[int, int] = {}
        self._owners: dict[int, int] = {}
        self._is_shard = odd
        self.size_bytes = 0

    def clear(self) -> None:
        """Forget every tensor; the other end does so at the same point."""
        self._tensors.clear()
        self._tags.clear()
        self._versions.clear()
        self._owners.clear()
        self.size_bytes = 0

    def write(self, tensor: torch.Tensor, buffers: Buffers) -> list[Any]:
        """The entry of a tensor on its way out."""
        entry = self.write_detached(tensor, buffers)
        entry[2] = self._origins.leaving(entry[1], tensor)
        return entry

    def write_detached(self, tensor: torch.Tensor, buffers: Buffers) -> list[Any]:
        """The same without a history, for values that are only looked at."""
        tag = self._tags.get(id(tensor))
        if tag is None:
            description: list[Any] | None = self._alias(tensor) or write_tensor(tensor, buffers)
            tag, self._next = self._next, self._next + 2
            self._keep(tag, tensor)
        elif tensor._version != self._versions[tag]:
            description = write_tensor(tensor, buffers)
            self._versions[tag] = tensor._version
        else:
            description = None
        return [int(Kind.TENSOR), tag, 0, description]

    def write_changed(self, buffers: Buffers) -> list[list[Any]]:
        """The entries of all tensors changed in place since they last crossed."""
        changed = [
            tensor
            for tag, tensor in self._tensors.items()
            if tensor._version != self._versions[tag]
        ]
        return [self.write(tensor, buffers) for tensor in changed]

    def read(self, entry: list[Any], next_buffer: Callable[[], memoryview]) -> torch.Tensor:
        """The tensor of an entry that came in. Raises BadRequest, DeviceFailed beyond the limit."""
        _, tag, joint, description = entry
        if type(tag) is not int or type(joint) is not int:
            raise BadRequest("A tensor without a number.", fix=_FIX)
        known = self._tensors.get(tag)
        if description is None:
            if known is None:
                raise BadRequest(f"Tensor {tag} is not known here.", fix=_FIX)
            if joint:
                self._origins.asked(joint, known)
                self._versions[tag] = known._version
                self._origins.settled(tag, known)
            return known
        if len(description) == 4:
            return self._read_alias(tag, description)
        fresh = read_tensor(description, next_buffer(), self._device)
        if joint:
            fresh = self._origins.arriving(joint, fresh)
        if known is None:
            self._keep(tag, fresh)
            self._origins.settled(tag, fresh)
            return fresh
        if known.shape != fresh.shape or known.dtype != fresh.dtype:
            raise BadRequest(
                "A tensor of the model was resized in place.", fix="Assign a new tensor instead."
            )
        with torch.set_grad_enabled(bool(joint)):
            known.copy_(fresh)
        self._versions[tag] = known._version
        self._origins.settled(tag, known)
        return known

    def _alias(self, tensor: torch.Tensor) -> list[Any] | None:
        """Where `tensor` lies in one that the other end has, so that edits show in both there."""
        if not self._is_shard or tensor.requires_grad or not tensor.numel():
            return None
        tag = self._owners.get(tensor.untyped_storage().data_ptr())
        if tag is None:
            return None
        owner = self._tensors[tag]
        start = tensor.storage_offset() - owner.storage_offset()
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        inside = start >= 0 and start + last < owner.numel()
        current = owner._version == self._versions[tag]
        if not inside or not current or owner.dtype != tensor.dtype:
            return None
        return [tag, start, list(tensor.shape), list(tensor.stride())]

    def _read_alias(self, tag: int, description: list[Any]) -> torch.Tensor:
        owner_tag, start, shape, stride = description
        owner = self._tensors.get(owner_tag)
        if self._is_shard or owner is None:
            raise BadRequest("A tensor lies in one that is not known here.", fix=_FIX)
        with torch.no_grad():
            alias = owner.detach().as_strided(shape, stride, owner.storage_offset() + start)
        self._keep(tag, alias)
        self._origins.settled(tag, alias)
        return alias

    def _keep(self, tag: int, tensor: torch.Tensor) -> None:
        self.size_bytes += tensor.nbytes
        if self.size_bytes > self._max_bytes:
            raise DeviceFailed(
                f"The trace holds more than {self._max_bytes} bytes of activations at once.",
                fix="Read fewer points in one trace, or fewer positions.",
            )
        if self._is_shard and not tensor.requires_grad and tensor.is_contiguous():
            self._owners.setdefault(tensor.untyped_storage().data_ptr(), tag)
        self._tensors[tag] = tensor
        self._tags[id(tensor)] = tag
        self._versions[tag] = tensor._version


class Loose:
    """Tensors that cross once and are shared by nobody: gradients, weights."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def write(self, tensor: torch.Tensor, buffers: Buffers) -> list[Any]:
        """See `Ledger.write`."""
        return [int(Kind.TENSOR), 0, 0, write_tensor(tensor, buffers)]

    def read(self, entry: list[Any], next_buffer: Callable[[], memoryview]) -> torch.Tensor:
        """See `Ledger.read`."""
        return read_tensor(entry[3], next_buffer(), self._device)
