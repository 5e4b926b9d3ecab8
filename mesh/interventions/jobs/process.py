"""The daemon's side of the jobs: one process for all of a node's, started with the first job.

Hands it jobs and passes lines and reports on. Computes nothing and opens no result.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from mesh.channel import ChannelMessage
from mesh.charge import Ending, SilenceLimits
from mesh.errors import InternalError, JobFailed, LinkLost, MeshError, ModelNotFound, from_dict
from mesh.interventions.jail.limits import JobLimits
from mesh.interventions.jobs.runner import JobPlace
from mesh.interventions.jobs.types import JobReport, JobSpec
from mesh.interventions.jobs.worker import encode
from mesh.supervisor import Supervisor
from mesh.types import ModelId

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class JobsSpec:
    """What the process is told at its start."""

    hello: dict[str, Any]
    settings: dict[str, Any]
    tls: dict[str, Any] = field(repr=False)


class JobsOwner(Protocol):
    """What the jobs need of the daemon around them."""

    def routable(self, model_id: ModelId) -> list[dict[str, Any]]:
        """The shards that may be routed to now, encoded by `mesh.discovery.advertisement`."""


@dataclass(slots=True)
class _Waiting:
    """Somebody waits for a job's end."""

    model_id: ModelId
    on_text: Callable[[str], None]
    ended: asyncio.Future[JobReport]


class JobsProcess:
    """See the module; a `mesh.interventions.jobs.types.JobRunner`."""

    def __init__(
        self,
        spec: JobsSpec,
        directories: Mapping[ModelId, Path],
        owner: JobsOwner,
        limits: SilenceLimits | None = None,
    ) -> None:
        """`directories` are the checkpoints that this node has the ends of."""
        self.process = Supervisor(
            "the jobs' process", "mesh.interventions.jobs.worker", self, limits
        )
        self._spec = spec
        self._directories = directories
        self._owner = owner
        self.accounts: dict[str, Any] = {}
        """Who holds what in the process, as `ResourceLedger.report`; empty before it has said."""
        self._error: MeshError | None = None
        self._waiting: dict[str, _Waiting] = {}

    def why_not(self, model_id: ModelId) -> str | None:
        """See `JobRunner.why_not`."""
        if model_id in self._directories:
            return None
        known = ", ".join(sorted(self._directories)) or "none"
        return f"this node has no files of {model_id!r}; it can run jobs of: {known}."

    async def run(self, spec: JobSpec, on_text: Callable[[str], None]) -> JobReport:
        """See `JobRunner.run`."""
        if (reason := self.why_not(spec.model_id)) is not None:
            raise ModelNotFound(reason, fix="Start the node with `--model PATH=ID`.")
        try:
            return await self._run_once(spec, on_text)
        except LinkLost:
            logger.warning("job=%s: its process ended; running it again", spec.job_id)
        on_text("(the process that runs jobs ended; the job is run again from its start)")
        try:
            return await self._run_once(spec, on_text)
        except LinkLost:
            raise JobFailed(
                "The process that runs jobs ended twice while the job ran.",
                fix="Read logs/daemon.log in the state directory, or what `hearthnet up` prints.",
            ) from None

    def trust(self, members: Sequence[bytes]) -> None:
        """The certificates of those whose shards may be used from now on."""
        self._spec = replace(self._spec, tls={**self._spec.tls, "members": list(members)})
        self.process.tell({"op": "tls", "members": list(members)})

    async def stop(self) -> None:
        """End the process and with it every job."""
        await self.process.stop()

    # Charge

    def process_started(self) -> None:
        """See `Charge.process_started`."""
        self._error = None
        self.process.tell({"op": "start", **asdict(self._spec)})

    def process_ended(self, ending: Ending) -> None:
        """See `Charge.process_ended`."""
        lost = LinkLost(f"{self.process.name}: {ending}.", fix="Another is started; try again.")
        for waiting in self._waiting.values():
            if not waiting.ended.done():
                waiting.ended.set_exception(lost)

    def why_not_start(self, free_mb: int) -> MeshError | None:
        """See `Charge.why_not_start`."""
        return None

    def process_changed(self) -> None:
        """See `Charge.process_changed`: jobs wait for what becomes of it."""

    def process_said(self, message: ChannelMessage) -> None:
        """See `Charge.process_said`."""
        op = message["op"]
        if op == "accounts":
            self.accounts = message["accounts"]
            return
        if op in ("ready", "failed"):
            self._error = None if op == "ready" else from_dict(message["error"])
            self.process.ready()
            return
        waiting = self._waiting.get(message["id"])
        if waiting is None or waiting.ended.done():
            return
        match op:
            case "shards":
                shards = self._owner.routable(waiting.model_id)
                self.process.tell({"op": "shards", "id": message["id"], "shards": shards})
            case "line":
                waiting.on_text(message["text"])
            case "done":
                report = message["report"]
                waiting.ended.set_result(JobReport(**{**report, "hops": tuple(report["hops"])}))
            case "error":
                error = from_dict(message["error"])
                waiting.ended.set_exception(_as_raised(error, message.get("took")))

    # Private

    async def _run_once(self, spec: JobSpec, on_text: Callable[[str], None]) -> JobReport:
        await self._started()
        place = JobPlace(
            spec.model_id, self._directories[spec.model_id], self._owner.routable(spec.model_id)
        )
        ended: asyncio.Future[JobReport] = asyncio.get_running_loop().create_future()
        waiting = self._waiting[spec.job_id] = _Waiting(spec.model_id, on_text, ended)
        try:
            if not self.process.tell(encode(spec, place)):
                raise LinkLost(f"{self.process.name} is gone.", fix="Another is started.")
            return await ended
        except asyncio.CancelledError:
            self.process.tell({"op": "cancel", "id": spec.job_id})
            raise
        finally:
            if self._waiting.get(spec.job_id) is waiting:
                del self._waiting[spec.job_id]

    async def _started(self) -> None:
        """Until the process can be told. Raises InternalError, or MeshError as it says."""
        self.process.start()
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self.process.wait_up()
        except TimeoutError:
            raise InternalError("the jobs' process did not start.", fix="See the log.") from None
        if self._error is not None:
            self.process.replace()
            raise self._error


def _as_raised(error: MeshError, took: Mapping[str, Any] | None) -> MeshError:
    # A link that was lost inside must not be taken for the end of the process.
    if isinstance(error, LinkLost | JobFailed):
        return JobFailed(error.message, fix=error.fix, took=took)
    return error


def limits_of(*, wall_s: float, cpu_s: int, memory_mb: int, result_mb: int) -> dict[str, Any]:
    """A job's limits as the ``start`` command has them."""
    return asdict(
        JobLimits(
            wall_s=wall_s, cpu_s=cpu_s, memory_bytes=memory_mb << 20, result_bytes=result_mb << 20
        )
    )
