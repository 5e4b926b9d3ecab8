"""The daemon's side of the jobs: one process for all of a node's, started with the first job.

Hands it jobs and passes lines and reports on. Computes nothing and opens no result.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mesh.errors import InternalError, JobFailed, LinkLost, MeshError, ModelNotFound, ProcessLost
from mesh.interventions.jobs.commands import (
    Accounts,
    AskShards,
    Began,
    Broke,
    Line,
    RunJob,
    StartJobs,
)
from mesh.interventions.jobs.types import JobHearer, JobPlace, JobReport, JobSpec
from mesh.models.local import LocalModel
from mesh.pipeline.commands import Offer
from mesh.processes.lifecycle import ChildEnding, SilenceLimits
from mesh.processes.messages import Handlers
from mesh.processes.supervisor import Supervisor
from mesh.types import BringingUp, ModelId

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_CANCEL_S = 3.0
"""Shorter than the queue waits for us."""


class JobsOwner(Protocol):
    """What the jobs need of the daemon around them."""

    def routable(self, model_id: ModelId) -> Sequence[Offer]:
        """The shards that may be routed to now."""

    async def on_its_way(self, model_id: ModelId, *, may_wake: bool) -> BringingUp | None:
        """See `JobRunner`."""


class JobsSupervisor(Supervisor):
    """See the module; a `mesh.interventions.jobs.types.JobRunner`."""

    def __init__(
        self,
        start: StartJobs | None,
        models: Mapping[ModelId, LocalModel],
        owner: JobsOwner,
        limits: SilenceLimits | None = None,
    ) -> None:
        """`models` are those that this node has the ends of."""
        super().__init__("the jobs' process", "mesh.interventions.jobs.process", start, limits)
        self.accounts: dict[str, Any] = {}
        """Who holds what in the process, as `ResourceLedger.report`; empty before it has said."""
        self._models = models
        self._owner = owner
        self._error: MeshError | None = None
        self._hearers: dict[str, JobHearer] = {}

    def why_not(self, model_id: ModelId) -> str | None:
        """Why jobs of this model cannot run now, in words; None when they can."""
        if model_id in self._models:
            return None
        known = ", ".join(sorted(self._models)) or "none"
        return f"this node has no files of {model_id!r}; it can run jobs of: {known}."

    async def on_its_way(self, model_id: ModelId, *, may_wake: bool) -> BringingUp | None:
        """See `JobRunner`."""
        return await self._owner.on_its_way(model_id, may_wake=may_wake)

    async def run(self, spec: JobSpec, hearer: JobHearer) -> JobReport:
        """Run a job in the process to its end. Raises as `JobRunner.run`."""
        try:
            return await self._run_once(spec, hearer)
        except ProcessLost:
            logger.warning("job=%s: its process ended; running it again", spec.job_id)
        hearer.prints("(the process that runs jobs ended; the job is run again from its start)")
        try:
            return await self._run_once(spec, hearer)
        except ProcessLost:
            said = None if self.ending is None else self.ending.said
            raise JobFailed(
                f"The process that runs jobs ended twice while the job ran; {self.ending}",
                fix=(said and said.fix)
                or "Read logs/daemon.log in the state directory, or what `hearthnet up` prints.",
            ) from None

    # What a kind of process decides

    def answers(self) -> Handlers:
        """What the process says, and asks."""
        return {
            Accounts: self._report,
            AskShards: self._shards,
            Began: self._began,
            Line: self._pass_on,
        }

    def on_started(self) -> None:
        """Tell a new process its limits."""
        self._error = None
        super().on_started()

    def on_failed(self, error: MeshError) -> None:
        """Whoever waits for it is told why."""
        self._error = error
        self.ready()

    def on_ended(self, ending: ChildEnding) -> None:
        """See `Supervisor`: jobs that ran in it are run again."""

    def on_changed(self) -> None:
        """See `Supervisor`: jobs wait for what becomes of it."""

    # What the process says

    def _report(self, answer: Accounts) -> None:
        self.accounts = answer.accounts

    async def _shards(self, asked: AskShards) -> tuple[Offer, ...]:
        return tuple(self._owner.routable(asked.model_id))

    def _began(self, began: Began) -> None:
        if began.job_id in self._hearers:
            self._hearers[began.job_id].begins()

    def _pass_on(self, line: Line) -> None:
        if line.job_id in self._hearers:
            self._hearers[line.job_id].prints(line.text)

    # Private

    async def _run_once(self, spec: JobSpec, hearer: JobHearer) -> JobReport:
        model = self._models.get(spec.model_id)  # it may go while the process starts
        if model is None:
            reason = str(self.why_not(spec.model_id))
            raise ModelNotFound(reason, fix="Bring it up with `hearthnet deploy`.")
        await self._started()
        shards = tuple(self._owner.routable(spec.model_id))
        directory = Path(model.directory)
        place = JobPlace(spec.model_id, model.weights_sha256, directory, shards)
        self._hearers[spec.job_id] = hearer
        asked = self.exchange.ask(RunJob(spec, place))
        try:
            await asyncio.wait([asked])  # which leaves it as it is, should we be cancelled
        except asyncio.CancelledError:
            self.exchange.give_up(asked)
            await asyncio.wait([asked], timeout=_CANCEL_S)  # until then it may write its result
            raise
        finally:
            if self._hearers.get(spec.job_id) is hearer:
                del self._hearers[spec.job_id]
        ended = asked.result()
        if isinstance(ended, Broke):
            raise _as_raised(ended)
        return ended.report

    async def _started(self) -> None:
        """Until the process can be told. Raises InternalError, or MeshError as it says."""
        self.start()
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self.wait_up()
        except TimeoutError:
            raise InternalError("the jobs' process did not start.", fix="See the log.") from None
        if self._error is not None:
            self.replace()
            raise self._error


def _as_raised(broke: Broke) -> MeshError:
    error = broke.error
    if isinstance(error, LinkLost | JobFailed):
        return JobFailed(error.message, fix=error.fix, took=broke.took)
    return error
