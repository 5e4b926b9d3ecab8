"""What a job is, and what whoever runs it owes whoever asked for it. Knows neither side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mesh.interventions.jail.limits import JobLimits
from mesh.pipeline.commands import Offer
from mesh.types import BringingUp, ModelId


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One job as it was accepted.

    `payload` is the file with the request's bytes exactly as they came (zstd when `compress`),
    `result` the file its result is to be written to (zstd when `compress`). `env` is what the
    client says of its model (`attn_implementation`). `trusted` keys run without the inner fence.
    One that `lost_a_hop` before is not run again when it loses another.
    """

    job_id: str
    model_id: ModelId
    payload: Path
    result: Path
    compress: bool
    env: Mapping[str, Any]
    trusted: bool
    lost_a_hop: bool = False


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """How many jobs run at once, within what, and how long an unused jail is kept warm."""

    max_running: int
    idle_s: float
    cache_dir: Path
    limits: JobLimits


@dataclass(frozen=True, slots=True)
class JobPlace:
    """Where a job's model is: its checkpoint here, and who serves its layers as it begins. Other
    weights may have lain in the same directory before."""

    model_id: ModelId
    weights_sha256: str
    directory: Path
    shards: tuple[Offer, ...]


@dataclass(frozen=True, slots=True)
class JobReport:
    """How a job went. `hops` are the nodes' names in order."""

    result_bytes: int
    wall_s: float
    cpu_s: float
    peak_memory_bytes: int
    hops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JobHearer:
    """Who hears of a job while it runs. `begins` is called when there is a route and its code is
    about to run, `prints` gets the lines it prints, joined when many come."""

    begins: Callable[[], None]
    prints: Callable[[str], None]


class JobRunner(Protocol):
    """Runs jobs, each in a process of its own."""

    async def run(self, spec: JobSpec, hearer: JobHearer) -> JobReport:
        """Run `spec` to its end.

        Cancelling ends the job's process within a second, and its files are written no more when
        this returns. Raises MeshError: JobFailed with what the user should read (their own
        traceback, a limit) and what the job took, NoRoute when nobody serves the model, Busy when
        no place is free: also where nobody takes over from a hop that died, once it has begun. A
        job whose hop died was run again once before any JobFailed.
        """

    def why_not(self, model_id: ModelId) -> str | None:
        """Why jobs of this model cannot run on this node, in words; None when they can."""

    async def on_its_way(self, model_id: ModelId, *, may_wake: bool) -> BringingUp | None:
        """How far a model is that is being brought up, woken first where it rests; None where a job
        may be tried. Raises Forbidden when it may not be woken, and MeshError."""
