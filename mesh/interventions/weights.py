"""Weights of remote layers, buffers among them: fetched when read. And whether the job has changed
a layer.

A layer whose weights, submodules, attributes or hooks the job has touched would compute something
else on its hop than in the job; it is then run in the job, with all its weights fetched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import detect_fake_mode

from mesh.interventions.hop import JobHop
from mesh.interventions.unread import UnreadTensor, unread_again, unread_parameter
from mesh.interventions.unseen import checksum
from mesh.shard.belongings import TABLES

if TYPE_CHECKING:
    from torch import nn


KEPT_BYTES = 256 << 20
"""Of values that were read and nobody else has: those read first are fetched again if needed."""


class RemoteWeights:
    """The weights of all remote layers, as far as the job has seen them."""

    def __init__(self, hop_of: Mapping[int, JobHop], kept_bytes: int = KEPT_BYTES) -> None:
        self._hop_of = hop_of
        self._kept_bytes = kept_bytes
        self._readable: dict[tuple[str, str], Callable[[], torch.Tensor]] = {}
        """How those are read again whose values are here, in the order in which they were read."""
        self._seen: dict[tuple[str, str], torch.Tensor] = {}
        self._checksums: dict[tuple[str, str], int] = {}
        """Of those that were fetched, as they were then."""
        self._parts: dict[int, list[_Part]] = {}

    def remember(self, layer: int, module: nn.Module) -> None:
        """What the layer consists of before the job does anything to it."""
        self._parts[layer] = [
            _Part(f"{layer}.{name}" if name else str(layer), part)
            for name, part in module.named_modules()
        ]

    def modules(self, layer: int) -> list[nn.Module]:
        """The modules that the layer had at the start."""
        return [part.module for part in self._parts[layer]]

    def is_changed(self, layer: int) -> bool:
        """Whether running the layer on its hop would miss something the job did to it."""
        return any(part.is_changed() or self._is_edited(part) for part in self._parts[layer])

    def weight(self, path: str, name: str, layer: int, stub: torch.Tensor) -> torch.Tensor:
        """The weight `name` of the module `path`, which looks like `stub`; the same object every
        time, fetched when it is read."""
        key, hop = (path, name), self._hop_of[layer]
        if key not in self._seen:
            is_buffer = not isinstance(stub, torch.nn.Parameter)

            def fetch() -> torch.Tensor:
                self._make_room(stub.nbytes)
                weight = hop.fetch_weight(path, name)
                self._checksums[key] = checksum(weight)
                if not is_buffer:  # which is small
                    self._readable[key] = fetch
                return weight

            self._seen[key] = (
                UnreadTensor.of(stub.shape, stub.dtype, fetch)
                if is_buffer
                else unread_parameter(stub, fetch)
            )
        return self._seen[key]

    def pull(self, layer: int) -> int:
        """Put all weights of the layer into its modules here; how many bytes that is."""
        size = 0
        for part in self._parts[layer]:
            for table, stubs in part.tables.items():
                real: dict[str, Any] = {}
                for name, stub in dict.items(stubs):
                    real[name] = stub
                    if stub is not None and stub.is_meta:
                        weight = real[name] = self.weight(part.path, name, layer, stub)
                        if isinstance(weight, UnreadTensor):
                            weight.filled()
                        self._readable.pop((part.path, name), None)  # needed here from now on
                        weight.requires_grad_(weight.requires_grad or stub.requires_grad)
                        size += weight.nbytes
                part.module.__dict__[table] = real
        return size

    def _make_room(self, size: int) -> None:
        """Let go of values, the first first, until there is room for so many bytes more."""
        here = sum(self._seen[key].nbytes for key in self._readable)
        for key, read in list(self._readable.items()):
            if here + size <= self._kept_bytes:
                return
            weight: Any = self._seen[key]
            if isinstance(weight, UnreadTensor) or weight.requires_grad:
                continue
            if checksum(weight) == self._checksums[key] and unread_again(weight, read):
                here -= weight.nbytes
                del self._readable[key]

    def _is_edited(self, part: _Part) -> bool:
        for name in (name for stubs in part.tables.values() for name in dict.keys(stubs)):
            weight = self._seen.get((part.path, name))
            if weight is None or (isinstance(weight, UnreadTensor) and not weight.requires_grad):
                continue
            before = self._checksums.get((part.path, name))
            # By content: edits through `.data` leave no other trace.
            if weight.requires_grad or (before is not None and checksum(weight) != before):
                return True
        return False


class RemoteTensors(dict[str, Any]):
    """A module's parameters, or its buffers: without data until one is read."""

    def __init__(
        self, stubs: dict[str, Any], weights: RemoteWeights, path: str, layer: int
    ) -> None:
        """Of `stubs`, those on the meta device are somewhere else."""
        super().__init__(stubs)
        self._weights = weights
        self._path = path
        self._layer = layer

    def __getitem__(self, name: str) -> Any:
        stub = super().__getitem__(name)
        if stub is None or not stub.is_meta or detect_fake_mode() is not None:
            return stub
        return self._weights.weight(self._path, name, self._layer, stub)

    def values(self) -> Any:
        """The weights themselves."""
        return {name: self[name] for name in self}.values()

    def items(self) -> Any:
        """The weights themselves, with their names."""
        return {name: self[name] for name in self}.items()

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return {name: copy.deepcopy(weight, memo) for name, weight in self.items()}


class _Part:
    """One module of a layer as it was at the start."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self.module = module
        self.tables: dict[str, dict[str, Any]] = {name: module.__dict__[name] for name in TABLES}
        self._buffers = dict(dict.items(self.tables["_buffers"]))
        self._children = {n: c for n, c in module._modules.items() if c is not None}
        self._attributes = _attributes(module)
        self._size = len(module.__dict__)

    def is_changed(self) -> bool:
        # Asked of every layer before every forward.
        now = self.module.__dict__
        children, stubs = now["_modules"], dict.values(now["_parameters"])
        for name, child in self._children.items():
            if children.get(name) is not child:
                return True
        for stub in stubs:
            if stub is not None and (stub.requires_grad or not stub.is_meta):
                return True
        for name, value in self._attributes.items():
            if now.get(name, now) is not value:
                return True
        if len(now) != self._size and _attributes(self.module).keys() != self._attributes.keys():
            return True
        if self._has_other_buffers(now["_buffers"]):
            return True
        return any(not _is_transformers_own(hook) for kind in _HOOKS for hook in now[kind].values())

    def _has_other_buffers(self, now: dict[str, Any]) -> bool:
        before = self._buffers
        return len(now) != len(before) or any(dict.get(now, n) is not b for n, b in before.items())


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in module.__dict__.items()
        if not name.startswith("_") and name != "forward"
    }


def _is_transformers_own(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")) == "transformers.utils.output_capturing"
