"""What the process of a node's jobs is told and what it answers (see `mesh.processes.messages`)."""

from __future__ import annotations

from typing import Any

from mesh.errors import MeshError
from mesh.interventions.jobs.types import JobPlace, JobReport, JobSpec, RunnerSettings
from mesh.pipeline.commands import Offer, RouteLimits
from mesh.processes.messages import ProcessMessage, Start

# Commands


class StartJobs(Start, frozen=True):
    """Be ready for jobs, within these limits, at niceness `nice`."""

    routes: RouteLimits
    settings: RunnerSettings
    nice: int = 0


class RunJob(ProcessMessage, frozen=True):
    """Begin a job; its id is the spec's."""

    spec: JobSpec
    place: JobPlace


class JobShards(ProcessMessage, frozen=True):
    """Who serves a job's model now: the answer to `AskShards`."""

    job_id: str
    shards: tuple[Offer, ...]


# Answers


class JobsReady(ProcessMessage, frozen=True):
    """Jobs may come."""


class AskShards(ProcessMessage, frozen=True):
    """A job that is run again asks who serves its model by now; `JobShards` answers."""

    job_id: str


class Line(ProcessMessage, frozen=True):
    """What a job printed; several lines when many come."""

    job_id: str
    text: str


class Finished(ProcessMessage, frozen=True):
    """A job is done."""

    job_id: str
    report: JobReport


class Broke(ProcessMessage, frozen=True):
    """A job failed, after it `took` this much, as a `JobReport` has it."""

    job_id: str
    error: MeshError
    took: dict[str, Any] | None = None


class Accounts(ProcessMessage, frozen=True):
    """Who holds what in the process, as `ResourceLedger.report`, whenever that has changed."""

    accounts: dict[str, Any]
