"""Whether a span's weights in memory are still what was loaded: their hashes, over and over.

The first round takes the hash of everything; what lies in memory as it is stored is compared with
the checkpoint's hash at once. Every later round compares with the first. A slice at a time, so that
whoever calls decides how much of the machine it takes. Weights whose memory torch does not show are
asked instead: what they make of a row that is always the same must stay what it was.
"""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from mesh.shard.belongings import belongings
from mesh.shard.packed import HalvedLinear, packed_memory


class Check(Protocol):
    """Looks at some weights, a part at a time. For one thread at a time."""

    def step(self, size: int) -> str | None:
        """Look at the next part, of about `size` bytes; the name of a weight that has changed."""


class Checkable(Protocol):
    """What holds weights."""

    def weight_check(self) -> Check:
        """A check of them, which does not keep them from being freed."""


@dataclass(slots=True)
class _Stretch:
    """The memory of one tensor, which is not kept alive for this."""

    name: str
    tensor: weakref.ref[torch.Tensor]
    size: int
    expected: str | None

    def read(self, start: int, stop: int, take: Callable[[memoryview], None]) -> None:
        """Hand its bytes from `start` to `stop` to `take`; none when it is gone."""
        tensor = self.tensor()
        if tensor is None:
            return
        packed = packed_memory(tensor)
        if packed is not None:
            area = (ctypes.c_ubyte * self.size).from_address(packed[0])
            take(memoryview(area).cast("B")[start:stop])
            return
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        whole.set_(tensor.detach().untyped_storage())
        take(whole[start:stop].cpu().numpy().data)


@dataclass(slots=True)
class _Asked:
    """A layer that is asked, whole, at the end of its stretch."""

    name: str
    layer: weakref.ref[HalvedLinear]
    size: int
    expected: str | None

    def tensor(self) -> HalvedLinear | None:
        """What is looked at; None when it is gone."""
        return self.layer()

    def read(self, start: int, stop: int, take: Callable[[memoryview], None]) -> None:
        """Hand its answer to `take` when `stop` is the end."""
        layer = self.layer()
        if layer is not None and stop == self.size:
            take(layer.answer().numpy().data)


@dataclass(slots=True)
class _Round:
    """How far the present round is."""

    place: int = 0
    offset: int = 0
    hash: hashlib._Hash = field(default_factory=hashlib.sha256)


class WeightCheck:
    """The weights of one module and of those beside it. For one thread at a time."""

    def __init__(self, module: nn.Module, sha256: Mapping[str, str], *beside: nn.Module) -> None:
        """`sha256` are hashes that are known, by the weights' names in `module`."""
        self._stretches: list[_Stretch | _Asked] = list(_stretches(module, sha256))
        self._stretches += [each for other in beside for each in _stretches(other, {})]
        self._stretches += _asked(module)
        self._round = _Round()
        self.rounds = 0
        """How often all weights were gone through."""

    def step(self, size: int) -> str | None:
        """Go through the next `size` bytes, or to the end of the round; the name of a weight that
        has changed."""
        rounds = self.rounds
        while self._stretches and size > 0 and self.rounds == rounds:
            now = self._round
            stretch = self._stretches[now.place]
            stop = min(stretch.size, now.offset + size)
            size -= stop - now.offset
            stretch.read(now.offset, stop, now.hash.update)
            now.offset = stop
            if stop == stretch.size and (changed := self._finish(stretch)) is not None:
                return changed
        return None

    def _finish(self, stretch: _Stretch | _Asked) -> str | None:
        now = self._round
        found = now.hash.hexdigest()
        last = now.place + 1 == len(self._stretches)
        self.rounds += last
        self._round = _Round(0 if last else now.place + 1)
        if stretch.expected is None:
            stretch.expected = found
        return None if found == stretch.expected or stretch.tensor() is None else stretch.name


def _asked(module: nn.Module) -> Iterator[_Asked]:
    for name, part in module.named_modules():
        if isinstance(part, HalvedLinear):
            yield _Asked(name, weakref.ref(part), part.weight_bytes, None)


def _stretches(module: nn.Module, sha256: Mapping[str, str]) -> Iterator[_Stretch]:
    """Every piece of memory that a tensor of the module lies in, once."""
    seen: set[int] = set()
    for each in belongings(module):
        tensor, expected = each.tensor, None
        packed = packed_memory(tensor)
        if packed is not None:
            address, size = packed
        elif tensor.layout is torch.strided and not tensor.is_meta and tensor.nbytes:
            address = tensor.untyped_storage().data_ptr()
            size = tensor.untyped_storage().nbytes()
            expected = sha256.get(each.name) if size == tensor.nbytes else None
        else:
            continue
        if address not in seen:
            seen.add(address)
            yield _Stretch(each.name, weakref.ref(tensor), size, expected)
