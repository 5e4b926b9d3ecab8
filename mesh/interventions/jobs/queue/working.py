"""Taking jobs from a model's line and running them, one after the other.

Decides when a job is begun, begun later or over. How it is run is the runner's business, what is
kept of it the queue's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

from mesh.clock import Clock
from mesh.errors import Busy, Forbidden, JobFailed, MeshError, NoRoute, StorageFull
from mesh.interventions.jobs.queue.lane import JobTicket, Lane
from mesh.interventions.jobs.queue.places import Places
from mesh.interventions.jobs.queue.spool import Spool
from mesh.interventions.jobs.queue.types import Job, QueueSettings, Status, Update
from mesh.interventions.jobs.types import JobHearer, JobReport, JobRunner, JobSpec
from mesh.types import BringingUp, Principal, shown_id

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_LONGEST_BUSY_PAUSE_S = 15.0
"""Asking full shards costs them and us more than looking whether somebody serves the model."""

_COMING_PAUSE_S = 0.2

_CANCEL_TIMEOUT_S = 5.0
_UNFORESEEN = "The node failed in a way nobody foresaw; its log has the details."


class Finish(Protocol):
    """The end of a job: written down, tidied up, told."""

    async def __call__(
        self,
        ticket: JobTicket,
        status: Status,
        description: str,
        meta: dict[str, Any] | None = None,
        result_bytes: int = 0,
    ) -> None:
        """`result_bytes` of a result stay; where that is 0, none does."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a worker uses of the queue: `record` writes a job down, `finish` ends it, `make_room`
    has room on the disk for somebody if that can be.

    `places` are what the jobs of all models share.
    """

    places: Places
    runner: JobRunner
    spool: Spool
    make_room: Callable[[Principal, int], Awaitable[bool]]
    record: Callable[[Job], Awaitable[None]]
    finish: Finish
    tell: Callable[[str, dict[str, Any]], None]


class RunLoop:
    """Runs the jobs of one lane; several tasks may be in `work_for_ever` at once."""

    def __init__(
        self,
        lane: Lane,
        tickets: Mapping[str, JobTicket],
        work: Work,
        settings: QueueSettings,
        clock: Clock,
    ) -> None:
        self._lane = lane
        self._tickets = tickets
        self._work = work
        self._settings = settings
        self._clock = clock

    async def work_for_ever(self) -> None:
        """Take and run; pause, longer each time, while that cannot be, or when we are at fault."""
        pause_s = _FIRST_PAUSE_S
        while True:
            await self._lane.wait()
            obstacle: Exception | BringingUp | None
            try:
                async with self._work.places.taken(lambda: self._lane.line.next_owner):
                    obstacle = await self._run_next()
                if obstacle is not None:
                    await self._hold(obstacle)
            except Exception as error:
                logger.exception("a worker of model=%s failed", self._lane.model_id)
                if _is_being_ended():
                    raise
                obstacle = error  # the model's other jobs need this worker
            if obstacle is None:
                pause_s = _FIRST_PAUSE_S
                continue
            if isinstance(obstacle, BringingUp):
                await asyncio.sleep(_COMING_PAUSE_S)
                continue
            await asyncio.sleep(pause_s)
            is_busy = isinstance(obstacle, Busy)
            pause_s = min(2 * pause_s, _LONGEST_BUSY_PAUSE_S if is_busy else _LONGEST_PAUSE_S)

    async def _run_next(self) -> MeshError | BringingUp | None:
        """Run the next job to its end; what kept it from being begun, if anything did."""
        lane, work = self._lane, self._work
        why = work.runner.why_not(lane.model_id)
        if why is not None:
            return NoRoute(f"{why}.", fix="")
        coming = await self._coming()
        if coming is not None:
            return coming
        try:
            job_id = await self._take()
        except StorageFull as error:
            return error
        try:
            return None if job_id is None else await self._run_to_its_end(self._tickets[job_id])
        finally:
            work.spool.release(self._settings.max_result_bytes)

    async def _take(self) -> str | None:
        """The next of the line, with room set aside for its result: the first for whom there is
        any. Raises StorageFull."""
        line, spool, size = self._lane.line, self._work.spool, self._settings.max_result_bytes
        waiting = [] if spool.fits(size) else line.order()
        first = {self._tickets[id_].job.asked.owner: id_ for id_ in reversed(waiting)}
        for owner, job_id in reversed(first.items()):
            # While room is made, a kill or another worker may take it, or the job.
            if await self._work.make_room(owner, size) and spool.fits(size) and line.remove(job_id):
                spool.reserve(size)
                return job_id
        spool.reserve(size)
        return line.take()

    async def _coming(self) -> MeshError | BringingUp | None:
        """How far the model is that the jobs wait for, or why it does not come; None where the next
        can be tried. Those who may not have it brought up are over."""
        line = self._lane.line
        while line:
            ticket = self._tickets[line.order()[0]]
            asked = ticket.job.asked
            try:
                return await self._work.runner.on_its_way(asked.model_id, may_wake=asked.trusted)
            except Forbidden as error:
                if line.remove(ticket.job_id):
                    await self._work.finish(ticket, Status.ERROR, _words(error))
            except MeshError as error:
                return error
        return None

    async def _run_to_its_end(self, ticket: JobTicket) -> MeshError | None:
        try:
            return await self._run(ticket)
        except Exception:
            if not (ticket.ended.is_set() or _is_being_ended()):  # or its client waits for ever
                await self._work.finish(ticket, Status.ERROR, _UNFORESEEN)
            raise

    async def _run(self, ticket: JobTicket) -> MeshError | None:
        lane = self._lane
        lane.running.add(ticket.job_id)
        ticket.begun_s = self._clock.monotonic()
        run = ticket.run = asyncio.create_task(self._attempt(ticket), name=f"job {ticket.job_id}")
        try:
            await asyncio.wait([run])
        except asyncio.CancelledError:
            run.cancel()
            await asyncio.wait([run], timeout=_CANCEL_TIMEOUT_S)
            if ticket.ending is not None and run.done():
                await self._conclude(ticket, run)
            elif run.cancelled():  # a stop is no attempt: nobody's fault, and nothing was lost
                attempts = ticket.job.attempts - 1
                await self._work.record(
                    replace(ticket.job, status=Status.QUEUED, attempts=attempts)
                )
            raise
        finally:
            ticket.run = None
            lane.running.discard(ticket.job_id)
        return await self._conclude(ticket, run)

    async def _attempt(self, ticket: JobTicket) -> JobReport:
        """Raises MeshError; what the runner raises is in `JobRunner`."""
        asked, job_id, work = ticket.job.asked, ticket.job_id, self._work
        if self._lane.held_since_s is None:  # or it has been told what it waits for
            ticket.tell(_turn(job_id) if self._lane.is_warm else _first(job_id))
        # From here on an end of the daemon counts as an attempt.
        ticket.job = replace(ticket.job, status=Status.RUNNING, attempts=ticket.job.attempts + 1)
        await work.record(ticket.job)
        result = await asyncio.to_thread(work.spool.prepare_result, job_id)
        payload = work.spool.payload(job_id)
        spec = JobSpec(
            job_id, asked.model_id, payload, result, asked.compress, asked.env, asked.trusted,
            ticket.lost_a_hop,
        )  # fmt: skip
        hearer = JobHearer(partial(self._began, ticket), partial(_say, ticket))
        limit_s = self._settings.time_limit_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await work.runner.run(spec, hearer)
        except TimeoutError:
            if not limit.expired():
                raise
            raise JobFailed(
                f"The job was ended after {limit_s:g} s, its time limit.",
                fix="Ask for less in one job, or raise jobs.wall_seconds.",
            ) from None

    def _began(self, ticket: JobTicket) -> None:
        self._lane.release()
        if ticket.latest.status is Status.RUNNING:
            return  # it is run again
        ticket.tell(_turn(ticket.job_id))
        ticket.tell(Update(ticket.job_id, Status.RUNNING, "The job is running."))
        model_id = ticket.job.asked.model_id
        self._work.tell("job_started", {"job": shown_id(ticket.job_id), "model": model_id})

    async def _conclude(self, ticket: JobTicket, run: asyncio.Task[JobReport]) -> MeshError | None:
        """What follows from how a run ended; the obstacle when it is to be tried again."""
        took: dict[str, Any] = {
            "wall_s": round(self._clock.monotonic() - (ticket.begun_s or 0.0), 3)
        }
        finish = self._work.finish
        if run.cancelled():
            await finish(ticket, Status.ERROR, ticket.ending or "The job was ended.", took)
            return None
        error = run.exception()
        if error is None:
            self._lane.release()
            await self._complete(ticket, run.result())
        elif isinstance(error, Busy | NoRoute) and ticket.ending is None:
            ticket.lost_a_hop |= ticket.latest.status is Status.RUNNING
            ticket.job = replace(ticket.job, status=Status.QUEUED, attempts=ticket.job.attempts - 1)
            self._lane.put_back(ticket)
            return error
        elif isinstance(error, MeshError):
            self._lane.release()
            if isinstance(error, JobFailed) and error.took:
                took = _used(error.took)
            await finish(ticket, Status.ERROR, _words(error), took)
        else:
            logger.error("job=%s broke its runner", ticket.job_id, exc_info=error)
            await finish(ticket, Status.ERROR, _UNFORESEEN, took)
        return None

    async def _complete(self, ticket: JobTicket, report: JobReport) -> None:
        try:
            size_bytes = await asyncio.to_thread(
                self._work.spool.settle_result, ticket.job_id, durable=ticket.job.asked.durable
            )
        except OSError as error:
            said = f"The result could not be kept: {error.strerror}."
            await self._work.finish(ticket, Status.ERROR, said)
            return
        if not 0 < size_bytes <= self._settings.max_result_bytes:
            said = f"The result has {size_bytes} bytes; at most {self._settings.max_result_bytes}"
            await self._work.finish(ticket, Status.ERROR, f"{said} are allowed.")
            return
        self._lane.is_warm = True
        self._work.spool.keep_result(size_bytes)
        meta = {**_used(asdict(report)), "result_bytes": size_bytes}
        await self._work.finish(ticket, Status.COMPLETED, "The job is done.", meta, size_bytes)

    async def _hold(self, obstacle: MeshError | BringingUp) -> None:
        """Tell everybody in the line why nothing happens; end those who waited long enough. While a
        model that is brought up comes nearer, that is nobody."""
        lane, now_s = self._lane, self._clock.monotonic()
        if isinstance(obstacle, Busy) and lane.running:
            return  # room comes when one of our own ends, which has a limit
        if isinstance(obstacle, BringingUp) and lane.comes_nearer(obstacle):
            lane.held_since_s = now_s
        if lane.held_since_s is None:
            lane.held_since_s = now_s
        status, why, meta = _told(obstacle)
        spent: list[tuple[JobTicket, float]] = []
        for job_id in lane.line.order():
            ticket = self._tickets[job_id]
            waited_s = now_s - max(lane.held_since_s, ticket.admitted_s)
            if waited_s < self._settings.patience_s:
                ticket.tell(Update(job_id, status, why, meta))
            else:
                spent.append((ticket, waited_s))
        for ticket, waited_s in spent:
            # While one is ended, a kill or another worker may take the next from the line.
            if lane.line.remove(ticket.job_id):
                words = why if isinstance(obstacle, BringingUp) else _words(obstacle)
                said = f"After {waited_s:.0f} s of waiting: {words}"
                await self._work.finish(ticket, Status.ERROR, said)


def _told(obstacle: MeshError | BringingUp) -> tuple[Status, str, dict[str, Any] | None]:
    """What jobs are told that wait for it."""
    if not isinstance(obstacle, BringingUp):
        return Status.PROVISIONING, obstacle.message, None
    status, percent = Status(obstacle.phase), obstacle.percent
    far = "" if percent is None else f", {percent} %"
    said = f"{obstacle.model} is not up yet: {_COMING[status]}{far}."
    return status, said, None if percent is None else {"percent": percent}


_COMING = {
    Status.QUEUED: "it waits for room or for its turn to be loaded",
    Status.PROVISIONING: "its weights are being fetched",
    Status.DEPLOYING: "it is loading",
}


def _is_being_ended() -> bool:
    """Whether the task that calls was cancelled, whatever it raised at that."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _first(job_id: str) -> Update:
    said = "The first job of this model; what its jobs start from is made ready."
    return Update(job_id, Status.DEPLOYING, said)


def _turn(job_id: str) -> Update:
    return Update(job_id, Status.DISPATCHED, "It is this job's turn.")


def _say(ticket: JobTicket, line: str) -> None:
    ticket.tell(Update(ticket.job_id, Status.LOG, line))


def _used(took: Mapping[str, Any]) -> dict[str, Any]:
    """What is told of a `JobReport`."""
    return {
        "wall_s": round(took["wall_s"], 3),
        "cpu_s": round(took["cpu_s"], 3),
        "peak_memory_bytes": took["peak_memory_bytes"],
        "hops": list(took["hops"]),
    }


def _words(error: MeshError) -> str:
    """The error for its reader; a traceback keeps its lines to itself."""
    return (
        "\n".join(filter(None, (error.message, error.fix))) if "\n" in error.message else str(error)
    )
