"""The queue of a node's jobs: what it accepts is on the disk, and ends in a result or an error.

One line per model, fair between the keys that jobs come with. A job that waits for nobody's socket
survives the daemon: it runs after the next start, and one that was running is begun once more.
Results are kept for two hours. Knows nothing of HTTP, and of a job only that a runner runs it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mesh.clock import Clock, set_within, tick
from mesh.errors import Busy, InternalError, NotFound, StorageFull
from mesh.interventions.jobs.queue.feed import Feed
from mesh.interventions.jobs.queue.keeping import KeptResults
from mesh.interventions.jobs.queue.lane import JobTicket, Lane
from mesh.interventions.jobs.queue.places import Places
from mesh.interventions.jobs.queue.printed import Printed
from mesh.interventions.jobs.queue.records import JobRecords
from mesh.interventions.jobs.queue.spool import Incoming, Spool, unstored
from mesh.interventions.jobs.queue.types import Job, QueueSettings, Status, Submission, Update
from mesh.interventions.jobs.queue.working import RunLoop, Work
from mesh.interventions.jobs.types import JobRunner
from mesh.types import ModelId, Principal, shown_id

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 2
"""How often a job is begun at most when the daemon does not live to see its end."""

KEEP_RECORDS_S = 86_400.0
"""How long one can still learn what became of a job."""

_SWEEP_S = 30.0
_POSITIONS_S = 1.0
_KILL_TIMEOUT_S = 10.0
_RECENT = 50


class JobQueue:
    """The jobs of one node. `start`, then `stop`; both once.

    `tell` gets ``job_started`` and ``job_ended`` with their fields.
    """

    def __init__(
        self,
        runner: JobRunner,
        spool: Spool,
        settings: QueueSettings,
        clock: Clock,
        tell: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self.settings = settings
        self.runner = runner
        self.spool = spool
        self.results = KeptResults(lambda: self._file, spool)
        self._clock = clock
        self._tell = tell
        self._records: JobRecords | None = None
        self._lanes: dict[ModelId, Lane] = {}
        self._printed: dict[str, Printed] = {}
        self._tickets: dict[str, JobTicket] = {}
        self._arriving: dict[str, Job] = {}
        self.uploads: dict[Incoming, Principal] = {}
        """Payloads that are being sent, and by whom."""
        self._places = Places(settings.concurrent)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False

    async def start(self) -> None:
        """Open the files and take up what was accepted earlier. Raises StorageFull, SchemaTooNew.

        Jobs whose clients waited on a socket are over; the others run.
        """
        try:
            await asyncio.to_thread(self.spool.create)
            self._records = await JobRecords.open(self.spool.root / "jobs.sqlite")
            left = await self._records.unfinished()
            waiting, kept = {job.job_id for job in left}, set(await self._records.kept())
            there = await asyncio.to_thread(self.spool.open, waiting, kept)
        except OSError as error:
            raise StorageFull(
                f"The jobs' directory {self.spool.root} cannot be used: {error}.",
                fix="Make it writable for this user, or free space on its disk.",
            ) from error
        for job in left:
            has_payload = job.job_id in there
            ticket = self._ticket(job if has_payload else replace(job, payload_bytes=0), None)
            why = _hopeless(job, has_payload=has_payload)
            if why is not None:
                await self._finish(ticket, Status.ERROR, why)
            else:
                self._admit(ticket)
        for loop in (self._sweep_for_ever, self._tell_positions_for_ever):
            self._tasks.append(asyncio.create_task(loop(), name=f"jobs: {loop.__name__}"))

    async def stop(self, grace_s: float) -> None:
        """Take no more; give running jobs `grace_s`; tell those who wait that nothing comes."""
        self._is_stopping = True
        for lane in self._lanes.values():
            lane.is_closed = True
        why = "The node is stopping. Send the job again when it is back."
        for ticket in list(self._tickets.values()):
            lane = self._lanes[ticket.job.asked.model_id]
            if ticket.job.asked.blocking and lane.line.remove(ticket.job_id):
                await self._finish(ticket, Status.ERROR, why)
        runs = [ticket.run for ticket in self._tickets.values() if ticket.run is not None]
        if runs:
            await asyncio.wait(runs, timeout=grace_s)
        for ticket in self._tickets.values():
            if ticket.job.asked.blocking and ticket.run is not None:
                ticket.ending = why
        workers = [worker for lane in self._lanes.values() for worker in lane.workers]
        for task in [*workers, *self._tasks]:
            task.cancel()
        await asyncio.gather(*workers, *self._tasks, return_exceptions=True)
        if self._records is not None:
            await self._records.close()

    # Asking

    def check_room(self, asked: Submission) -> None:
        """Whether one more job would be accepted now. Raises Busy."""
        model_id, owner, limit = asked.model_id, asked.owner, self.settings.max_queued
        if self._is_stopping:
            raise Busy("The node is stopping.", fix="Try again when it is back.")
        mine = [job.asked.owner for job in self._taken() if job.asked.model_id == model_id]
        if len(mine) >= limit or mine.count(owner) >= max(1, limit // 2):
            raise Busy(
                f"{mine.count(owner)} of your jobs and {len(mine) - mine.count(owner)} others wait"
                f" for {model_id}; there are {limit} places, half of them for one key.",
                fix="Try again when some have ended.",
            )

    def require_share(self, owner: Principal, more_bytes: int) -> None:
        """Raises StorageFull where an owner's payloads, with so much more, are over the share."""
        sizes = [job.payload_bytes for job in self._taken() if job.asked.owner == owner]
        sizes += [each.size_bytes for each, whose in self.uploads.items() if whose == owner]
        self.results.require_share(sum(sizes), more_bytes)

    async def submit(self, asked: Submission, arrived: Incoming, feed: Feed | None = None) -> Job:
        """Accept a job: one that outlives the daemon is on the disk when this returns. Its updates
        go to `feed`.

        Raises Busy when there is no place, StorageFull. `arrived` is used up in any case.
        """
        job = Job(secrets.token_hex(16), asked, self._now(), payload_bytes=arrived.size_bytes)
        try:
            self.check_room(asked)
            self.require_share(asked.owner, job.payload_bytes)
            self._arriving[job.job_id] = job
            try:
                await self._keep(job, arrived)
            finally:
                del self._arriving[job.job_id]
        except BaseException:
            self.spool.release(arrived.size_bytes)
            await asyncio.to_thread(arrived.discard)
            raise
        ticket = self._ticket(job, feed)
        self._admit(ticket)
        self._tell_positions(self._lanes[asked.model_id], job.job_id)
        return job

    async def find(self, job_id: str, owner: Principal | None) -> Job:
        """Where a job stands, also one that has ended. Raises NotFound; `owner` None sees all."""
        ticket = self._tickets.get(job_id)
        job = ticket.standing() if ticket is not None else await self._file.find(job_id)
        if job is None or owner not in (None, job.asked.owner):
            raise _no_such(job_id)
        return job

    async def kill(self, job_id: str, owner: Principal | None, why: str) -> Job:
        """End a job now. Raises NotFound when none of that id has yet to end."""
        ticket = self._tickets.get(job_id)
        if ticket is None or owner not in (None, ticket.job.asked.owner):
            raise _no_such(job_id)
        if self._lanes[ticket.job.asked.model_id].line.remove(job_id):
            await self._finish(ticket, Status.ERROR, why)
        elif ticket.run is not None:
            ticket.ending = why
            ticket.run.cancel()
        if not await set_within(ticket.ended, _KILL_TIMEOUT_S):
            raise InternalError(
                f"The job has not ended within {_KILL_TIMEOUT_S:g} s.", fix="See the node's log."
            )
        return ticket.job

    async def delivered(self, job_id: str) -> None:
        """Whoever waited has the result, and nobody else will ask: it need not be kept.

        Raises StorageFull, OSError.
        """
        job = await self._file.find(job_id)
        if job is not None and job.asked.blocking and job.result_bytes:
            await self.results.drop(replace(job, description="Its result was handed over."))

    async def overview(self, who: Principal | None) -> dict[str, list[dict[str, Any]]]:
        """``{"models": [...], "jobs": [...], "ended": [...]}``, of jobs those of `who` only.

        None sees all. A connection whose user is unknown is no account, so it sees none.
        """
        waiting = [job_id for lane in self._lanes.values() for job_id in lane.line.order()]
        running = [job_id for lane in self._lanes.values() for job_id in lane.running]
        listed = [
            self._tickets[job_id].standing()
            for job_id in [*running, *waiting]
            if job_id in self._tickets
        ]
        ended = await self._file.recent(_RECENT, who)
        return {
            "models": [
                {
                    "model": lane.model_id,
                    "running": len(lane.running),
                    "queued": len(lane.line),
                    "why_not": self.runner.why_not(lane.model_id),
                }
                for lane in self._lanes.values()
            ],
            "jobs": [job.listing() for job in listed if who in (None, job.asked.owner)],
            "ended": [job.listing() for job in ended],
        }

    async def log(self, job_id: str, owner: Principal | None) -> dict[str, Any]:
        """What a job has printed lately: ``{"id", "lines": [...], "dropped"}``.

        `dropped` counts lines before these. Of jobs that have ended, the latest have it still.
        Raises NotFound; see `find`.
        """
        await self.find(job_id, owner)
        ticket = self._tickets.get(job_id)
        printed = self._printed.get(job_id) if ticket is None else ticket.printed
        return {"id": job_id, **(printed or Printed()).shown()}

    def counts(self) -> tuple[int, int]:
        """How many jobs run, and how many wait."""
        lanes = self._lanes.values()
        return sum(len(lane.running) for lane in lanes), sum(len(lane.line) for lane in lanes)

    @property
    def unended(self) -> tuple[JobTicket, ...]:
        """The jobs that have not ended yet."""
        return tuple(self._tickets.values())

    @property
    def _file(self) -> JobRecords:
        if self._records is None:
            raise Busy("The queue has not started yet.", fix="Try again in a moment.")
        return self._records

    def _now(self) -> float:
        return self._clock.now().timestamp()

    def _taken(self) -> list[Job]:
        """The jobs that have not ended, and those that are being put on the disk."""
        return [*(ticket.job for ticket in self._tickets.values()), *self._arriving.values()]

    async def _keep(self, job: Job, arrived: Incoming) -> None:
        try:
            await asyncio.to_thread(arrived.keep, job.job_id, durable=job.asked.durable)
            try:
                await self._file.add(job)
            except BaseException:
                await asyncio.to_thread(self.spool.remove, self.spool.payload(job.job_id))
                raise
        except OSError as error:
            raise unstored("The job could not be stored", error) from error

    def _ticket(self, job: Job, feed: Feed | None) -> JobTicket:
        update = Update(job.job_id, Status.RECEIVED, "")
        ticket = JobTicket(job, feed, self._clock.monotonic(), update)
        self._tickets[job.job_id] = ticket
        self._lanes.setdefault(job.asked.model_id, Lane(job.asked.model_id))
        return ticket

    def _admit(self, ticket: JobTicket) -> None:
        lane = self._lanes[ticket.job.asked.model_id]
        lane.put(ticket)
        if not lane.workers:
            work = Work(
                self._places, self.runner, self.spool, self.results.make_room, self._file.change,
                self._finish, self._tell,
            )  # fmt: skip
            worker = RunLoop(lane, self._tickets, work, self.settings, self._clock)
            lane.workers = [
                asyncio.create_task(worker.work_for_ever(), name=f"jobs of {lane.model_id} {n}")
                for n in range(self.settings.concurrent)
            ]

    async def _finish(
        self,
        ticket: JobTicket,
        status: Status,
        description: str,
        meta: dict[str, Any] | None = None,
        result_bytes: int = 0,
    ) -> None:
        """The end of a job: written down, tidied up, told."""
        waited = {
            "wait_s": round((ticket.begun_s or self._clock.monotonic()) - ticket.admitted_s, 3)
        }
        ticket.job = replace(
            ticket.job, status=status, description=description, ended_at=self._now(),
            meta={**waited, **(meta or {})}, result_bytes=result_bytes,
        )  # fmt: skip
        job = ticket.job
        try:
            await self._file.change(job)
            self._tickets.pop(job.job_id, None)
            self._keep_printed(ticket)
        except StorageFull:
            # The client is told all the same; the sweep writes it down when the disk takes it.
            logger.exception("job=%s ended and could not be written down", job.job_id)
        ticket.tell(Update(job.job_id, status, description, job.meta, result_bytes))
        gone = [self.spool.payload(job.job_id)]
        if not result_bytes:
            gone.append(self.spool.result(job.job_id))
        try:
            await asyncio.to_thread(self.spool.remove, *gone)
        except OSError:
            logger.exception("job=%s left files, which the next start removes", job.job_id)
        self.spool.release(job.payload_bytes)
        ticket.ended.set()
        fields = {"job": shown_id(job.job_id), "model": job.asked.model_id, "status": status.value}
        self._tell("job_ended", {**fields, **job.meta})

    def _keep_printed(self, ticket: JobTicket) -> None:
        self._printed[ticket.job_id] = ticket.printed
        while len(self._printed) > _RECENT:
            del self._printed[next(iter(self._printed))]

    async def _sweep_for_ever(self) -> None:
        while True:
            try:
                await self.sweep()
            except (StorageFull, OSError):
                logger.exception("ended jobs could not be tidied up; trying again")
            await asyncio.sleep(_SWEEP_S)

    async def sweep(self) -> None:
        """Forget what nobody asks for any more."""
        for ticket in [t for t in self._tickets.values() if t.ended.is_set()]:
            await self._file.change(ticket.job)
            del self._tickets[ticket.job_id]
        await self.results.drop_old(self._now())
        await self._file.forget(self._now() - KEEP_RECORDS_S)

    async def _tell_positions_for_ever(self) -> None:
        while True:
            for lane in self._lanes.values():
                if lane.held_since_s is None or lane.running:
                    self._tell_positions(lane)
            await tick(_POSITIONS_S)

    def _tell_positions(self, lane: Lane, only: str | None = None) -> None:
        order = lane.line.order()
        for position, job_id in enumerate(order, 1):
            if only not in (None, job_id):
                continue
            said = f"Waiting for its turn: {position} of {len(order)}, {len(lane.running)} running."
            meta = {"position": position, "queued": len(order), "running": len(lane.running)}
            self._tickets[job_id].tell(Update(job_id, Status.QUEUED, said, meta))


def _hopeless(job: Job, *, has_payload: bool) -> str | None:
    """Why a job that an earlier daemon left is over; None when it is not."""
    if job.asked.blocking:
        return "The node was restarted while this job's client waited for it. Send it again."
    if job.attempts >= MAX_ATTEMPTS:
        return f"The node ended {job.attempts} times while this job ran; it is not begun again."
    return None if has_payload else "The job's payload is gone from the node's disk. Send it again."


def _no_such(job_id: str) -> NotFound:
    return NotFound(f"There is no job {job_id[:64]}.", fix="See `hearthnet queue`.", param="job_id")
