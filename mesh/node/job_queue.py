"""A node's queue of jobs, made from its configuration and connected to what watches it.

Part of the composition root, like `mesh.node.node`, which starts and stops it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from mesh.api.ndif.results import ResultUrls, load_key
from mesh.api.ndif.routes import JobsApi
from mesh.clock import Clock
from mesh.config import Config
from mesh.health.eventstream import EventFeed
from mesh.health.metrics import Metrics
from mesh.interventions.jobs.queue.service import JobQueue
from mesh.interventions.jobs.queue.spool import Spool
from mesh.interventions.jobs.queue.types import QueueSettings
from mesh.interventions.jobs.types import JobRunner
from mesh.paths import StatePaths

_BEYOND_LIMIT_S = 300.0
"""Runners end jobs by themselves; the queue does when one did not, two runs and a start later."""


async def start_queue(
    config: Config, runner: JobRunner, clock: Clock, events: EventFeed, metrics: Metrics
) -> JobsApi:
    """Take up what is left from before. Raises StorageFull, SchemaTooNew, KeyUnreadable."""
    jobs = config.jobs
    settings = QueueSettings(
        max_queued=jobs.queue.max_waiting,
        concurrent=jobs.max_running,
        max_payload_bytes=jobs.queue.payload_mb << 20,
        max_result_bytes=jobs.result_mb << 20,
        time_limit_s=2 * jobs.wall_seconds + _BEYOND_LIMIT_S,
        patience_s=jobs.queue.patience_seconds,
    )
    spool = Spool(StatePaths(config.state_dir).jobs_dir, jobs.queue.disk_mb << 20)
    queue = JobQueue(runner, spool, settings, clock, partial(_tell, events, metrics))
    await queue.start()
    metrics.jobs.watch(queue.counts)
    key = await asyncio.to_thread(load_key, spool.root / "urls.key")
    return JobsApi(queue, ResultUrls(key, clock))


def _tell(events: EventFeed, metrics: Metrics, kind: str, fields: dict[str, Any]) -> None:
    events.emit(kind, **fields)
    if kind == "job_ended":
        metrics.jobs.end(fields["status"], fields.get("wall_s", 0.0))
