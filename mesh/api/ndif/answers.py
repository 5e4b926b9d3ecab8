"""Answers to clients in nnsight's own form: its ``ResponseModel``, as JSON.

A small result travels inside the answer, as `mesh.interventions.jobs.queue.inline` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh.interventions.jobs.queue.types import Job, Status, Update


def answer(
    job_id: str,
    status: Status,
    description: str,
    *,
    data: str | None = None,
    meta: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One ``ResponseModel``; `data` is the URL of a result."""
    return {
        "id": job_id,
        "status": status.value,
        "description": description,
        "data": data,
        "meta": dict(meta) if meta else None,
    }


def of_update(update: Update, url: str | None = None) -> dict[str, Any]:
    """What an update says."""
    return answer(update.job_id, update.status, update.description, data=url, meta=update.meta)


def of_job(job: Job, url: str | None) -> dict[str, Any]:
    """Where a job stands; one whose result is gone ends in an error, or clients ask for ever."""
    status = job.status
    if status is Status.COMPLETED and url is None:
        status = Status.ERROR
    return answer(job.job_id, status, job.description, data=url, meta=job.meta)
