"""Weights of remote layers: fetched when looked at, and kept when the job means to change them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch._guards import detect_fake_mode

_Members = list[tuple[dict[str, Any], str, nn.Module]]


class WeightHop(Protocol):
    """What weights need of a hop."""

    def fetch_weight(self, path: str, name: str) -> torch.Tensor:
        """A copy of it."""


class RemoteWeights:
    """The weights of all remote layers, as far as the job has seen them."""

    def __init__(self, hop_of: dict[int, Any]) -> None:
        self._hop_of: dict[int, WeightHop] = hop_of
        self._fetched: dict[tuple[str, str], nn.Parameter] = {}
        self._parameters: dict[int, list[RemoteParameters]] = {}
        self._members: dict[int, _Members] = {}
        self._modules: dict[int, list[tuple[str, nn.Module]]] = {}

    def remember(self, layer: int, module: nn.Module) -> None:
        """What the layer consists of before the job does anything to it."""
        named = list(module.named_modules())
        self._modules[layer] = [(f"{layer}.{n}" if n else str(layer), m) for n, m in named]
        self._members[layer] = [
            (part._modules, name, child)
            for _, part in named
            for name, child in part._modules.items()
            if child is not None
        ]
        self._parameters[layer] = [part.__dict__["_parameters"] for _, part in named]

    def is_changed(self, layer: int) -> bool:
        """Whether running the layer on its hop would miss something the job did to it."""
        for parameters in self._parameters[layer]:
            if any(p is not None and p.requires_grad for p in dict.values(parameters)):
                return True
            for name in dict.keys(parameters):
                seen = self._fetched.get((parameters.path, name))
                if seen is not None and (seen.requires_grad or seen._version):
                    return True
        return any(members.get(name) is not child for members, name, child in self._members[layer])

    def fetch(self, path: str, name: str, layer: int) -> nn.Parameter:
        """The weight `name` of the module `path`; the same object every time."""
        key = (path, name)
        if key not in self._fetched:
            weight = self._hop_of[layer].fetch_weight(path, name)
            self._fetched[key] = nn.Parameter(weight, requires_grad=False)
        return self._fetched[key]

    def pull(self, layer: int) -> int:
        """Put all weights of the layer into its modules here; how many bytes that is."""
        size = 0
        for path, module in self._modules[layer]:
            stubs = module.__dict__["_parameters"]
            real: dict[str, Any] = {}
            for name, stub in dict.items(stubs):
                real[name] = None if stub is None else self.fetch(path, name, layer)
                if stub is not None:
                    real[name].requires_grad_(real[name].requires_grad or stub.requires_grad)
                    size += real[name].nbytes
            module.__dict__["_parameters"] = real
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = self._hop_of[layer].fetch_weight(path, name)
        return size


class RemoteParameters(dict[str, Any]):
    """A module's parameters: without data until one is looked at by name."""

    def __init__(
        self, stubs: dict[str, Any], weights: RemoteWeights, path: str, layer: int
    ) -> None:
        super().__init__(stubs)
        self.path = path
        self._weights = weights
        self._layer = layer

    def __getitem__(self, name: str) -> Any:
        stub = super().__getitem__(name)
        if stub is None or not stub.is_meta or detect_fake_mode() is not None:
            return stub
        return self._weights.fetch(self.path, name, self._layer)
