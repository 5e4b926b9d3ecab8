"""Runs jobs: a route for each, a process for each, its result to a file; again if a hop dies.

Lives in the process of the jobs, where nothing that a stranger wrote is decoded: results are bytes,
prints are lines, and messages to the hops pass through unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mesh.errors import BadRequest, Busy, JobFailed, MeshError, WeightsMissing
from mesh.interventions.jail.job import Jail, JailedJob
from mesh.interventions.jail.limits import Ending, JobLimits, JobOutcome
from mesh.interventions.jobs.files import write_whole
from mesh.interventions.jobs.jails import WarmJails, WarmUp
from mesh.interventions.jobs.order import JobOrder, pack_hops
from mesh.interventions.jobs.routes import OpenRoute, RoutedModel, Routes
from mesh.interventions.jobs.types import JobHearer, JobPlace, JobReport, JobSpec, RunnerSettings
from mesh.interventions.relay import relay
from mesh.models.manifest import Manifest, read_manifest
from mesh.pipeline.commands import Offer
from mesh.processes.tasks import to_its_end
from mesh.routing.cover import ShardKey, key_of
from mesh.types import ModelId

logger = logging.getLogger(__name__)

# Not imported: that module loads torch, which this process does without.
ENTRY = "mesh.interventions.jobs.inside:ready"
ATTENTION = ("eager", "sdpa")

# Asks who serves a model now, as `JobPlace.shards` has it.
Newest = Callable[[], Awaitable[Sequence[Offer]]]


class JailRunner:
    """See the module. Cancelling `run` kills the job's process."""

    def __init__(self, routes: Routes, settings: RunnerSettings) -> None:
        self._routes = routes
        self.settings = settings
        self.jails = WarmJails(max_jobs=settings.max_running, idle_s=settings.idle_s)
        self._running = 0
        self._manifests: dict[Path, Manifest] = {}

    async def run(
        self, spec: JobSpec, place: JobPlace, hearer: JobHearer, newest: Newest
    ) -> JobReport:
        """See `mesh.interventions.jobs.types.JobRunner.run`; `newest` is asked for a second run."""
        if self._running >= self.settings.max_running:
            raise Busy(
                f"{self._running} jobs run here already, the limit.",
                fix="Wait for one to end, or raise jobs.max_running.",
            )
        self._running += 1
        try:
            return await self._run(spec, place, hearer, newest)
        finally:
            self._running -= 1

    async def close(self) -> None:
        """End every job and every link."""
        await self.jails.close()
        await self._routes.close()

    # Private

    async def _run(
        self, spec: JobSpec, place: JobPlace, hearer: JobHearer, newest: Newest
    ) -> JobReport:
        attention = _attention(spec.env)
        request = await asyncio.to_thread(spec.payload.read_bytes)
        manifest = await self._manifest(place)
        lost: list[_Loss] = []
        while True:
            async with self._route(manifest, place, lost) as route:
                jail = await self.jails.get(self._warm_up(place, route))
                order = JobOrder(spec.compress, attention, spec.trusted)
                attempt = _Attempt(jail, route, spec.trusted, self.settings.limits)
                hearer.begins()
                outcome = await attempt.run(order.pack(request), hearer.prints)
                if outcome.ending is Ending.FINISHED:
                    await to_its_end(write_whole, spec.result, outcome.result)
                    return _report(outcome, route)
                took = asdict(_report(outcome, route))
                loss = attempt.loss()
            if loss is None:
                raise _failure(outcome, took)
            if loss.hop is not None and loss.error is not None:
                self._routes.failed(loss.hop, loss.error)
            lost.append(replace(loss, took=took))
            if spec.lost_a_hop or len(lost) > 1:
                raise _given_up(lost)
            hearer.prints(f"({loss.what}; the job is run again from its start)")
            place = replace(place, shards=tuple(await newest()))

    @asynccontextmanager
    async def _route(
        self, manifest: Manifest, place: JobPlace, lost: Sequence[_Loss]
    ) -> AsyncIterator[OpenRoute]:
        sizes = manifest.total_layers, manifest.cuts
        wanted = RoutedModel(place.model_id, manifest.weights_sha256, *sizes)
        route = await self._routes.open(wanted, place.shards, _keys(lost))
        try:
            yield route
        finally:
            route.sessions.close()

    async def _manifest(self, place: JobPlace) -> Manifest:
        """Read once for the same weights, and again while its ends are not here: they may be
        fetched any time. Raises WeightsMissing without them."""
        known, meant = self._manifests.get(place.directory), (place.model_id, place.weights_sha256)
        is_meant = known is not None and (known.model_id, known.weights_sha256) == meant
        if known is None or not is_meant or not known.has_ends:
            known = self._manifests[place.directory] = await asyncio.to_thread(
                read_manifest,
                place.directory, model_id=place.model_id, cache_dir=self.settings.cache_dir,
            )  # fmt: skip
        if not known.has_ends:
            raise _no_ends(place.model_id)
        return known

    def _warm_up(self, place: JobPlace, route: OpenRoute) -> WarmUp:
        return WarmUp(
            place.model_id, place.weights_sha256, place.directory, self.settings.cache_dir,
            route.dtype,
        )  # fmt: skip


def _no_ends(model_id: ModelId) -> WeightsMissing:
    return WeightsMissing(
        f"A job's code runs beside embedding and head, and this node holds none of {model_id}.",
        fix=f"Fetch them here (`hearthnet pull {model_id} --layers none`), or send the job to a"
        " node that has them.",
    )


@dataclass(frozen=True, slots=True)
class _Loss:
    """Why a job has to be run again, and what it took until then."""

    what: str
    hop: Any = None
    error: MeshError | None = None
    took: Mapping[str, Any] = field(default_factory=dict)


class _Attempt:
    """One run of a job over one route."""

    def __init__(self, jail: Jail, route: OpenRoute, trusted: bool, limits: JobLimits) -> None:
        self._jail = jail
        self._route = route
        self._trusted = trusted
        self._limits = limits

    async def run(self, payload: bytes, on_text: Callable[[str], None]) -> JobOutcome:
        """Until the process has ended. Raises JobFailed when it broke the channel's rules."""
        job = await self._jail.start_job(
            ENTRY,
            payload,
            trusted=self._trusted,
            hint=pack_hops([hop.layers for hop in self._route.hops]),
            limits=self._limits,
            on_text=on_text,
        )
        sessions = self._route.sessions
        async with job:
            # Before the job hears of it, so that no code of its author ever handles our failures.
            sessions.on_lost(job.kill)
            passing = asyncio.create_task(relay(job.channel, sessions), name="job-relay")
            passing.add_done_callback(lambda task: _end_unruly(task, job))
            passing.add_done_callback(lambda _: job.hung_up())
            try:
                outcome = await job.outcome()
            finally:
                passing.cancel()
                with contextlib.suppress(asyncio.CancelledError, MeshError):
                    await passing
        if not passing.cancelled() and isinstance(broken := passing.exception(), MeshError):
            took = asdict(_report(outcome, self._route))
            raise JobFailed(f"The job was ended: {broken.message}", fix=broken.fix, took=took)
        return outcome

    def loss(self) -> _Loss | None:
        """What failed that was not the job's fault; None when it was."""
        lost = self._route.sessions.lost
        if lost is not None:
            error = lost.error
            said = f": {error.message}" if error is not None else ""
            what = f"{lost.hop.shard.node_name}, which ran layers {lost.hop.layers}, was lost{said}"
            return _Loss(what.rstrip("."), lost.hop, error)
        if not self._jail.alive:
            return _Loss("the process that jobs start from ended")
        return None


def _end_unruly(passing: asyncio.Task[None], job: JailedJob) -> None:
    if not passing.cancelled() and passing.exception() is not None:
        job.kill()


def _attention(env: Mapping[str, Any]) -> str:
    """The attention implementation a client asks for. Raises BadRequest for anything else."""
    for name, value in env.items():
        if name != "attn_implementation" and value is not None:
            raise BadRequest(
                f"This server does not apply {name!r} to a model.",
                fix="Leave it out; peft adapters are not served.",
                param=name,
            )
    wanted = env.get("attn_implementation") or ""
    if wanted and wanted not in ATTENTION:
        raise BadRequest(
            f"attn_implementation {str(wanted)[:50]!r} is not served.",
            fix='Load the model at the client with attn_implementation="sdpa" or "eager".',
            param="attn_implementation",
        )
    return str(wanted)


def _keys(lost: Sequence[_Loss]) -> list[ShardKey]:
    return [key_of(loss.hop.shard) for loss in lost if loss.hop is not None]


def _failure(outcome: JobOutcome, took: Mapping[str, Any]) -> JobFailed:
    is_limit = outcome.ending in (Ending.WALL_LIMIT, Ending.CPU_LIMIT)
    fix = "Do less in one job, or ask whoever runs this node to raise its limits."
    return JobFailed(outcome.text, fix=fix if is_limit else "", took=took)


def _given_up(lost: Sequence[_Loss]) -> JobFailed:
    what = ", then ".join(loss.what for loss in lost)
    return JobFailed(
        f"The job was lost twice because of this mesh, not because of its code: {what}.",
        fix="Run it again when the machines are back.",
        took=lost[-1].took,
    )


def _report(outcome: JobOutcome, route: OpenRoute) -> JobReport:
    return JobReport(
        len(outcome.result),
        outcome.wall_s,
        outcome.cpu_s,
        outcome.peak_memory_bytes,
        tuple(hop.shard.node_name for hop in route.hops),
    )
