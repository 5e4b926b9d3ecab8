"""The process of a node's jobs: commands from the daemon in, lines and reports out.

Started by `mesh.interventions.jobs.process` as ``python -m mesh.interventions.jobs.worker``; the
warmed parents and with them every job die with it. It links to shards as an asker does and opens
no port. Commands: ``start``, ``tls``, ``run``, ``cancel``. Answers: ``ready`` or ``failed``, then
per job ``line`` and at last ``done`` or ``error``; a job that is run again asks with ``shards`` who
serves its model by then, and a ``shards`` command answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mesh import allowances
from mesh.channel import Channel, ChannelMessage
from mesh.clock import SystemClock
from mesh.discovery.tasks import spawn
from mesh.errors import InternalError, JobFailed, LinkLost, MeshError
from mesh.identity.tls import TlsContexts, TlsMaterial
from mesh.interventions.jail.limits import JobLimits
from mesh.interventions.jobs.routes import Routes
from mesh.interventions.jobs.runner import JailRunner, JobPlace, RunnerSettings
from mesh.interventions.jobs.types import JobSpec
from mesh.ledger import ResourceLedger
from mesh.pipeline.dialing import secured
from mesh.pipeline.following import Following
from mesh.pipeline.lines import Lines
from mesh.routing.cover import CoverRules, home_layers
from mesh.supervise import attach_to_parent
from mesh.types import ModelId, NodeId
from mesh.wire.messages import Hello

logger = logging.getLogger(__name__)

_ANSWER_S = 5.0
_REPORT_TICK_S = 1.0


class JobsWorker:
    """Turns the daemon's commands into calls of a `JailRunner`."""

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._runner: JailRunner | None = None
        self._routes: Routes | None = None
        self._following = Following()
        self._accounts = ResourceLedger(SystemClock(), allowances.JOBS)
        self._stopped = asyncio.Event()
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._asked: dict[str, asyncio.Future[Sequence[dict[str, Any]]]] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until the daemon closes the channel, which ends the process, or until it is not
        known any more whom to trust."""
        self._channel = await attach_to_parent(self._command)
        await self._stopped.wait()

    def _command(self, message: ChannelMessage) -> None:
        match message["op"]:
            case "start":
                self._spawn(self._start(message), "start")
            case "tls":
                self._following.tell(message["members"])
            case "run":
                job = str(message["id"])
                task = self._spawn(self._run(job, message), f"job {job}")
                self._jobs[job] = task
                task.add_done_callback(lambda _: self._jobs.pop(job, None))
            case "shards":
                asked = self._asked.pop(message["id"], None)
                if asked is not None and not asked.done():
                    asked.set_result(message["shards"])
            case "cancel":
                if message["id"] in self._jobs:
                    self._jobs[message["id"]].cancel()

    async def _start(self, message: ChannelMessage) -> None:
        hello = Hello(**message["hello"])
        settings = message["settings"]
        try:
            material = TlsMaterial.from_fields(message["tls"])
            tls = await asyncio.to_thread(TlsContexts, material)
        except MeshError as error:
            self._send({"op": "failed", "error": error.to_dict()})
            return
        lines = Lines(secured(hello, tls, self._accounts))
        self._routes = Routes(NodeId(hello.node_id), lines, partial(_rules, settings))
        self._runner = JailRunner(
            self._routes,
            RunnerSettings(
                int(settings["max_running"]),
                float(settings["idle_s"]),
                Path(settings["cache_dir"]),
                JobLimits(**settings["limits"]),
            ),
        )
        await self._following.take(tls, self._routes.keep_only)
        following = self._spawn(self._following.run(tls, self._routes.keep_only), "follow members")
        following.add_done_callback(lambda _: self._stopped.set())
        self._send({"op": "ready"})
        self._spawn(self._report(), "report accounts")

    async def _report(self) -> None:
        """Who holds what here, whenever that has changed."""
        said = self._accounts.report("jobs")
        while True:
            await asyncio.sleep(_REPORT_TICK_S)
            accounts = self._accounts.report("jobs")
            if accounts != said:
                said = accounts
                self._send({"op": "accounts", "accounts": accounts})

    async def _run(self, job: str, message: ChannelMessage) -> None:
        answer: ChannelMessage = {"op": "error", "id": job}
        try:
            if self._runner is None:
                raise InternalError("the process of the jobs has not started.", fix="Try again.")  # noqa: TRY301 - as whatever else goes wrong
            spec, place = _decode(message)
            report = await self._runner.run(
                spec,
                place,
                lambda text: self._send({"op": "line", "id": job, "text": text}),
                partial(self._newest, job, place),
            )
            answer = {"op": "done", "id": job, "report": asdict(report)}
        except MeshError as error:
            answer["error"] = error.to_dict()
            if isinstance(error, JobFailed):
                answer["took"] = dict(error.took)
        except Exception as raised:
            logger.exception("job=%s failed", job)
            why = f"{type(raised).__name__}: {raised}."
            answer["error"] = InternalError(why, fix="See the log.").to_dict()
            raise
        finally:
            if len(answer) > 2:  # a cancelled job has nobody who waits for it
                self._send(answer)

    async def _newest(self, job: str, place: JobPlace) -> Sequence[dict[str, Any]]:
        """Who serves the model now; who did at the start, when the daemon does not say."""
        asked: asyncio.Future[Sequence[dict[str, Any]]]
        asked = self._asked[job] = asyncio.get_running_loop().create_future()
        self._send({"op": "shards", "id": job})
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await asked
        except TimeoutError:
            return place.shards
        finally:
            self._asked.pop(job, None)

    def _send(self, message: ChannelMessage) -> None:
        if self._channel is not None:
            # Without the daemon there is nobody left to tell; the process is about to end.
            with contextlib.suppress(LinkLost):
                self._channel.send(message)

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = spawn(coroutine, name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def encode(spec: JobSpec, place: JobPlace) -> ChannelMessage:
    """The ``run`` command for a job."""
    return {
        "op": "run",
        "id": spec.job_id,
        "model_id": spec.model_id,
        "payload": str(spec.payload),
        "result": str(spec.result),
        "compress": spec.compress,
        "env": dict(spec.env),
        "trusted": spec.trusted,
        "directory": str(place.directory),
        "shards": list(place.shards),
    }


def _decode(message: ChannelMessage) -> tuple[JobSpec, JobPlace]:
    model_id = ModelId(message["model_id"])
    spec = JobSpec(
        message["id"],
        model_id,
        Path(message["payload"]),
        Path(message["result"]),
        bool(message["compress"]),
        message["env"],
        bool(message["trusted"]),
    )
    return spec, JobPlace(model_id, Path(message["directory"]), message["shards"])


def _rules(settings: dict[str, Any], total_layers: int) -> CoverRules:
    home = home_layers(total_layers, int(settings["keep_first"]), int(settings["keep_last"]))
    return CoverRules(int(settings["max_shards"]), bool(settings["allow_self_as_first"]), home)


def main() -> None:
    """Run until the daemon is gone."""
    asyncio.run(JobsWorker().run())


if __name__ == "__main__":
    main()
