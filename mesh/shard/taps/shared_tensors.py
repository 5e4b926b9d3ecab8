"""Which tensors both ends of an intervention session hold, so that each crosses once.

A tensor the other end knows is named by its tag, without bytes. One that was changed in place since
then goes as new bytes, and is copied into *the same object* there: whoever holds that object, the
model's residual stream or a name in the user's code, sees the edit, as on one machine. Gradients
are `joints`' business, reached through `Origins`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch

from mesh.errors import SAME_VERSION, BadRequest
from mesh.shard.taps.codec import (
    Buffers,
    EncodedKind,
    Reader,
    read_tensor,
    storage_of,
    write_tensor,
)
from mesh.shard.taps.joints import JobJoints, ShardJoints
from mesh.shard.taps.meter import ENTRY_BYTES, MemoryMeter
from mesh.shard.taps.weight_copies import WeightCopies


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


class SharedTensors:
    """One end's tensors by tag. The two ends number theirs even and odd."""

    def __init__(self, first: int, device: torch.device, origins: Origins) -> None:
        self._next = first
        self._device = device
        self._origins = origins
        self._tensors: dict[int, torch.Tensor] = {}
        self._tags: dict[int, int] = {}
        self._versions: dict[int, int] = {}
        self._in_storage: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def tags(self) -> Collection[int]:
        """The tags of all tensors."""
        return self._tensors.keys()

    def all(self) -> Collection[torch.Tensor]:
        """Every tensor that has a tag."""
        return self._tensors.values()

    def clear(self) -> None:
        """Forget every tensor; the other end does so at the same point."""
        self._tensors.clear()
        self._tags.clear()
        self._versions.clear()
        self._in_storage.clear()

    def write(self, tensor: torch.Tensor, buffers: Buffers) -> list[Any]:
        """The entry of a tensor on its way out."""
        tag, description = self._describe(tensor, buffers, detached=False)
        return [int(EncodedKind.TENSOR), tag, self._origins.leaving(tag, tensor), description]

    def write_detached(self, tensor: torch.Tensor, buffers: Buffers) -> list[Any]:
        """The same without a history, for values that are only looked at."""
        tag, description = self._describe(tensor, buffers, detached=True)
        return [int(EncodedKind.TENSOR), tag, 0, description]

    def _describe(
        self, tensor: torch.Tensor, buffers: Buffers, *, detached: bool
    ) -> tuple[int, list[Any] | None]:
        tag = self._tags.get(id(tensor))
        description: list[Any] | None
        if tag is None:
            description = self._alias(tensor, detached=detached) or write_tensor(tensor, buffers)
            tag, self._next = self._next, self._next + 2
            self._keep(tag, tensor)
        elif self._is_changed(tag, tensor):
            description = write_tensor(tensor, buffers)
            self._settle(tag, tensor)
        else:
            description = None
        return tag, description

    def write_changed(self, buffers: Buffers) -> list[list[Any]]:
        """The entries of all tensors changed in place since they last crossed."""
        changed = [tensor for tag, tensor in self._tensors.items() if self._is_changed(tag, tensor)]
        return [self.write(tensor, buffers) for tensor in changed]

    def read_changed(self, entries: list[Any], reader: Reader) -> None:
        """The reverse of `write_changed`. Raises as `read`."""
        tensors = [(reader.tensor(entry), entry[1]) for entry in entries]
        for tensor, tag in tensors:
            # Those after it may lie in the same memory, and have counted as its change.
            self._settle(tag, tensor)
            self._origins.settled(tag, tensor)

    def read(self, entry: list[Any], next_buffer: Callable[[], memoryview]) -> torch.Tensor:
        """The tensor of an entry that came in. Raises BadRequest, LimitReached."""
        _, tag, joint, description = entry
        if type(tag) is not int or type(joint) is not int:
            raise BadRequest("A tensor without a number.", fix=SAME_VERSION)
        known = self._tensors.get(tag)
        if description is None:
            if known is None:
                raise BadRequest(f"Tensor {tag} is not known here.", fix=SAME_VERSION)
            if joint:
                self._origins.asked(joint, known)
                self._settle(tag, known)
                self._origins.settled(tag, known)
            return known
        if len(description) == 4:
            return self._read_alias(tag, joint, description)
        fresh = read_tensor(description, next_buffer(), self._device)
        if joint:
            fresh = self._origins.arriving(joint, fresh)
        if known is None:
            if tag % 2 == self._next % 2:
                raise BadRequest(
                    f"Tensor {tag} is not for the other end to number.", fix=SAME_VERSION
                )
            self._keep(tag, fresh)
            self._origins.settled(tag, fresh)
            return fresh
        if known.shape != fresh.shape or known.dtype != fresh.dtype:
            raise BadRequest(
                "A tensor of the model was resized in place.", fix="Assign a new tensor instead."
            )
        with torch.set_grad_enabled(bool(joint)):
            known.copy_(fresh)
        self._settle(tag, known)
        self._origins.settled(tag, known)
        return known

    def _alias(self, tensor: torch.Tensor, *, detached: bool) -> list[Any] | None:
        """Where `tensor` lies in one that the other end has."""
        return None

    def _read_alias(self, tag: int, joint: int, description: list[Any]) -> torch.Tensor:
        raise BadRequest("A tensor lies in one that is not known here.", fix=SAME_VERSION)

    def _keep(self, tag: int, tensor: torch.Tensor) -> None:
        self._in_storage.setdefault(storage_of(tensor).data_ptr(), []).append(tag)
        self._tensors[tag] = tensor
        self._tags[id(tensor)] = tag
        self._settle(tag, tensor)

    def _is_changed(self, tag: int, tensor: torch.Tensor) -> bool:
        return tensor._version != self._versions[tag]

    def _settle(self, tag: int, tensor: torch.Tensor) -> None:
        """Take it as the other end has it."""
        self._versions[tag] = tensor._version


class ShardTensors(SharedTensors):
    """The shard's end: what lies in the memory of a tensor that the job has is shown as such a part
    of it, so that edits of the one are edits of the other there, too."""

    _origins: ShardJoints

    def __init__(
        self, device: torch.device, meter: MemoryMeter, origins: ShardJoints, weights: WeightCopies
    ) -> None:
        super().__init__(1, device, origins)
        self._meter = meter
        self._weights = weights
        self.has_shown_weights = False
        """Whether something of the model's was shown; for whoever shows to take back."""

    def clear(self) -> None:
        """Forget every tensor; the other end does so at the same point."""
        self._meter.give(len(self) * ENTRY_BYTES)
        super().clear()

    def read_changed(self, entries: list[Any], reader: Reader) -> None:
        """The tensors that a job has changed. Raises BadRequest, LimitReached."""
        super().read_changed(entries, reader)
        self._weights.apply()

    def write(self, tensor: torch.Tensor, buffers: Buffers) -> list[Any]:
        """The entry of a tensor on its way to the job."""
        return super().write(self._shown(tensor), buffers)

    def write_detached(self, tensor: torch.Tensor, buffers: Buffers) -> list[Any]:
        """The entry of a tensor that the job only looks at."""
        return super().write_detached(self._shown(tensor), buffers)

    def _shown(self, tensor: torch.Tensor) -> torch.Tensor:
        shown = self._weights.shown(tensor)
        self.has_shown_weights |= shown is not tensor
        return shown

    def _keep(self, tag: int, tensor: torch.Tensor) -> None:
        self._meter.take(ENTRY_BYTES)
        super()._keep(tag, tensor)

    def _alias(self, tensor: torch.Tensor, *, detached: bool) -> list[Any] | None:
        tags = self._in_storage.get(storage_of(tensor).data_ptr(), [])
        if not tags or not tensor.numel() or (detached and tensor.requires_grad):
            return None
        if tensor.requires_grad:
            viewed = self._origins.viewed(tensor, tags)
            owners = [] if viewed is None else [viewed]
        else:
            owners = tags
        for tag in owners:
            start = _start_within(tensor, self._tensors[tag])
            if start is not None and self._tensors[tag]._version == self._versions[tag]:
                return [tag, start, list(tensor.shape), list(tensor.stride())]
        for tag in tags:
            other = self._tensors[tag]
            known = self._origins.is_shown(tag) if other.requires_grad else tensor.requires_grad
            if known and _overlap(tensor, other):
                raise BadRequest(
                    "Under gradients, a value cannot be shown whose memory is that of another one"
                    " shown before, unless it is a view of that one.",
                    fix="Read only one of the two, or the one that is made first before the other.",
                )
        return None


class JobTensors(SharedTensors):
    """The job's end."""

    _origins: JobJoints

    def __init__(self, device: torch.device, origins: JobJoints) -> None:
        super().__init__(2, device, origins)

    def write_changed(self, buffers: Buffers) -> list[list[Any]]:
        """The entries of all tensors that are not as the shard has them."""
        changed = super().write_changed(buffers)
        asked = [t for tag, t in self._tensors.items() if self._origins.is_asked(tag, t)]
        return changed + [self.write(tensor, buffers) for tensor in asked]

    def _read_alias(self, tag: int, joint: int, description: list[Any]) -> torch.Tensor:
        owner_tag, start, shape, stride = description
        owner = self._tensors.get(owner_tag)
        if owner is None or not owner.is_contiguous():
            raise BadRequest(
                "A value lies in one that is not here as it is on the shard.",
                fix="Give the model contiguous tensors: call contiguous() on what you assign.",
            )
        with torch.set_grad_enabled(bool(joint)):
            whole = owner if joint else owner.detach()
            alias = whole.as_strided(shape, stride, owner.storage_offset() + start)
        self._keep(tag, alias)
        if joint:
            self._origins.viewing(joint, tag, alias)
        self._origins.settled(tag, alias)
        return alias


def _start_within(tensor: torch.Tensor, owner: torch.Tensor) -> int | None:
    """How many elements into `owner`, of the same storage, `tensor` begins; None if not inside."""
    start = int(tensor.storage_offset() - owner.storage_offset())
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    inside = start >= 0 and start + last < owner.numel()
    return start if inside and owner.is_contiguous() and owner.dtype == tensor.dtype else None


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage have an element in common."""
    if one.dtype != other.dtype:
        return True
    places = torch.arange(storage_of(one).nbytes() // one.itemsize)
    taken = torch.zeros(len(places), dtype=torch.bool)
    taken[_of(one, places)] = True
    return bool(taken[_of(other, places)].any())


def _of(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class Loose:
    """Tensors that cross once and are shared by nobody: gradients, weights."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def write(self, tensor: torch.Tensor, buffers: Buffers) -> list[Any]:
        """The entry of a tensor that nobody keeps."""
        return [int(EncodedKind.TENSOR), 0, 0, write_tensor(tensor, buffers)]

    def read(self, entry: list[Any], next_buffer: Callable[[], memoryview]) -> torch.Tensor:
        """The tensor of an entry that came in. Raises BadRequest, LimitReached."""
        return read_tensor(entry[3], next_buffer(), self._device)
