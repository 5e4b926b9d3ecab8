"""The warmed parents of this node's jobs: one per model and number format, started when needed.

A parent holds the ends of its model in memory, so one that nobody used for a while is ended. Knows
nothing of jobs beyond how many run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from mesh.interventions.jail.doctor import JailStrength
from mesh.interventions.jail.job import Jail
from mesh.types import ModelId

logger = logging.getLogger(__name__)

# Not imported: that module loads torch, which this process does without.
WARM_UP = "mesh.interventions.jobs.warming:warm"

_LOOK_AGAIN_S = 30.0
_LONGEST_S = 3600.0


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What a parent is warmed with."""

    model_id: ModelId
    weights_sha256: str
    directory: Path
    cache_dir: Path
    dtype: str

    def argument(self) -> str:
        """As `mesh.interventions.jobs.warming.warm` takes it."""
        fields = {name: str(getattr(self, name)) for name in self.__dataclass_fields__}
        return json.dumps(fields)


async def start_jail(warm_up: WarmUp, max_jobs: int) -> Jail:
    """A jail whose jobs find that model. Raises JailUnavailable."""
    return await Jail.start(WARM_UP, warm_up.argument(), max_jobs=max_jobs)


class WarmJails:
    """See the module."""

    def __init__(
        self,
        *,
        max_jobs: int,
        idle_s: float,
        start: Callable[[WarmUp, int], Awaitable[Jail]] = start_jail,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`start` makes a jail that may run so many jobs at once. Raises what `Jail.start` does."""
        self._start = start
        self._monotonic = monotonic
        self._max_jobs = max_jobs
        self._idle_s = idle_s
        self._jails: dict[WarmUp, Jail] = {}
        self._next_looks: dict[WarmUp, tuple[float, float]] = {}
        """When a jail with weak walls is examined again, and how long after the last time."""
        self._starting: defaultdict[WarmUp, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._idle: dict[WarmUp, asyncio.TimerHandle] = {}
        self._stopping: set[asyncio.Task[None]] = set()

    @property
    def live(self) -> tuple[Jail, ...]:
        """Those that are there now."""
        return tuple(self._jails.values())

    async def get(self, warm_up: WarmUp) -> Jail:
        """The live jail of that model; started, which takes seconds, when there is none.

        Raises JailUnavailable.
        """
        async with self._starting[warm_up]:
            jail = self._jails.get(warm_up)
            if jail is not None and not jail.alive:
                logger.warning("the jail of %s is gone; starting another", warm_up.model_id)
                await jail.stop()
                jail = None
            if jail is None:
                jail = await self._start(warm_up, self._max_jobs)
                self._jails[warm_up] = jail
                self._examined(warm_up, jail, _LOOK_AGAIN_S)
            elif jail.report is None or jail.report.level is not JailStrength.OS:
                due_s, wait_s = self._next_looks[warm_up]
                if self._monotonic() >= due_s:
                    # What found them weak may have been a bad moment of the machine.
                    await jail.examine()
                    self._examined(warm_up, jail, min(2 * wait_s, _LONGEST_S))
        self._use(warm_up)
        return jail

    async def close(self) -> None:
        """End every parent and with them every job."""
        for timer in self._idle.values():
            timer.cancel()
        jails, self._jails = list(self._jails.values()), {}
        await asyncio.gather(*(jail.stop() for jail in jails), *self._stopping)

    def _examined(self, warm_up: WarmUp, jail: Jail, wait_s: float) -> None:
        self._next_looks[warm_up] = (self._monotonic() + wait_s, wait_s)
        level = jail.report.level if jail.report is not None else "unknown"
        logger.info("jail of %s in %s: level=%s", warm_up.model_id, warm_up.dtype, level)

    def _use(self, warm_up: WarmUp) -> None:
        timer = self._idle.pop(warm_up, None)
        if timer is not None:
            timer.cancel()
        loop = asyncio.get_running_loop()
        self._idle[warm_up] = loop.call_later(self._idle_s, self._end_if_idle, warm_up)

    def _end_if_idle(self, warm_up: WarmUp) -> None:
        jail = self._jails.get(warm_up)
        if jail is None:
            return
        if jail.running:
            self._use(warm_up)
            return
        del self._jails[warm_up]
        task = asyncio.create_task(jail.stop(), name=f"end idle jail {warm_up.model_id}")
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)
