"""Checks the weights of a process's shards for as long as they are loaded, at a bounded cost.

Whoever finds its weights changed stops serving them and says why: spot checks of others would take
what it computes for a lie. The daemon has them loaded again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from mesh.shard.scheduler import Scheduler

if TYPE_CHECKING:
    from mesh.shard.weight_check import Check, Checkable

SLICE_BYTES = 4 << 20
"""A few milliseconds of one core, in which others compute on."""
SHARE = 0.0025
"""Of the time, whatever is watched, which is what it costs a decode step at most."""
IDLE_S = 1.0
"""At least, from one slice to the next: waking up for a small one costs more than the slice."""
_LONGEST_S = 60.0


Weights = Callable[[], "Iterable[Checkable]"]
"""What a shard has loaded now."""


class WeightWatch:
    """One shard's weights. The shards of a process take turns."""

    def __init__(self, weights: Weights, scheduler: Scheduler, turn: asyncio.Lock) -> None:
        self._weights = weights
        self._scheduler = scheduler
        self._turn = turn
        self._checks: WeakKeyDictionary[Checkable, Check] = WeakKeyDictionary()

    async def changed(self) -> str:
        """Wait until a weight has changed; its name."""
        while True:
            checks = [self._check(each) for each in self._weights()]
            for check in checks:
                async with self._turn:
                    name, took_s = await self._scheduler.load(partial(_timed_step, check))
                    if name is not None:
                        return name
                    await asyncio.sleep(min(max(took_s / SHARE, IDLE_S), _LONGEST_S))
            if not checks:
                await asyncio.sleep(IDLE_S)

    def _check(self, holder: Checkable) -> Check:
        if holder not in self._checks:
            self._checks[holder] = holder.weight_check()
        return self._checks[holder]


def _timed_step(check: Check) -> tuple[str | None, float]:
    started = time.perf_counter()  # on the thread: what it waited for is no cost
    return check.step(SLICE_BYTES), time.perf_counter() - started
