"""One model's jobs while they have not ended: who waits, who runs, and since when nobody can.

Whose job is next goes round robin between their owners.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from mesh.accounts.fair_line import FairLine
from mesh.interventions.jobs.queue.feed import Feed
from mesh.interventions.jobs.queue.printed import Printed
from mesh.interventions.jobs.queue.types import Job, Status, Update
from mesh.interventions.jobs.types import JobReport
from mesh.types import BringingUp, ModelId

_ON_ITS_WAY = (Status.QUEUED, Status.PROVISIONING, Status.DEPLOYING)


@dataclass(slots=True, eq=False)
class JobTicket:
    """A job that has not ended. `ending` is why it is being ended, once somebody does; one that
    `lost_a_hop` waits for another, and is begun once more."""

    job: Job
    feed: Feed | None
    admitted_s: float
    latest: Update
    begun_s: float | None = None
    ending: str | None = None
    lost_a_hop: bool = False
    run: asyncio.Task[JobReport] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    printed: Printed = field(default_factory=Printed)

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self.job.job_id

    def tell(self, update: Update) -> None:
        """Pass on what is new, and remember where the job stands."""
        if update == self.latest:
            return
        if update.status is Status.LOG:
            self.printed.add(update.description)
        else:
            self.latest = update
        if self.feed is not None:
            self.feed.put(update)

    def standing(self) -> Job:
        """The job with what was told of it last."""
        latest = self.latest
        meta = self.job.meta if latest.meta is None else latest.meta
        return replace(self.job, status=latest.status, description=latest.description, meta=meta)


class Lane:
    """One model: its line, its running jobs and the tasks that take from the line."""

    def __init__(self, model_id: ModelId) -> None:
        self.model_id = model_id
        self.line = FairLine()
        self.running: set[str] = set()
        self.workers: list[asyncio.Task[None]] = []
        self.held_since_s: float | None = None
        self._nearest = (-1, 0)
        self.is_closed = False
        self.is_warm = False
        self._news = asyncio.Event()

    def put(self, ticket: JobTicket) -> None:
        """Have a job wait."""
        self.line.put(ticket.job.asked.owner, ticket.job_id)
        self._news.set()

    def put_back(self, ticket: JobTicket) -> None:
        """Have a job wait again, before the others."""
        self.line.put_back(ticket.job.asked.owner, ticket.job_id)
        self._news.set()

    def comes_nearer(self, coming: BringingUp) -> bool:
        """Whether the model is further on its way up than it was since its jobs wait for that; what
        failed and begins again is not."""
        now = (_ON_ITS_WAY.index(Status(coming.phase)), coming.percent or 0)
        is_nearer = now > self._nearest
        self._nearest = max(now, self._nearest)
        return is_nearer

    def release(self) -> None:
        """Its jobs can be run: nothing holds them."""
        self.held_since_s, self._nearest = None, (-1, 0)

    async def wait(self) -> None:
        """Until somebody waits; for ever once the lane is closed."""
        while self.is_closed or not self.line:
            self._news.clear()
            await self._news.wait()
