"""The process of a node's jobs: ``python -m mesh.interventions.jobs.process``, of the daemon.

The warmed parents and with them every job die with it. It links to shards as an asker does and
opens no port.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from mesh.accounts import allowances
from mesh.accounts.ledger import ResourceLedger
from mesh.clock import SystemClock
from mesh.errors import InternalError, JobFailed, MeshError, as_mesh_error
from mesh.interventions.jobs.commands import (
    Accounts,
    AskShards,
    Began,
    Broke,
    Finished,
    Line,
    RunJob,
    StartJobs,
)
from mesh.interventions.jobs.routes import Routes
from mesh.interventions.jobs.runner import JailRunner
from mesh.interventions.jobs.types import JobHearer
from mesh.pipeline.commands import Offer
from mesh.pipeline.dialing import secured
from mesh.pipeline.links import HopLinks
from mesh.processes.messages import Handlers
from mesh.processes.worker import Worker
from mesh.types import NodeId

logger = logging.getLogger(__name__)

_ANSWER_S = 5.0
_REPORT_TICK_S = 1.0


class JobsProcess(Worker):
    """A `JailRunner`, and the jobs that run in it."""

    def __init__(self) -> None:
        super().__init__()
        self._runner: JailRunner | None = None
        self._accounts = ResourceLedger(SystemClock(), allowances.JOBS)

    def commands(self) -> Handlers:
        """What the process is told beside `Trust` and `Stop`."""
        return {
            StartJobs: self._start,
            RunJob: self._run,
        }

    async def close(self) -> None:
        """End every job and every link."""
        if self._runner is not None:
            await self._runner.close()

    async def _start(self, command: StartJobs) -> None:
        links = HopLinks(secured(command.hello, self.members.tls, self._accounts))
        routes = Routes(NodeId(command.hello.node_id), links, command.routes.cover_rules)
        self._runner = JailRunner(routes, command.settings)
        await self.follow_members(routes.keep_only)
        self.keep(self._report(), "report accounts")

    async def _run(self, command: RunJob) -> Finished | Broke:
        job_id = command.spec.job_id
        try:
            if self._runner is None:
                raise InternalError("the process of the jobs has not started.", fix="Try again.")
            running = self._runner.run(
                command.spec,
                command.place,
                JobHearer(
                    lambda: self.say(Began(job_id)), lambda text: self.say(Line(job_id, text))
                ),
                partial(self._newest, command),
            )
            return Finished(await as_mesh_error(running, f"job={job_id}", self.unforeseen))
        except MeshError as error:
            return Broke(error, dict(error.took) if isinstance(error, JobFailed) else None)

    async def _newest(self, command: RunJob) -> Sequence[Offer]:
        """Who serves the model now; who did at the start, when the daemon does not say."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self.exchange.ask(AskShards(command.spec.model_id))
        except TimeoutError:
            return command.place.shards

    async def _report(self) -> None:
        """Who holds what here, whenever that has changed."""
        said = self._accounts.report("jobs")
        while True:
            await asyncio.sleep(_REPORT_TICK_S)
            accounts = self._accounts.report("jobs")
            if accounts != said:
                said = accounts
                self.say(Accounts(accounts))


def main() -> None:
    """Run until the daemon is gone."""
    asyncio.run(JobsProcess().run())


if __name__ == "__main__":
    main()
