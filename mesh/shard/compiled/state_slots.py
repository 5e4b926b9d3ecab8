"""The cache of a session on compiled layers of which some keep running states, and where caches
come from.

States lie in the session's slot twice (`slots.StateArea`); which copy holds with `commit` only. How
a session goes back is said in `mesh.shard.marks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mesh.shard.compiled.slots import Bank, CacheShape, SlotCache, StateArea
from mesh.shard.marks import Marks

if TYPE_CHECKING:
    import torch


class _Current:
    """The states of a slot as they are: those of one of their two copies."""

    def __init__(self, area: StateArea) -> None:
        self._copies = area.copies
        self.copy = 0
        self.restore(None)

    def snapshot(self) -> torch.Tensor:
        """See `mesh.shard.marks.RunningStates`."""
        return self._copies[self.copy].clone()

    def restore(self, states: torch.Tensor | None) -> None:
        """See there."""
        mine = self._copies[self.copy]
        if states is None:
            mine.zero_()
        else:
            mine.copy_(states)

    def advance(self) -> None:
        """See there."""
        self.copy = 1 - self.copy

    @property
    def nbytes(self) -> int:
        """What both copies take."""
        return sum(each.nbytes for each in self._copies)


class StateSlotCache(SlotCache):
    """One session's slot, as `mesh.shard.states.StateCache` for the torch runtime."""

    in_pieces = False

    def __init__(self, bank: Bank, max_tokens: int) -> None:
        super().__init__(bank, max_tokens)
        self._states = _Current(bank.states[self.slot])
        self.marks = Marks(self._states)
        """What it goes back to."""

    @property
    def computed(self) -> int:
        return self.length - self.marks.again

    @property
    def copy_read(self) -> int:
        return self._states.copy

    @property
    def allocated_bytes(self) -> int:
        """What keys, values, states, marks and their inputs take."""
        mine = {
            id(tensor): tensor.nbytes
            for states, inputs in self.marks.kept()
            for tensor in (states, *inputs)
        }
        return super().allocated_bytes + self._states.nbytes + sum(mine.values())

    # Where it stands

    def held(self, positions: int) -> int:
        return self.marks.held(self.length, positions)

    def cut(self, position: int) -> None:
        """Forget everything from `position` on, and all where it cannot stand there."""
        if position < self.length:
            super().cut(self.marks.cut(self.length, position))

    def copy(self, other: SlotCache, stop: int) -> None:
        """As of any cache, all at once."""
        assert isinstance(other, StateSlotCache)  # noqa: S101 - of the same runtime
        super().copy(other, stop)
        self.marks.begin_as(other.marks)
        end, self.bank.lengths[self.slot] = self.length, other.length
        self.cut(end)

    # One forward

    def rows_for(self, hidden: torch.Tensor, run: Callable[[torch.Tensor], object]) -> torch.Tensor:
        """What is to be computed, from `computed` on, for a step of these rows (1, rows, hidden)
        behind the end: they come last. Rows before them that are to be computed by themselves were
        given to `run`, to be computed from `computed` on."""
        return self.marks.rows_for(self.length, hidden, run)

    def commit(self, rows: int) -> None:
        self.marks.commit(self.length, rows)
        super().commit(rows)


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
        kind = StateSlotCache if self.shape.has_states else SlotCache
        return kind(bank, max_tokens)
