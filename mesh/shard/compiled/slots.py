"""Keys and values of sessions, in memory that graphs read and write where it is.

A bank has a few slots, each with memory for the longest session. It is reserved and not taken:
pages become real as positions are written, and are given back when a session ends. In a slot the
keys of one head lie behind those of another, with room for a few more positions than there are, so
that attention multiplies them where they lie; where a session outgrows it, the heads move apart.
What lies beyond a session's `length` does not exist: cutting back is one assignment. Layers that
keep running states have a `StateArea` in each slot instead. Knows no layers but what each of them
caches.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from mesh.errors import ContextTooLong
from mesh.models.pages import NORESERVE

SLOTS = 8
"""Of one bank; more sessions than that get another bank."""

SPARE = 2
"""Positions beyond those that a session may have, for the row that keeps its last one company."""

FEWEST_ROWS = 128
"""Of keys that there is memory for: attention over latents and over wide heads takes no fewer, as
matrices of fewer rows are multiplied in another order."""

WIDE = 128
"""Heads wider than this are."""

_ROOM = 64
"""Positions that a head has room for at least, and by which that grows."""

_ALIGNED = 16
"""Numbers to which each state is aligned: a line of the processor's cache."""

_GIVE_BACK = mmap.MADV_FREE if sys.platform == "darwin" else mmap.MADV_DONTNEED
"""On macOS the other is a hint that keeps the pages; after the first they may hold what they held.
"""

Tensors = Mapping[str, torch.Tensor]
"""By the names that the graph of a layer has for them."""


@dataclass(frozen=True, slots=True)
class KeyShape:
    """What one position takes in a layer with keys and, unless keys are values as well, values."""

    heads: int
    width: int
    has_values: bool = True

    @property
    def is_filled_up(self) -> bool:
        """Whether attention takes `FEWEST_ROWS` also of a session that is shorter."""
        return self.width > WIDE or not self.has_values

    @property
    def names(self) -> tuple[str, ...]:
        """What the graph of the layer calls them."""
        return ("keys", "values") if self.has_values else ("keys",)

    @property
    def position_bytes(self) -> int:
        """Of one position."""
        return len(self.names) * self.heads * self.width * 4


@dataclass(frozen=True, slots=True)
class StateShapes:
    """The shapes of what a layer keeps instead, by the names that its graph has for them."""

    of: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """Of a layer that caches nothing: the number of that whose keys and values it sees, and their
    shape."""

    layer: int
    of: KeyShape


Cached = KeyShape | StateShapes | SeenKeys
"""What a layer caches, or sees of what another has."""


@dataclass(frozen=True)
class CacheShape:
    """What each layer caches (None: nothing), and how many positions a session may have."""

    layers: tuple[Cached | None, ...]
    positions: int

    @cached_property
    def position_bytes(self) -> int:
        """Of one position in all layers."""
        return sum(each.position_bytes for each in self.layers if isinstance(each, KeyShape))

    @property
    def least_room(self) -> int:
        """For how many positions each head has room at least."""
        keys = (each for each in self.layers if isinstance(each, KeyShape))
        return FEWEST_ROWS if any(each.is_filled_up for each in keys) else _ROOM

    @property
    def has_states(self) -> bool:
        """Whether there are layers that keep some."""
        return any(isinstance(each, StateShapes) for each in self.layers)


class StateArea:
    """The running states of one slot, twice: a forward reads one copy and writes the other, so that
    one that fails half-way has changed nothing."""

    def __init__(self, shape: CacheShape) -> None:
        places, size = [], 0
        for number, layer in enumerate(shape.layers):
            for name, dims in layer.of if isinstance(layer, StateShapes) else ():
                places.append((number, name, dims, size))
                size += -(-math.prod(dims) // _ALIGNED) * _ALIGNED
        self._memory = _reserved(2 * size * 4)
        self.copies = _numbers(self._memory, (2, size)).unbind()
        """Each as one row of numbers."""
        self.tensors: tuple[dict[int, dict[str, torch.Tensor]], ...] = ({}, {})
        """Those of each copy, by layer and name."""
        for copy, found in zip(self.copies, self.tensors, strict=True):
            for number, name, dims, start in places:
                part = copy[start : start + math.prod(dims)].view(dims)
                found.setdefault(number, {})[name] = part

    def wipe(self) -> None:
        """Give the memory back."""
        self._memory.madvise(_GIVE_BACK)


class Bank:
    """`SLOTS` slots. Closing a session's cache, or forgetting it, frees its slot."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self._keys = {
            number: _KeyArea(layer, shape.positions)
            for number, layer in enumerate(shape.layers)
            if isinstance(layer, KeyShape)
        }
        self.states = [StateArea(shape) for _ in range(SLOTS)] if shape.has_states else []
        """Those of each slot."""
        self.lengths = [0] * SLOTS
        """How many positions each slot holds."""
        self.rooms = [shape.least_room] * SLOTS
        """For how many positions each head of a slot has room. What nobody wrote is zero there."""
        self._free = list(range(SLOTS))
        # A cache in a cycle may be found, and give its slot back, on the thread that takes one.
        self._lock = threading.RLock()

    @property
    def is_full(self) -> bool:
        """Whether every slot is taken."""
        return not self._free

    def keys(self, slot: int) -> Iterator[torch.Tensor]:
        """Keys and values of each layer that has some, (1, heads, room, width) fp32."""
        for area in self._keys.values():
            yield from area.tensors(slot, self.rooms[slot]).values()

    def tensors(self, layer: int, slot: int, copy: int) -> Tensors:
        """What a layer caches in a slot: its ``keys`` and ``values`` (1, heads, room, width), or
        those that it sees, or its states in one of their two copies."""
        cached = self.shape.layers[layer]
        area = self._keys.get(cached.layer if isinstance(cached, SeenKeys) else layer)
        if area is None:
            return self.states[slot].tensors[copy][layer]
        return area.tensors(slot, self.rooms[slot])

    def take(self) -> int:
        """The lowest free slot, empty."""
        with self._lock:
            slot = min(self._free)
            self._free.remove(slot)
        self.lengths[slot] = 0
        return slot

    def make_room(self, slot: int, positions: int, most: int) -> None:
        """Let each head of a slot have room for `positions`, and for no more than `most`."""
        room = self.rooms[slot]
        if positions <= room:
            return
        self.rooms[slot] = min(room_for(positions, self.shape.least_room), most)
        for area in self._keys.values():
            area.spread(slot, self.lengths[slot], room, self.rooms[slot])

    def give(self, slot: int) -> None:
        """The slot is free again; its memory goes back."""
        for area in self._keys.values():
            area.wipe(slot, self.rooms[slot])
        if self.states:
            self.states[slot].wipe()
        with self._lock:
            self.lengths[slot], self.rooms[slot] = 0, self.shape.least_room
            self._free.append(slot)


def room_for(positions: int, least: int) -> int:
    """How many positions heads have room for that need it for so many: an eighth more at most,
    `least` at least, and few different numbers, so that little is bound."""
    step = max(_ROOM, 1 << max(0, positions.bit_length() - 4))
    return max(least, -(-positions // step) * step)


class _KeyArea:
    """Keys and values of one layer, for all slots of a bank."""

    def __init__(self, shape: KeyShape, positions: int) -> None:
        self._heads, self._width = shape.heads, shape.width
        size = shape.heads * most_room(positions) * shape.width * 4
        pages = -(-size // mmap.PAGESIZE)  # of a slot; none has a part of another's
        self._slot_bytes = pages * mmap.PAGESIZE
        self._memory = {name: _reserved(SLOTS * self._slot_bytes) for name in shape.names}
        dims = SLOTS, self._slot_bytes // 4
        self._numbers = {name: _numbers(each, dims) for name, each in self._memory.items()}

    def tensors(self, slot: int, room: int) -> dict[str, torch.Tensor]:
        """By name, (1, heads, room, width)."""
        return {name: self._apart(each[slot], room)[None] for name, each in self._numbers.items()}

    def spread(self, slot: int, held: int, room: int, wider: int) -> None:
        """Give heads that have `room` a `wider` one; the first `held` positions stay."""
        for each in self._numbers.values():
            before, behind = self._apart(each[slot], room), self._apart(each[slot], wider)
            for head in reversed(range(self._heads)):  # so that none is written over
                behind[head, :held] = before[head, :held].clone()
                behind[head, held:] = 0.0

    def wipe(self, slot: int, room: int) -> None:
        """Give the memory of a slot whose heads have so much room back; zeros are left."""
        used = self._heads * room * self._width
        start = slot * self._slot_bytes
        for name, memory in self._memory.items():
            if _GIVE_BACK != mmap.MADV_DONTNEED:
                self._numbers[name][slot, :used] = 0.0
            memory.madvise(_GIVE_BACK, start, -(-used * 4 // mmap.PAGESIZE) * mmap.PAGESIZE)

    def _apart(self, numbers: torch.Tensor, room: int) -> torch.Tensor:
        """(heads, room, width) of a slot's numbers."""
        return numbers[: self._heads * room * self._width].view(self._heads, room, self._width)


def most_room(positions: int) -> int:
    """Of a head where a session may have so many positions."""
    return max(positions + SPARE, FEWEST_ROWS)


class SlotCache:
    """One session's slot, as `mesh.shard.kv.SessionCache` for the torch runtime."""

    in_pieces = True
    short = 0

    def __init__(self, bank: Bank, max_tokens: int) -> None:
        self.bank = bank
        self.slot = bank.take()
        self.max_tokens = max_tokens
        self._written = 0
        self._end = weakref.finalize(self, bank.give, self.slot)

    @property
    def length(self) -> int:
        """How many positions it holds."""
        return self.bank.lengths[self.slot]

    @property
    def computed(self) -> int:
        """Where the next forward begins to write."""
        return self.length

    @property
    def copy_read(self) -> int:
        """Which copy of its slot's states the next forward reads; it writes the other."""
        return 0

    @property
    def capacity(self) -> int:
        """Positions that it has memory for."""
        return min(self.bank.rooms[self.slot], self._most) if self._written else 0

    @property
    def allocated_bytes(self) -> int:
        """What they take."""
        return self.capacity * self.bank.shape.position_bytes

    @property
    def _most(self) -> int:
        """How many it may hold: it may be given more while it is open."""
        return min(self.max_tokens, self.bank.shape.positions)

    def cut(self, position: int) -> None:
        """Forget everything from `position` on; a position beyond the end changes nothing."""
        self.bank.lengths[self.slot] = min(self.length, position)

    def held(self, positions: int) -> int:
        """How many of its first `positions` another may begin with."""
        return min(positions, self.length)

    def reserve(self, rows: int) -> None:
        """Make room for `rows` more positions. Raises ContextTooLong beyond `max_tokens`."""
        needed = self.length + rows
        if needed > self._most:
            raise ContextTooLong(
                f"The session holds at most {self._most} positions; {needed} are needed.",
                fix="Open the session with more max_tokens, or shorten the prompt.",
            )
        # Attention takes what lies behind a session's end, or behind the piece of a prompt that is
        # computed, and what is no number is none times nothing.
        if self.length < self._written:
            for each in self.bank.keys(self.slot):
                each[:, :, self.length : self._written + SPARE] = 0.0
        self.bank.make_room(self.slot, needed + SPARE, most_room(self._most))
        self._written = needed

    def commit(self, rows: int) -> None:
        """The forward over `rows` positions succeeded; they count from now on."""
        self.bank.lengths[self.slot] += rows

    def copy(self, other: SlotCache, stop: int) -> None:
        """Take over the positions of `other` from `length` up to `stop`, which it holds.

        Raises ContextTooLong beyond `max_tokens`.
        """
        start, rows = self.length, stop - self.length
        self.reserve(rows)
        areas = self.bank.keys(self.slot), other.bank.keys(other.slot)
        for mine, theirs in zip(*areas, strict=True):
            mine[:, :, start:stop] = theirs[:, :, start:stop]
        self.bank.lengths[self.slot] = stop


def _reserved(size: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    return mmap.mmap(-1, size, flags=flags)


def _numbers(memory: mmap.mmap, dims: Sequence[int]) -> torch.Tensor:
    """As fp32. Whoever asks for it may compute without gradients, and who writes to it not."""
    with torch.inference_mode(mode=False):
        return torch.frombuffer(memory, dtype=torch.float32).view(*dims)
