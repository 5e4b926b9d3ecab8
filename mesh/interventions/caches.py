"""Key/value caches whose remote layers are on the shards.

The job's cache object knows how long it is, so that masks and positions come out right; for a
remote layer it holds tensors of the right length without data (meta device), never wrong data.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, DynamicCache

from mesh.errors import BadRequest

_OPERATIONS = ("reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices")


class CacheHop(Protocol):
    """What caches need of a hop."""

    def operate_on_cache(self, cache: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Do the same to the hop's part."""

    def free_cache(self, cache: int) -> None:
        """The cache is no more."""


class Caches:
    """The caches of a job, by the numbers the shards know them by."""

    def __init__(self, hops: Sequence[CacheHop]) -> None:
        self._hops = hops
        self._numbers = itertools.count(1)
        self._mirrored = _mirrored(weakref.ref(self))
        self._live: dict[int, weakref.ref[Any]] = {}

    def number_of(self, cache: Cache) -> int:
        """The number of a cache, which is a shared one from now on. Raises BadRequest."""
        number = getattr(cache, "_hearthnet_number", None)
        if number is not None:
            return int(number)
        if type(cache) is not DynamicCache:
            raise BadRequest(
                f"A {type(cache).__name__} cannot span several machines.",
                fix="Leave cache_implementation at its default.",
            )
        number = next(self._numbers)
        cache._hearthnet_number = number
        cache.__class__ = self._mirrored
        self._live[number] = weakref.ref(cache)
        weakref.finalize(cache, self._free, number)
        return number

    def by_number(self, number: int) -> Cache:
        """The live cache of that number. Raises BadRequest."""
        reference = self._live.get(number)
        cache = reference() if reference is not None else None
        if cache is None:
            raise BadRequest("A hop names a cache that is gone.", fix="Update that machine.")
        return cache

    def grow(self, growth: list[list[int]]) -> None:
        """Note what the shards added: ``[cache, first layer, stop, batch, positions]`` each."""
        for number, start, stop, batch, added in growth:
            reference = self._live.get(number)
            cache = reference() if reference is not None else None
            if cache is None or added <= 0:
                continue
            stub = torch.empty((batch, 1, added, 1), device="meta")
            for layer in range(start, stop):
                Cache.update(cache, stub, stub, layer)

    def mirror(self, cache: Any, name: str, arguments: tuple[Any, ...]) -> None:
        """Do to the shards' parts what is done to `cache`."""
        for hop in self._hops:
            hop.operate_on_cache(cache._hearthnet_number, name, arguments)

    def _free(self, number: int) -> None:
        self._live.pop(number, None)
        for hop in self._hops:
            hop.free_cache(number)


def _mirroring(name: str, caches: weakref.ref[Caches]) -> Callable[..., Any]:
    def operation(self: Any, *arguments: Any) -> Any:
        owner = caches()
        if owner is not None:
            owner.mirror(self, name, arguments)
        return getattr(DynamicCache, name)(self, *arguments)

    return operation


def _mirrored(caches: weakref.ref[Caches]) -> type[Any]:
    members: dict[str, Any] = {name: _mirroring(name, caches) for name in _OPERATIONS}
    # Saved out of a job it comes back empty: keys and values are not here.
    members["__reduce__"] = lambda _self: (DynamicCache, ())
    members["__module__"] = DynamicCache.__module__
    return type(DynamicCache.__name__, (DynamicCache,), members)
