"""What a shard is said to take before it is loaded is what it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from mesh.errors import NotEnoughMemory
from mesh.models.load import load_span
from mesh.models.progress import Progress
from mesh.processes.headroom import Headroom
from mesh.processes.lifecycle import LoadNeed
from mesh.processes.memory_budget import MemoryBudget
from mesh.shard.footprint import computing_bytes, estimate, position_bytes
from mesh.shard.kv import SessionCache
from mesh.shard.room import Room
from mesh.shard.torch_runtime import TorchRuntime
from mesh.types import LayerRange, ShardMemory
from tests.checkpoints import FAMILIES, MORE_FAMILIES
from tests.shard.spans import CPU, HIDDEN, checkpoint, rows, step

SPAN = LayerRange(2, 4)
"""The last is wider than the others in Gemma 4."""


def test_scores_of_positions_that_are_chosen_from_are_counted() -> None:
    """An indexer scores all positions for each row and each of its heads, in fp32."""
    chosen, plain = (computing_bytes(checkpoint(f), 64, 500) for f in ("axk2", "deepseek_v2"))
    assert chosen - plain >= 64 * 500 * 16 * 4


def test_scores_that_are_spelt_out_are_counted() -> None:
    """BLOOM adds to those of each head what stands for positions before it goes on."""
    spelt_out, fused = (computing_bytes(checkpoint(f), 64, 500) for f in ("bloom", "gpt2"))
    assert spelt_out - fused >= 2 * 64 * 500 * 4 * 4


@pytest.mark.parametrize("family", FAMILIES + MORE_FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_caches_are_as_large_as_was_said(family: str, dtype: torch.dtype) -> None:
    manifest = checkpoint(family)
    loaded = load_span(manifest, SPAN, dtype=dtype, device=CPU)
    span = TorchRuntime(loaded, device=CPU, dtype=dtype)
    need = estimate(manifest, SPAN, dtype.itemsize, kv_tokens=1 << 20, rows=256, streams=0)
    assert span.weight_bytes / 2**20 <= need.weights_mb < span.weight_bytes / 2**20 + 1.1

    cache = span.new_cache(256)
    step(span, cache, 0, rows(7).to(dtype))
    by_length = SessionCache.allocated_bytes.__get__(cache)  # states do not grow
    taken = by_length // 256
    said = position_bytes(manifest, SPAN, dtype.itemsize)
    assert need.caches_mb == said
    assert taken == said
    assert rows(1).shape[-1] == HIDDEN


def test_a_larger_share_needs_more() -> None:
    manifest = checkpoint()
    small = estimate(manifest, LayerRange(0, 1), 4, kv_tokens=1024, rows=256)
    large = estimate(manifest, LayerRange(0, 4), 4, kv_tokens=1 << 20, rows=256)
    assert small.total_mb < large.total_mb
    assert small.caches_mb <= small.headroom_mb, "a small shard needs room to compute above all"


@dataclass
class Guest:
    """A shard that takes what it says and is idle for as long as it says; an `Occupant`."""

    name: str
    held_mb: int
    idle_s: float | None = None
    promised_mb: int = 0
    evicted: Callable[[], None] = lambda: None

    async def evict(self) -> None:
        self.held_mb, self.promised_mb, self.idle_s = 0, 0, None
        self.evicted()


class House:
    """A device of 1000 MiB."""

    def __init__(self, *guests: Guest, budget: MemoryBudget | None = None) -> None:
        self.guests = guests
        self.said: list[str | None] = []
        self.room = Room(self._measure, lambda: guests, self._hear, budget)

    def _measure(self, _: Headroom) -> Headroom:
        return Headroom(1000 - sum(guest.held_mb for guest in self.guests), 1000, "the toy")

    def _hear(self, load: LoadNeed | None, _progress: Progress | None) -> None:
        self.said.append(None if load is None else load.name)

    async def load(self, need_mb: int) -> None:
        async with self.room.loading("new", ShardMemory(need_mb - 30, 20, 10)):
            pass

    @property
    def gone(self) -> list[str]:
        return [guest.name for guest in self.guests if not guest.held_mb]


async def test_who_was_idle_longest_goes_first_and_no_more_than_have_to() -> None:
    house = House(
        Guest("busy", 200), Guest("idle", 200, 5.0), Guest("idler", 200, 50.0),
        Guest("idlest", 200, 500.0),
    )  # fmt: skip
    await house.load(200)
    assert house.gone == []
    await house.load(201)
    assert house.gone == ["idlest"]
    await house.load(600)
    assert house.gone == ["idler", "idlest"]
    with pytest.raises(NotEnoughMemory) as refused:
        await house.load(801)
    assert "new needs 801 MiB (771 for weights, 20 for caches, 10 to compute)" in str(refused.value)
    assert "800 MiB are free of 1000 MiB (the toy)" in str(refused.value)
    assert "--layers" in refused.value.fix
    assert house.said == ["new", None] * 3, "what is refused does not begin"


async def test_what_was_promised_to_caches_is_not_given_away() -> None:
    house = House(Guest("busy", 200, promised_mb=300))
    await house.load(500)
    with pytest.raises(NotEnoughMemory, match="300 MiB of them promised to caches here"):
        await house.load(501)
    house.guests[0].idle_s = 1.0
    await house.load(1000)
    assert house.gone == ["busy"]


async def test_loads_are_let_in_one_after_the_other() -> None:
    house = House(guest := Guest("first", 0))
    entered = asyncio.Event()

    async def first() -> None:
        async with house.room.loading("first", ShardMemory(600)):
            entered.set()
            await asyncio.sleep(0.05)
            guest.held_mb = 600

    task = asyncio.create_task(first())
    await entered.wait()
    with pytest.raises(NotEnoughMemory, match="400 MiB are free"):
        await house.load(600)
    await task


@pytest.mark.parametrize(("used_mb", "goes"), [(900, []), (960, ["idle"])])
async def test_scarce_memory_costs_the_idle_their_place(used_mb: int, goes: list[str]) -> None:
    house = House(Guest("busy", used_mb - 50), Guest("idle", 50, 9.0))
    assert await house.room.relieve() is bool(goes)
    assert house.gone == goes
    assert not await house.room.relieve(), "not again at once"


async def test_beyond_what_the_owner_gives_nothing_is_loaded_however_much_is_free(
    tmp_path: Path,
) -> None:
    budget = MemoryBudget(tmp_path, 300, "max_memory")
    house = House(guest := Guest("new", 0), budget=budget)
    await house.load(200)
    guest.held_mb = 150  # what it takes in the end is less, what it may take stays its own
    with pytest.raises(NotEnoughMemory) as refused:
        await house.load(101)
    assert "100 MiB are left of the 300 MiB" in str(refused.value)
    assert "(max_memory)" in str(refused.value)
    with pytest.raises(ValueError, match="a broken file"):
        async with house.room.loading("other", ShardMemory(100)):
            raise ValueError("a broken file")
    left_mb = (await asyncio.to_thread(budget.standing)).left_mb
    assert left_mb == 100, "a load that failed has nothing"
    assert (await house.room.look()).free_mb == 100
    house.room.freed("new")
    await house.load(300)


async def test_who_is_idle_makes_room_within_what_the_owner_gives(tmp_path: Path) -> None:
    guest = Guest("first", 0)
    house = House(guest, budget=MemoryBudget(tmp_path, 300, "max_memory"))
    async with house.room.loading("first", ShardMemory(200)):
        guest.held_mb = 200
    assert not await house.room.relieve(), "within its bounds nobody has to go"
    guest.idle_s, guest.evicted = 5.0, lambda: house.room.freed("first")
    await house.load(250)
    assert house.gone == ["first"]


async def test_who_gives_up_while_room_is_claimed_leaves_nothing_claimed(tmp_path: Path) -> None:
    budget = MemoryBudget(tmp_path, 300, "max_memory")
    house = House(budget=budget)
    for wait_s in (0.0, 0.001, 0.002, 0.004):
        loading = asyncio.create_task(house.load(200))
        await asyncio.sleep(wait_s)
        loading.cancel()
        await asyncio.wait([loading])
        house.room.freed("new")  # where it was in time
    async with asyncio.timeout(5):
        while (await asyncio.to_thread(budget.standing)).taken_mb:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
