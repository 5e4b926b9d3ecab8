"""What the process of a node's jobs is told, what it answers and what it says (see
`mesh.processes.messages`)."""

from __future__ import annotations

from typing import Any

from mesh.errors import MeshError
from mesh.interventions.jobs.types import JobPlace, JobReport, JobSpec, RunnerSettings
from mesh.pipeline.commands import Offer, RouteLimits
from mesh.processes.messages import ProcessMessage, Request, Start
from mesh.types import ModelId


class Finished(ProcessMessage, frozen=True):
    """A job is done."""

    report: JobReport


class Broke(ProcessMessage, frozen=True):
    """A job failed, after it `took` this much, as a `JobReport` has it."""

    error: MeshError
    took: dict[str, Any] | None = None


# Commands


class StartJobs(Start[None], frozen=True):
    """Be ready for jobs, within these limits."""

    routes: RouteLimits
    settings: RunnerSettings


class RunJob(Request[Finished | Broke], frozen=True):
    """Run a job; that it `Began` and its `Line`s come before the answer."""

    spec: JobSpec
    place: JobPlace


# What it says, and what it asks


class AskShards(Request[tuple[Offer, ...]], frozen=True):
    """Who serves this model by now, as a job of it is run again."""

    model_id: ModelId


class Began(ProcessMessage, frozen=True):
    """There is a route for a job, and its code is about to run; again if it is run again."""

    job_id: str


class Line(ProcessMessage, frozen=True):
    """What a job printed; several lines when many come."""

    job_id: str
    text: str


class Accounts(ProcessMessage, frozen=True):
    """Who holds what in the process, as `ResourceLedger.report`, whenever that has changed."""

    accounts: dict[str, Any]
