"""Who may take memory of the device: looked at before anything is loaded, refused before it is.

Loads are let in one after the other, each once what it needs is free beside what loaded shards were
promised for their caches. Shards that nobody uses go for it, longest idle first, and also when
memory gets scarce for another reason. Knows no links and loads nothing itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from mesh.errors import NotEnoughMemory
from mesh.models.progress import Progress
from mesh.processes.attempts import LESS
from mesh.processes.headroom import Headroom, ram
from mesh.processes.lifecycle import LoadNeed
from mesh.processes.memory_budget import CappedMemory, MemoryBudget, TakenMemory, over_cap
from mesh.types import ShardMemory

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
SCARCE_SHARE = 0.05
SCARCE_MB = (64, 1024)
"""Memory is scarce when less than this share of it is free, within these bounds."""


class Occupant(Protocol):
    """A shard, as far as its room goes."""

    @property
    def idle_s(self) -> float | None:
        """For how long nobody has used its weights; None while somebody does, or there are none."""

    @property
    def promised_mb(self) -> int:
        """What its caches may still take, beyond what they have."""

    async def evict(self) -> None:
        """Free its weights."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What was free when it was last looked at: on the device, and of main memory. Of the first,
    `promised_mb` are for the caches of shards that are loaded; `cap` is what this node's owner
    gives of it to all models and caches, None where that is not limited."""

    device: Headroom
    ram_mb: int
    promised_mb: int = 0
    cap: CappedMemory | None = None

    @property
    def free_mb(self) -> int:
        """What may be given to others."""
        free_mb = max(0, self.device.free_mb - self.promised_mb)
        return free_mb if self.cap is None else min(free_mb, self.cap.left_mb)


class Room:
    """One device's. `measure` says what is free there, given what is of main memory; `say` is told
    what begins to load and where that is counted, and None; of a `budget` all is claimed that is
    loaded, until it is `freed`."""

    def __init__(
        self,
        measure: Callable[[Headroom], Headroom],
        occupants: Callable[[], Collection[Occupant]],
        say: Callable[[LoadNeed | None, Progress | None], None],
        budget: MemoryBudget | None = None,
    ) -> None:
        self._measure = measure
        self._occupants = occupants
        self._say = say
        self._budget = budget
        self._claims: dict[str, list[TakenMemory]] = {}
        self._turn = asyncio.Lock()
        self._looked_at = float("-inf")
        self.memory: Memory | None = None
        """As it was when it was last looked at."""

    async def look(self) -> Memory:
        """What is free now."""
        self._looked_at = asyncio.get_running_loop().time()
        seen = await asyncio.to_thread(self._look)
        promised_mb = sum(each.promised_mb for each in self._occupants())
        self.memory = replace(seen, promised_mb=promised_mb)
        return self.memory

    @asynccontextmanager
    async def loading(
        self, name: str, need: ShardMemory, progress: Progress | None = None
    ) -> AsyncIterator[None]:
        """The block may load this, and counts on `progress` what is done.

        Raises NotEnoughMemory when that does not fit, whoever goes.
        """
        async with self._turn:
            memory = await self._make_room(name, need)
            self._say(LoadNeed(name, need.total_mb, memory.ram_mb), progress)
            try:
                yield
            except BaseException:
                self.freed(name)
                raise
            finally:
                self._say(None, None)

    def freed(self, name: str) -> None:
        """What was loaded first by this name takes nothing any more."""
        if claims := self._claims.get(name):
            claims.pop(0).release()
        self._looked_at = float("-inf")  # what is free now is worth another look

    async def relieve(self) -> bool:
        """Have the shard go that was idle longest if memory is scarce; whether one did.

        Looks at most every `LOOK_EVERY_S`, and not while something loads, which has looked itself.
        """
        now = asyncio.get_running_loop().time()
        if self._turn.locked() or now - self._looked_at < LOOK_EVERY_S:
            return False
        memory = await self.look()
        low, high = SCARCE_MB
        if memory.device.free_mb >= min(high, max(low, memory.device.total_mb * SCARCE_SHARE)):
            return False
        return await self._evict(f"only {memory.device.free_mb} MiB are free")

    async def _make_room(self, name: str, need: ShardMemory) -> Memory:
        while True:
            memory = await self.look()
            free_mb = memory.free_mb
            if need.total_mb <= free_mb and await self._claim(name, need.total_mb):
                return memory
            if not await self._evict(f"{name} needs {need.total_mb} MiB, {free_mb} are free"):
                raise _refusal(name, need, memory)

    async def _claim(self, name: str, mb: int) -> bool:
        """Whether the budget has room for it, which it takes then."""
        if self._budget is None:
            return True
        taking = asyncio.ensure_future(asyncio.to_thread(self._budget.take, mb))
        try:
            claim = await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(_give_back)
            raise
        if claim is not None:
            self._claims.setdefault(name, []).append(claim)
        return claim is not None

    async def _evict(self, why: str) -> bool:
        idle = [(each.idle_s, each) for each in self._occupants()]
        ranked = sorted(
            ((idle_s, each) for idle_s, each in idle if idle_s is not None),
            key=lambda pair: pair[0],
        )
        if not ranked:
            return False
        logger.info("an idle shard is unloaded: %s", why)
        await ranked[-1][1].evict()
        return True

    def _look(self) -> Memory:
        main = ram()
        cap = self._budget.standing() if self._budget is not None else None
        return Memory(self._measure(main), main.free_mb, cap=cap)


def _give_back(taking: asyncio.Future[TakenMemory | None]) -> None:
    """Of who has gone meanwhile."""
    if not taking.cancelled() and taking.exception() is None and (claim := taking.result()):
        claim.release()


def _refusal(name: str, need: ShardMemory, memory: Memory) -> NotEnoughMemory:
    have, promised_mb, cap = memory.device, memory.promised_mb, memory.cap
    needs = (
        f"{name} needs {need.total_mb} MiB ({need.weights_mb} for weights, {need.caches_mb} for"
        f" caches, {need.headroom_mb} to compute)"
    )
    if cap is not None and need.total_mb > cap.left_mb:
        return over_cap(needs, cap)
    promised = f", {promised_mb} MiB of them promised to caches here" if promised_mb else ""
    return NotEnoughMemory(
        f"{needs}; {have.free_mb} MiB are free{promised} of {have.total_mb} MiB ({have.bound}).",
        fix=LESS,
    )
