"""What ended jobs left on the disk: for how long, and for whom it has to go before that.

Whoever comes first may fill all of the jobs' disk, as long as nobody else needs any. Then the
*share* of each is the whole divided by all who have results there or ask; whoever is below it gets
room from whoever is furthest above, the oldest results first. What waiting jobs came with goes for
nobody, so that of one owner takes half of the disk at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from mesh.errors import StorageFull
from mesh.interventions.jobs.queue.records import JobRecords
from mesh.interventions.jobs.queue.spool import Spool, unstored
from mesh.interventions.jobs.queue.types import Job, Status
from mesh.types import Principal, shown_id
from mesh.units import data_size

logger = logging.getLogger(__name__)

KEEP_RESULTS_S = 7200.0
_TOO_OLD = "Its result was deleted two hours after it ended. Send the job again."
_GAVE_WAY = (
    "Its result was deleted: somebody else's job needed room, and yours had more than their share"
    " of this node's disk. Send the job again, and fetch results soon."
)
_AT_ONCE = 64


class KeptResults:
    """The results of a queue's ended jobs."""

    def __init__(self, records: Callable[[], JobRecords], spool: Spool) -> None:
        """`records` are there once the queue has started; until then it raises Busy."""
        self._records = records
        self._spool = spool
        self._one_at_a_time = asyncio.Lock()

    async def drop(self, job: Job) -> None:
        """Delete a job's result, if it is still there; the rest of what is kept of it becomes what
        `job` says. Raises StorageFull, OSError."""
        async with self._one_at_a_time:
            known = await self._records().find(job.job_id)
            if known is not None and known.result_bytes:
                await self._drop(job)

    async def drop_old(self, now: float) -> None:
        """Delete some that are older than two hours at the time `now`. Raises as `drop`."""
        for job in await self._records().outdated(now - KEEP_RESULTS_S, _AT_ONCE):
            await self.drop(replace(job, status=Status.ERROR, description=_TOO_OLD))

    async def make_room(self, owner: Principal, size_bytes: int) -> bool:
        """Have so much room for something of `owner`'s, if others have more than their share and
        the owner would not; whether there is room. Raises StorageFull."""
        async with self._one_at_a_time:
            while not self._spool.fits(size_bytes):
                gone = await self._over_its_share(owner, size_bytes)
                if gone is None:
                    return False
                await self._give_way(gone, owner)
            return True

    def require_share(self, waiting_bytes: int, more_bytes: int) -> None:
        """Raises StorageFull when somebody's waiting jobs may not take so much more."""
        most = self._spool.budget_bytes // 2
        if waiting_bytes + more_bytes > most:
            raise StorageFull(
                f"Your jobs that wait here take {data_size(waiting_bytes)} of disk, this one"
                f" {data_size(more_bytes)}; {data_size(most)} are for one key.",
                fix="Send it again when some have ended.",
            )

    async def _drop(self, job: Job) -> None:
        await self._records().change(replace(job, result_bytes=0))
        await asyncio.to_thread(self._spool.remove, self._spool.result(job.job_id))
        self._spool.release(job.result_bytes)

    async def _give_way(self, gone: Job, to: Principal) -> None:
        names = shown_id(gone.job_id), gone.asked.owner, to
        logger.info("the result of job=%s of %s makes room for %s", *names)
        try:
            await self._drop(replace(gone, status=Status.ERROR, description=_GAVE_WAY))
        except OSError as error:
            raise unstored("No room could be made for a job", error) from error

    async def _over_its_share(self, owner: Principal, size_bytes: int) -> Job | None:
        """The oldest result of whoever has most, where that is more than falls to each."""
        held = await self._records().held()
        share = self._spool.budget_bytes // len(held.keys() | {owner})
        if not held or held.get(owner, 0) + size_bytes > share:
            return None
        most = max(held, key=lambda each: held[each])
        return await self._records().oldest(most) if held[most] > share else None
