"""A job's tensors, and what is done to them in place without a new version.

An edit in place shows in a tensor's version, except through `.data`, NumPy, DLPack and storages.
Values whose memory user code was given like that are compared by content from then on.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mesh.shard.taps.codec import raw, storage_of
from mesh.shard.taps.joints import JobJoints
from mesh.shard.taps.shared_tensors import JobTensors

_PLAIN = (torch.Tensor, nn.Parameter)
_WAYS = ("numpy", "untyped_storage", "__dlpack__")
_GIVEN: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
_LIVE: weakref.WeakSet[WatchedTensors] = weakref.WeakSet()


class WatchedTensors(JobTensors):
    """The job's end, where `watch_memory` was called."""

    def __init__(self, device: torch.device, origins: JobJoints) -> None:
        super().__init__(device, origins)
        self._sums: dict[int, int] = {}
        _LIVE.add(self)

    def clear(self) -> None:
        """See `SharedTensors.clear`."""
        super().clear()
        self._sums.clear()

    def given_out(self, memory: int) -> None:
        """What lies at this address may change without a new version."""
        for tag in self._in_storage.get(memory, ()):
            self._sums.setdefault(tag, checksum(self._tensors[tag]))

    def _keep(self, tag: int, tensor: torch.Tensor) -> None:
        super()._keep(tag, tensor)
        if was_given_out(tensor):
            self._sums[tag] = checksum(tensor)

    def _is_changed(self, tag: int, tensor: torch.Tensor) -> bool:
        return super()._is_changed(tag, tensor) or (
            tag in self._sums and checksum(tensor) != self._sums[tag]
        )

    def _settle(self, tag: int, tensor: torch.Tensor) -> None:
        super()._settle(tag, tensor)
        if tag in self._sums:
            self._sums[tag] = checksum(tensor)


def watch_memory() -> None:
    """Make torch's ways around versions tell. For a job's process; safe to repeat."""
    kind: Any = torch.Tensor
    if not hasattr(kind.numpy, "_hearthnet"):
        data = kind.data
        kind.data = property(_telling(data.__get__), _telling(data.__set__))
        for name in _WAYS:
            setattr(kind, name, _telling(getattr(kind, name)))
        kind.numpy._hearthnet = True


def give_out(tensor: torch.Tensor) -> None:
    """Note that its memory may change without a new version from now on."""
    memory = storage_of(tensor)
    _GIVEN.add(memory)
    for live in list(_LIVE):
        live.given_out(memory.data_ptr())


def was_given_out(tensor: torch.Tensor) -> bool:
    """Whether user code has had its memory, and may change it without a new version."""
    return storage_of(tensor) in _GIVEN


def checksum(tensor: torch.Tensor) -> int:
    """Of its values. Raises BadRequest as `mesh.shard.taps.codec.raw`."""
    return zlib.crc32(raw(tensor))


def _telling(way: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(way)
    def telling(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) in _PLAIN:
            give_out(tensor)
        for memory_of in args:
            if isinstance(memory_of, torch.Tensor):
                give_out(memory_of)
        return way(tensor, *args, **kwargs)

    return telling
