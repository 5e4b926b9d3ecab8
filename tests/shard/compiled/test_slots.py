"""Keys and values of sessions in their slots, whatever becomes of the sessions."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
import torch

from mesh.errors import ContextTooLong
from mesh.shard.compiled.slots import (
    SLOTS,
    SPARE,
    Bank,
    CacheShape,
    KeyShape,
    SeenKeys,
    SlotCache,
    StateShapes,
    most_room,
)

_LAYERS = (KeyShape(3, 8), KeyShape(1, 24, has_values=False), None, SeenKeys(0, KeyShape(3, 8)))
_POSITIONS = 700
_KINDS = ((0, "keys"), (0, "values"), (1, "keys"))


@dataclass
class _Session:
    """A session as a forward uses it, and what it has to hold."""

    bank: Bank
    random: random.Random
    most: int = _POSITIONS
    cache: SlotCache = field(init=False)
    held: list[int] = field(default_factory=list)
    """A number for each position."""
    widest: int = 0
    """So many it has had room for."""

    def __post_init__(self) -> None:
        self.cache = SlotCache(self.bank, self.most)

    def forward(self, rows: int, *, fails: bool) -> None:
        self.cache.reserve(rows)
        start, stop = len(self.held), len(self.held) + rows
        self.widest = max(self.widest, stop + SPARE)
        new = [self.random.randrange(1, 1 << 20) for _ in range(rows)]
        for layer, name in _KINDS:
            area = self.bank.tensors(layer, self.cache.slot, 0)[name]
            assert bool(torch.isfinite(area[:, :, start:]).all())
            assert not area[:, :, start + SPARE :].any()
            assert area.shape[2] >= stop + SPARE
            area[:, :, start:stop] = math.nan if fails else _of(layer, name, new)
            area[:, :, stop : stop + rows % 2] = 5.0  # of the row that keeps the last one company
        if not fails:
            self.cache.commit(rows)
            self.held += new

    def check(self) -> None:
        cache = self.cache
        assert cache.length == cache.held(1 << 20) == len(self.held)
        room = self.bank.rooms[cache.slot]
        assert cache.capacity <= min(room, self.most)
        assert room <= max(9 * self.widest / 8 + 64, 128)
        assert room <= most_room(self.most)
        assert cache.allocated_bytes == cache.capacity * (2 * 3 * 8 + 24) * 4
        for layer, name in _KINDS:
            area = self.bank.tensors(layer, cache.slot, 0)[name]
            expected = _of(layer, name, self.held).expand_as(area[:, :, : len(self.held)])
            assert torch.equal(area[:, :, : len(self.held)], expected)
        assert self.bank.tensors(3, cache.slot, 0)["keys"].data_ptr() == (
            self.bank.tensors(0, cache.slot, 0)["keys"].data_ptr()
        )


def _of(layer: int, name: str, numbers: list[int]) -> torch.Tensor:
    """(1, heads, rows, width), other numbers for each head."""
    heads, width = (3, 8) if layer == 0 else (1, 24)
    of_heads = torch.arange(heads).view(heads, 1, 1) + (7 if name == "keys" else 90) + layer
    return (torch.tensor(numbers).view(1, -1, 1) + 1000.0 * of_heads).expand(-1, -1, width)[None]


@pytest.mark.parametrize("seed", range(4))
def test_a_session_has_its_keys_and_nobody_else_s(seed: int) -> None:
    source = random.Random(seed)
    bank = Bank(CacheShape(_LAYERS, _POSITIONS))
    sessions = [_Session(bank, source, most) for most in (_POSITIONS, 130, 40)]
    for _ in range(120):
        number = source.randrange(len(sessions))
        each = sessions[number]
        match source.choice(("forward", "forward", "forward", "fail", "cut", "copy", "end")):
            case "cut":
                count = len(each.held)
                at = source.choice((count * 9 // 20, source.randrange(count + 10)))
                each.cache.cut(at)
                del each.held[at:]
            case "copy":
                stop = min(len(sessions[0].held), each.most)
                if each is not sessions[0] and stop >= len(each.held):
                    each.cache.cut(0)
                    each.cache.copy(sessions[0].cache, stop)
                    each.held = sessions[0].held[:stop]
                    each.widest = max(each.widest, stop + SPARE)
            case "end":
                most = each.most
                del each, sessions[number]
                sessions.insert(number, _Session(bank, source, most))
            case what:
                rows = min(source.choice((1, 2, 7, 60, 131)), each.most - len(each.held))
                if rows:
                    each.forward(rows, fails=what == "fail")
        for session in sessions:
            session.check()


def test_a_slot_that_comes_back_is_empty_and_the_lowest_is_taken_first() -> None:
    shape = CacheShape((KeyShape(2, 8), StateShapes((("state", (3, 5)),))), 200)
    bank = Bank(shape)
    assert shape.has_states
    caches = [SlotCache(bank, 200) for _ in range(SLOTS)]
    assert [each.slot for each in caches] == list(range(SLOTS))
    assert bank.is_full
    for each in caches:
        each.reserve(200)
        with pytest.raises(ContextTooLong, match="at most 200 positions; 201 are needed"):
            each.reserve(201)
        for name in ("keys", "values"):
            bank.tensors(0, each.slot, 0)[name].fill_(each.slot + 1)
        for copy in (0, 1):
            bank.tensors(1, each.slot, copy)["state"].fill_(each.slot + 1)
    del each, caches[3], caches[4]
    assert not bank.is_full
    for slot in range(SLOTS):
        is_free = slot in (3, 5)
        bank.rooms[slot] = 202
        found = [*bank.tensors(0, slot, 0).values(), bank.tensors(1, slot, 0)["state"]]
        for part in (*found, bank.tensors(1, slot, 1)["state"]):
            assert bool((part == (0 if is_free else slot + 1)).all())
    assert [SlotCache(bank, 8).slot, SlotCache(bank, 8).slot] == [3, 3]
