"""Layers of any kind in 4 bit, computed by the modules that transformers made.

Where no graph is built for layers, and they are no lean ones, their linear layers and experts are
still matrices: these become the codes that they become for graphs (`compiled`), for the kernel that
torch has for them (`int4`). What is small stays as it is, as it routes, gates and mixes, and costs
little. Nothing is known here about any architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mesh.models.families import Family
from mesh.models.filling import Placement, fill
from mesh.models.late_experts import fill_late, stacks_in
from mesh.models.progress import Progress
from mesh.models.span import empty_base
from mesh.shard.compiled.experts import ExpertMatrices, put_blocks
from mesh.shard.compiled.formats import BLOCK, BlockLinear, BlockMatrix, Quant, dense_weight
from mesh.shard.compiled.parts import NotCompilable
from mesh.shard.compiled.store import folder_of, stored_products
from mesh.shard.compiled.stored_matrices import stored_experts
from mesh.shard.int4 import BYTES_PER_WEIGHT
from mesh.shard.views import layers_of

if TYPE_CHECKING:
    from mesh.models.header import TensorEntry
    from mesh.models.load import LoadedSpan
    from mesh.shard.compiled.builder import Product

_QUANT: Quant = "int4"
_CPU = torch.device("cpu")
_SMALL, _OTHER = 64, 8
"""A matrix with less than this part of its layer's numbers stays as it is; and no more than this
part of them may be in what is none that is rounded."""
_ALIKE = frozenset({"FalconLinear"})
"""Classes beside torch's own that compute what a linear layer does."""


@dataclass(frozen=True, slots=True)
class _Stacks:
    """The experts of a module, as the two linear layers that they are seen as."""

    path: str
    up: ExpertMatrices
    down: ExpertMatrices


@dataclass(frozen=True, slots=True)
class _Matrices:
    """What of a layer is rounded, by its paths there."""

    linears: Mapping[str, nn.Module]
    experts: tuple[_Stacks, ...]

    @classmethod
    def of(cls, layer: nn.Module, fill_of: Callable[[str], Callable[[], None]]) -> _Matrices:
        """`fill_of` the path of a module of experts puts their weights there."""
        numbers = sum(each.numel() for each in layer.parameters())
        linears = {
            path: part
            for path, part in layer.named_modules()
            if _is_linear(part) and _SMALL * dense_weight(part).numel() >= numbers
        }
        experts = [
            _Stacks(path, *(ExpertMatrices(part, name, fill_of(path)) for name in stacks_in(part)))
            for path, part in layer.named_modules()
            if _are_experts(part)
        ]
        return cls(linears, tuple(experts))

    @property
    def modules(self) -> dict[str, tuple[nn.Module, ...]]:
        """As `stored_products` takes them."""
        found: dict[str, tuple[nn.Module, ...]] = {n: (each,) for n, each in self.linears.items()}
        for stacks in self.experts:
            for each in (stacks.up, stacks.down):
                found[f"{stacks.path}.{each.name}"] = (each,)
        return found

    @property
    def numbers(self) -> int:
        """How many there are in all of them."""
        stacks = (each for both in self.experts for each in (both.up, both.down))
        apart = sum(dense_weight(each).numel() for each in self.linears.values())
        return apart + sum(math.prod(each.shape) for each in stacks)


def rounded_size(family: Family) -> float:
    """How many bytes a weight of its layers takes then, on a CPU, in the layer that takes most.

    Raises NotCompilable where little of a layer can be rounded.
    """
    base: Any = empty_base(family, Placement(torch.float32, _CPU))
    if family.entry.adapt is not None:
        family.entry.adapt(base)
    most = 0.0
    for number, layer in enumerate(layers_of(base)):
        whole = sum(each.numel() for each in layer.parameters())
        rest = whole - _Matrices.of(layer, lambda _: _nothing).numbers
        if _OTHER * rest > whole:
            raise NotCompilable(
                f"{rest / whole:.0%} of layer {number} is in no linear layers, nor in experts as"
                " others have them"
            )
        size = BYTES_PER_WEIGHT * (whole - rest) + torch.float32.itemsize * rest
        most = max(most, size / whole)
    return most


def rounded_modules(
    loaded: LoadedSpan,
    weights_sha256: str,
    cache_dir: Path | None,
    progress: Progress | None = None,
) -> LoadedSpan:
    """`loaded`, changed in place: `BlockLinear` and `BlockExperts` stand for what is rounded of it.

    Rounds what `cache_dir` does not hold yet, and holds it there from then on; without one it stays
    in memory.
    """
    module: Any = loaded.module
    folder = folder_of(weights_sha256, _QUANT, cache_dir)
    progress = progress or Progress()
    progress.begin("rounding", loaded.bytes_read)
    layers, deferred = layers_of(module), dict(loaded.deferred)
    for number, layer in enumerate(layers):
        prefix = next(name for name, part in module.named_modules() if part is layer)
        found = _Matrices.of(layer, partial(_filler, loaded, prefix))
        stored: dict[int, tuple[TensorEntry, ...]] = {
            id(part): (deferred.pop(name),)
            for path, part in found.linears.items()
            if (name := f"{prefix}.{path}.weight") in deferred
        }
        for stacks in found.experts:
            stored |= stored_experts(stacks, loaded.late.get(f"{prefix}.{stacks.path}", {}))
        file = None if folder is None else folder / f"{loaded.layers.start + number}.safetensors"
        products, pages = stored_products(found.modules, _QUANT, file, stored)
        loaded.pages.update(pages)
        _put(layer, found, products)
        progress.add(loaded.bytes_read // len(layers))
    if deferred:  # what is small
        fill(module, deferred, Placement(torch.float32, _CPU), same={}, absent=("",))
    module.float()
    for parameter in module.parameters():  # what is left would keep the whole checkpoint mapped
        parameter.data = parameter.data.clone()
    return replace(loaded, sha256={}, deferred={}, late={})


def _filler(loaded: LoadedSpan, prefix: str, path: str) -> Callable[[], None]:
    return partial(fill_late, loaded, f"{prefix}.{path}")


def _put(layer: nn.Module, found: _Matrices, products: Mapping[str, Product]) -> None:
    for path in found.linears:
        product = products[path]
        assert isinstance(product.matrix, BlockMatrix)  # noqa: S101 - of a quantised span
        layer.set_submodule(path, BlockLinear(product.matrix, product.bias))
    for stacks in found.experts:
        for each in (stacks.up, stacks.down):
            matrix = products[f"{stacks.path}.{each.name}"].matrix
            assert isinstance(matrix, BlockMatrix)  # noqa: S101 - as well
            put_blocks(each, matrix)


def _is_linear(part: nn.Module) -> bool:
    if type(part) is not nn.Linear and type(part).__name__ not in _ALIKE:
        return False
    return dense_weight(part).shape[1] % BLOCK == 0


def _are_experts(part: Any) -> bool:
    """Whether it has tensors of experts that transformers lets others compute with."""
    stacks: list[Any] = [getattr(part, name, None) for name in stacks_in(part)]
    if not hasattr(part, "is_transposed") or getattr(part, "has_post_expert_norm", False):
        return False
    return all(getattr(each, "ndim", 0) == 3 and not each.shape[-1] % BLOCK for each in stacks)


def _nothing() -> None:
    pass
