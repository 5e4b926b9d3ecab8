"""The daemon's side of the jobs: one process for all of a node's, started with the first job.

Hands it jobs and passes lines and reports on. Computes nothing and opens no result.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from mesh.errors import InternalError, JobFailed, LinkLost, MeshError, ModelNotFound, from_dict
from mesh.interventions.jail.limits import JobLimits
from mesh.interventions.jobs.runner import JobPlace
from mesh.interventions.jobs.types import JobReport, JobSpec
from mesh.interventions.jobs.worker import encode
from mesh.supervise import ChannelMessage, Child
from mesh.types import ModelId

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5.0
_AGAIN_AFTER_S = 0.5


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
        self, spec: JobsSpec, directories: Mapping[ModelId, Path], owner: JobsOwner
    ) -> None:
        """`directories` are the checkpoints that this node has the ends of."""
        self._spec = spec
        self._directories = directories
        self._owner = owner
        self.accounts: dict[str, Any] = {}
        """Who holds what in the process, as `ResourceLedger.report`; empty before it has said."""
        self._child: Child | None = None
        self._ready: asyncio.Future[None] | None = None
        self._starting = asyncio.Lock()
        self._waiting: dict[str, _Waiting] = {}
        self._reaping: set[asyncio.Task[int]] = set()

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
        await asyncio.sleep(_AGAIN_AFTER_S)
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
        if self._child is not None:
            with contextlib.suppress(LinkLost):  # it starts again with the newer ones
                self._child.channel.send({"op": "tls", "members": list(members)})

    async def stop(self) -> None:
        """End the process and with it every job."""
        child, self._child = self._child, None
        if child is not None:
            await child.stop(_STOP_TIMEOUT_S)
        await asyncio.gather(*self._reaping, return_exceptions=True)

    # Private

    async def _run_once(self, spec: JobSpec, on_text: Callable[[str], None]) -> JobReport:
        child = await self._started()
        place = JobPlace(
            spec.model_id, self._directories[spec.model_id], self._owner.routable(spec.model_id)
        )
        ended: asyncio.Future[JobReport] = asyncio.get_running_loop().create_future()
        waiting = self._waiting[spec.job_id] = _Waiting(spec.model_id, on_text, ended)
        try:
            child.channel.send(encode(spec, place))
            return await ended
        except asyncio.CancelledError:
            with contextlib.suppress(LinkLost):
                child.channel.send({"op": "cancel", "id": spec.job_id})
            raise
        finally:
            if self._waiting.get(spec.job_id) is waiting:
                del self._waiting[spec.job_id]

    async def _started(self) -> Child:
        """The running process. Raises LinkLost when it ends at once, MeshError as it says."""
        async with self._starting:
            if self._child is not None:
                return self._child
            ready = self._ready = asyncio.get_running_loop().create_future()
            child = self._child = await Child.start(
                "mesh.interventions.jobs.worker",
                name="jobs",
                on_message=self._message,
                on_closed=lambda: self._gone(child),
            )
            try:
                child.channel.send({"op": "start", **asdict(self._spec)})
                async with asyncio.timeout(_START_TIMEOUT_S):
                    await ready
            except TimeoutError:
                await self.stop()
                raise InternalError(
                    "the jobs' process did not start.", fix="See the log."
                ) from None
            except BaseException:
                await self.stop()
                raise
            return child

    def _gone(self, child: Child) -> None:
        if self._child is child:
            self._child = None
            reaping = asyncio.create_task(child.stop(_STOP_TIMEOUT_S), name="reap jobs process")
            self._reaping.add(reaping)
            reaping.add_done_callback(self._reaping.discard)
        lost = LinkLost("the process that runs jobs ended", fix="It is started again; try again.")
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(lost)
        for waiting in self._waiting.values():
            if not waiting.ended.done():
                waiting.ended.set_exception(lost)

    def _message(self, message: ChannelMessage) -> None:
        op = message["op"]
        if op == "accounts":
            self.accounts = message["accounts"]
            return
        if op in ("ready", "failed"):
            if self._ready is not None and not self._ready.done():
                if op == "ready":
                    self._ready.set_result(None)
                else:
                    self._ready.set_exception(from_dict(message["error"]))
            return
        waiting = self._waiting.get(message["id"])
        if waiting is None or waiting.ended.done():
            return
        match op:
            case "shards":
                self._tell_shards(message["id"], waiting.model_id)
            case "line":
                waiting.on_text(message["text"])
            case "done":
                report = message["report"]
                waiting.ended.set_result(JobReport(**{**report, "hops": tuple(report["hops"])}))
            case "error":
                error = from_dict(message["error"])
                waiting.ended.set_exception(_as_raised(error, message.get("took")))

    def _tell_shards(self, job_id: str, model_id: ModelId) -> None:
        if self._child is not None:
            shards = self._owner.routable(model_id)
            with contextlib.suppress(LinkLost):  # the job is run again in another process
                self._child.channel.send({"op": "shards", "id": job_id, "shards": shards})


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
