"""Keys and values of all sessions of a span in memory that stays where it is.

Each session has one region: as many positions, behind each other, as it has room for. Graphs that
were captured over the pool find a row's keys by numbers that they are given (where the region
starts, and how much of it counts). Regions move when others need room; the memory itself is another
one, with a higher `generation`, only after it has grown. What lies beyond a session's `length` does
not exist. Not thread-safe but for caches that are dropped: those may be so from anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch

from mesh.shard.kv import OneSession, roomier

_FIRST_POSITIONS = 4096
"""Of a pool that nobody has asked for more."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What one position takes: keys and values (kv_heads, width) of `dtype` in each layer."""

    layers: int
    kv_heads: int
    width: int
    dtype: torch.dtype

    @property
    def position_bytes(self) -> int:
        """Of one position in all layers."""
        return 2 * self.layers * self.kv_heads * self.width * self.dtype.itemsize


class Pool:
    """The memory, and which regions of it are taken."""

    def __init__(self, shape: PoolShape, device: torch.device, planned: int) -> None:
        """`planned` positions in all are what sessions may have; it grows to those as they do."""
        self.shape = shape
        self.positions = 0
        """How many there are for sessions. One more is nobody's: `scratch`."""
        self.generation = 0
        """Counts up when the memory is another one."""
        nothing = torch.zeros((1, shape.kv_heads, shape.width), dtype=shape.dtype, device=device)
        self.keys = [nothing] * shape.layers
        self.values = [nothing] * shape.layers
        """For each layer (positions and `scratch`, kv heads, width)."""
        self._device = device
        self._planned = planned
        self._caches: WeakSet[PoolCache] = WeakSet()

    @property
    def scratch(self) -> int:
        """Where rows that nobody wants are written."""
        return self.positions

    def share(self, region: int) -> int:
        """The positions that a region stands for, of all that the pool has."""
        taken = sum(cache.capacity for cache in self._caches)
        return region * self.positions // taken if taken else 0

    def open(self, max_tokens: int) -> PoolCache:
        """An empty cache of one session, which has no region yet."""
        cache = PoolCache(self, max_tokens)
        self._caches.add(cache)
        return cache

    @torch.inference_mode()
    def make_room(self, cache: PoolCache, positions: int) -> None:
        """Give `cache` a region of so many positions, more than it has; what it holds comes along.

        Nothing has changed when this raises: the device had no room.
        """
        taken = sorted((each for each in self._caches if each.capacity), key=lambda c: c.start)
        start = self._gap(taken, cache, positions)
        if start is None:
            # What `cache` holds is in its old region until it is in the new one.
            needed = sum(each.capacity for each in taken) + positions
            if needed > self.positions:
                self._grow(needed)
            self._close_ranks(taken)
            start = self._gap(taken, cache, positions)
            assert start is not None  # noqa: S101 - all that is free lies together
        if start != cache.start:
            self._move(cache.start, start, cache.length)
        cache.start, cache.capacity = start, positions

    def _gap(self, taken: list[PoolCache], cache: PoolCache, positions: int) -> int | None:
        """Where a region for `cache` can begin: where its own does, or else where nobody's is."""
        stops = [each.start for each in taken if each.start > cache.start]
        if cache.capacity and cache.start + positions <= min(stops, default=self.positions):
            return cache.start
        begin = 0
        for each in taken:
            if each.start - begin >= positions:
                return begin
            begin = each.start + each.capacity
        return begin if self.positions - begin >= positions else None

    def _close_ranks(self, taken: list[PoolCache]) -> None:
        begin = 0
        for each in taken:
            if each.start != begin:
                self._move(each.start, begin, each.length)
                each.start = begin
            begin += each.capacity

    def _move(self, old: int, new: int, positions: int) -> None:
        for memory in (*self.keys, *self.values):
            # A copy of its own: both places may overlap.
            memory[new : new + positions] = memory[old : old + positions].clone()

    def _grow(self, positions: int) -> None:
        """One layer after the other, so that only one of them is held twice."""
        most = max(positions, self._planned)
        capacity = min(most, max(_FIRST_POSITIONS, positions, 2 * self.positions))
        shape = capacity + 1, self.shape.kv_heads, self.shape.width
        # Also where the device has no room for all: those layers that have grown lie elsewhere.
        self.generation += 1
        for memory in (self.keys, self.values):
            for index in range(self.shape.layers):
                new = torch.zeros(shape, dtype=self.shape.dtype, device=self._device)
                new[: self.positions] = memory[index][: self.positions]
                memory[index] = new
        self.positions = capacity


class PoolCache(OneSession):
    """One session's region, as `mesh.shard.kv.SessionCache`."""

    def __init__(self, pool: Pool, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self.pool = pool
        self.start = 0
        self.capacity = 0
        """Positions that it has memory for, from `start` on."""

    @property
    def allocated_bytes(self) -> int:
        """What they take, with a share of what the pool has and nobody yet."""
        return self.pool.share(self.capacity) * self.pool.shape.position_bytes

    def reserve(self, rows: int) -> None:
        """Make room for `rows` more positions. Raises ContextTooLong beyond `max_tokens`."""
        room = roomier(self.capacity, self.length + rows, self.max_tokens)
        if room > self.capacity:
            self.pool.make_room(self, room)

    @torch.inference_mode()
    def copy(self, other: PoolCache, stop: int) -> None:
        """Take over the positions of `other` from this one's `length` up to `stop`, which it holds.

        Raises ContextTooLong beyond `max_tokens`.
        """
        rows = stop - self.length
        self.reserve(rows)
        mine, theirs = self.start + self.length, other.start + self.length
        for memory in (*self.pool.keys, *self.pool.values):
            memory[mine : mine + rows] = memory[theirs : theirs + rows]
        self.commit(rows)

    def update(
        self,
        key_states: torch.Tensor,  # (1, heads, rows, width)
        value_states: torch.Tensor,
        layer_idx: int,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write behind the end; returns (1, heads, length + rows, width) views."""
        begin, rows = self.start + self.length, key_states.shape[2]
        views = []
        for memory, states in (
            (self.pool.keys[layer_idx], key_states),
            (self.pool.values[layer_idx], value_states),
        ):
            memory[begin : begin + rows] = states[0].transpose(0, 1)
            views.append(memory[self.start : begin + rows].transpose(0, 1)[None])
        return views[0], views[1]
