"""The key/value caches of one intervention session: transformers' own, one layer list per number.

The job's model decides when a cache begins, is reordered or cropped; here is only the span's part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from mesh.errors import BadRequest
from mesh.shard.taps.codec import CACHE_OPERATIONS
from mesh.shard.taps.messages import Growth
from mesh.shard.taps.meter import ENTRY_BYTES, MemoryMeter
from mesh.shard.taps.refusals import raised
from mesh.shard.taps.tree import SpanTree
from mesh.types import LayerRange

_MAX_CACHES = 64


class TapCaches:
    """Caches by the numbers the job gave them."""

    def __init__(self, tree: SpanTree, layers: LayerRange, meter: MemoryMeter) -> None:
        self._tree = tree
        self._meter = meter
        self._entry_bytes = ENTRY_BYTES * (1 + len(tree.layers))
        first = tree.layers.start
        self._indices = range(layers.start - first, layers.stop - first)
        self._caches: dict[int, Any] = {}
        self._told: dict[int, list[int]] = {}
        """How many positions the job knows of, by layer."""

    def __len__(self) -> int:
        return len(self._caches)

    def get(self, number: int) -> Any:
        """The cache of that number, an empty one the first time; BadRequest, LimitReached."""
        cache = self._caches.get(number)
        if cache is None:
            if len(self._caches) >= _MAX_CACHES:
                raise BadRequest("The job keeps too many caches.", fix="Let go of earlier ones.")
            self._meter.take(self._entry_bytes)
            cache = self._caches[number] = self._tree.new_cache()
            self._told[number] = _lengths(cache)
        return cache

    def number_of(self, cache: Any) -> int | None:
        """The number of a cache of this session; None for any other object."""
        return next((n for n, known in self._caches.items() if known is cache), None)

    def free(self, number: int) -> None:
        """Forget the cache, if it is there."""
        if self._caches.pop(number, None) is not None:
            del self._told[number]
            self._meter.give(self._entry_bytes)

    def clear(self) -> None:
        """Forget all of them."""
        for number in list(self._caches):
            self.free(number)

    def operate(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Do to the session's layers what the job does to its cache. Raises BadRequest."""
        if name not in CACHE_OPERATIONS:
            raise BadRequest(f"Unknown cache operation {name[:50]!r}.", fix="Update this node.")
        cache = self.get(number)
        # Layers that see keys of others have nothing in it, and come last.
        for layer in cache.layers[self._indices.start : self._indices.stop]:
            if not hasattr(layer, name):
                continue  # only some kinds of layers have it
            try:
                getattr(layer, name)(*arguments)
            except (IndexError, RuntimeError, TypeError, ValueError) as error:
                raise raised(error) from error
        self._told[number] = _lengths(cache)

    def positions_after(self, number: int, name: str, arguments: tuple[Any, ...]) -> int:
        """How many rows all of them would hold after such an `operate`."""
        cache = self._caches.get(number)
        batches = [layer.keys.shape[0] for layer in _with_keys(cache)] if cache else []
        if name in ("crop", "reset", "activate_past_recording") or not any(batches):
            return self.positions()
        if name == "batch_repeat_interleave":
            batch = max(batches) * int(arguments[0])
        else:
            batch = torch.as_tensor(arguments[0]).numel()
        rows = _rows(cache)
        return self.positions() - rows + rows // int(max(batches)) * int(batch)

    def contents(self, number: int, layer: int) -> list[torch.Tensor]:
        """Keys and values that one of the session's layers has cached, then its states, without
        numbers where one is not there. Raises BadRequest."""
        cache, index = self._caches.get(number), layer - self._tree.layers.start
        if cache is None or index not in self._indices or index >= len(cache.layers):
            raise _nothing()
        held = cache.layers[index]
        found = [held.keys, held.values] if held in _with_keys(cache) else []
        states = _states_of(held)
        if not found and all(state is None for state in states):
            raise _nothing()
        found += [torch.empty(0) if state is None else state for state in states]
        return [tensor.detach() for tensor in found]

    def tensors(self) -> Iterator[torch.Tensor]:
        """All keys, values and states."""
        for cache in self._caches.values():
            for layer in _with_keys(cache):
                yield from (layer.keys, layer.values)
            for layer in cache.layers:
                yield from (state for state in _states_of(layer) if state is not None)

    def positions(self) -> int:
        """How many rows all of them hold together."""
        return sum(map(_rows, self._caches.values()))

    def growth(self) -> list[Growth]:
        """What was added to runs of equal layers, since this was asked last; nothing to those that
        have states only, which may have become others."""
        grown: list[Growth] = []
        first = self._tree.layers.start
        for number, cache in self._caches.items():
            old, new = self._told[number], _lengths(cache)
            self._told[number] = new
            for index, layer in enumerate(cache.layers):
                added, place = new[index] - old[index], first + index
                if not added and (new[index] or all(s is None for s in _states_of(layer))):
                    continue
                batch = layer.keys.shape[0] if added else 1
                if grown and (grown[-1][0], *grown[-1][2:]) == (number, place, batch, added):
                    grown[-1] = (number, grown[-1][1], place + 1, batch, added)
                else:
                    grown.append((number, place, place + 1, batch, added))
        return grown


def _with_keys(cache: Any) -> list[Any]:
    """The layers that have keys and values now."""
    return [
        layer
        for layer in cache.layers
        if isinstance(layer, CacheLayerMixin) and layer.is_initialized
    ]


def _states_of(layer: Any) -> list[torch.Tensor | None]:
    """The running states of a layer that keeps such, those of convolutions first."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return []
    return [*layer.conv_states.values(), *layer.recurrent_states.values()]


def _nothing() -> BadRequest:
    return BadRequest("Nothing is cached there.", fix="Read the cache after a forward.")


def _lengths(cache: Any) -> list[int]:
    """How many positions have keys, by layer."""
    return [
        int(layer.get_seq_length()) if isinstance(layer, CacheLayerMixin) else 0
        for layer in cache.layers
    ]


def _rows(cache: Any) -> int:
    rows = (int(each.get_seq_length()) * each.keys.shape[0] for each in _with_keys(cache))
    return max(rows, default=0)
