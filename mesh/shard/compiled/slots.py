"""Keys and values of sessions in places that stay, so that graphs are bound to them once.

A bank has a few slots, each with room for the longest session. Its memory is reserved and not
taken: pages become real as positions are written, and are given back when a session ends. What lies
beyond a session's `length` does not exist: cutting back is one assignment. Knows no layers but
their number.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from dataclasses import dataclass

import torch

from mesh.errors import ContextTooLong

SLOTS = 8
"""Of one bank; more sessions than that get another bank."""

SPARE = 2
"""Positions beyond those that a session may have, for the row that keeps its last one company."""

_STEP = 256
"""Positions by which a session's memory is counted."""

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one position takes in each layer, and how many positions a session may have."""

    layers: int
    kv_heads: int
    width: int
    positions: int

    @property
    def position_bytes(self) -> int:
        """Of one position in all layers."""
        return self.layers * 2 * self.kv_heads * self.width * 4


class Bank:
    """`SLOTS` slots. Closing a session's cache, or forgetting it, frees its slot."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        each = (SLOTS, shape.kv_heads, shape.positions + SPARE, shape.width)
        self._areas = [_reserved(math.prod(each) * 4) for _ in range(2 * shape.layers)]
        tensors = [torch.frombuffer(area, dtype=torch.float32).view(each) for area in self._areas]
        self.keys, self.values = tensors[0::2], tensors[1::2]
        """For each layer (slots, kv heads, positions, width) fp32."""
        self.lengths = [0] * SLOTS
        """How many positions each slot holds."""
        self._free = list(range(SLOTS))
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        """Whether every slot is taken."""
        return not self._free

    def take(self) -> int:
        """The lowest free slot, empty."""
        with self._lock:
            slot = min(self._free)
            self._free.remove(slot)
        self.lengths[slot] = 0
        return slot

    def give(self, slot: int, written: int) -> None:
        """The slot is free again; the memory of its first `written` positions goes back."""
        self._wipe(slot, written)
        with self._lock:
            self.lengths[slot] = 0
            self._free.append(slot)

    def _wipe(self, slot: int, written: int) -> None:
        shape = self.shape
        head = (shape.positions + SPARE) * shape.width * 4
        used = min(written + SPARE, shape.positions + SPARE) * shape.width * 4
        for area in self._areas:
            for number in range(shape.kv_heads):
                start = (slot * shape.kv_heads + number) * head
                # Whole pages only: the next head may begin on the last of them.
                first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
                stop = (start + used) // mmap.PAGESIZE * mmap.PAGESIZE
                if stop > first:
                    area.madvise(mmap.MADV_DONTNEED, first, stop - first)


class SlotCache:
    """One session's slot, as `mesh.shard.kv.SessionCache` for the torch runtime."""

    in_pieces = True

    def __init__(self, bank: Bank, max_tokens: int) -> None:
        self.bank = bank
        self.slot = bank.take()
        self.max_tokens = max_tokens
        self._written = [0]
        self._end = weakref.finalize(self, _free, bank, self.slot, self._written)

    @property
    def length(self) -> int:
        """How many positions it holds."""
        return self.bank.lengths[self.slot]

    @property
    def capacity(self) -> int:
        """Positions that it has memory for."""
        most = min(self.max_tokens, self.bank.shape.positions)
        return min(-(-self._written[0] // _STEP) * _STEP, most)

    @property
    def allocated_bytes(self) -> int:
        """What they take."""
        return self.capacity * self.bank.shape.position_bytes

    def cut(self, position: int) -> None:
        """Forget everything from `position` on; a position beyond the end changes nothing."""
        self.bank.lengths[self.slot] = min(self.length, position)

    def held(self, positions: int) -> int:
        """How many of its first `positions` another may begin with."""
        return min(positions, self.length)

    def reserve(self, rows: int) -> None:
        """Make room for `rows` more positions. Raises ContextTooLong beyond `max_tokens`."""
        needed = self.length + rows
        most = min(self.max_tokens, self.bank.shape.positions)
        if needed > most:
            raise ContextTooLong(
                f"The session holds at most {most} positions; {needed} are needed.",
                fix="Open the session with more max_tokens, or shorten the prompt.",
            )
        self._written[0] = max(self._written[0], needed)

    def commit(self, rows: int) -> None:
        """The forward over `rows` positions succeeded; they count from now on."""
        self.bank.lengths[self.slot] += rows

    def copy(self, other: SlotCache, stop: int) -> None:
        """Take over the positions of `other` from `length` up to `stop`, which it holds.

        Raises ContextTooLong beyond `max_tokens`.
        """
        start, rows = self.length, stop - self.length
        self.reserve(rows)
        for mine, theirs in zip(
            (*self.bank.keys, *self.bank.values),
            (*other.bank.keys, *other.bank.values),
            strict=True,
        ):
            mine[self.slot, :, start:stop] = theirs[other.slot, :, start:stop]
        self.commit(rows)


class Banks:
    """As many banks as the sessions need."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self._banks: list[Bank] = []

    def open(self, max_tokens: int) -> SlotCache:
        """An empty cache for one session."""
        bank = next((each for each in self._banks if not each.is_full), None)
        if bank is None:
            bank = Bank(self.shape)
            self._banks.append(bank)
        return SlotCache(bank, max_tokens)


def _reserved(size: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    return mmap.mmap(-1, size, flags=flags)


def _free(bank: Bank, slot: int, written: list[int]) -> None:
    bank.give(slot, written[0])
