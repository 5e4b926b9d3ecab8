"""What the queue keeps of a job and what it tells about one. Plain data."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from mesh.types import ModelId, Principal


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Bounds of the queue.

    Each model has `max_queued` places, a key may hold half of them; `concurrent` jobs of all models
    run at once. `time_limit_s` ends a job, `patience_s` is how long jobs wait for a model that
    nobody serves or has room for.
    """

    max_queued: int = 512
    concurrent: int = 2
    max_payload_bytes: int = 64 << 20
    max_result_bytes: int = 64 << 20
    time_limit_s: float = 300.0
    patience_s: float = 300.0


class Status(StrEnum):
    """Where a job is, by the names of NDIF's protocol; `LOG` is a line that it printed."""

    RECEIVED = "RECEIVED"
    QUEUED = "QUEUED"
    PROVISIONING = "PROVISIONING"
    DEPLOYING = "DEPLOYING"
    DISPATCHED = "DISPATCHED"
    RUNNING = "RUNNING"
    LOG = "LOG"
    COMPLETED = "COMPLETED"
    ERROR = "ERROR"

    @property
    def is_final(self) -> bool:
        """Whether nothing follows."""
        return self in (Status.COMPLETED, Status.ERROR)


@dataclass(frozen=True, slots=True)
class Submission:
    """What somebody asks to be run. `owner` is the account he has; `blocking`: he waits for it.

    `env` is what the client says of its model; `trusted` is what the key allows its code.
    """

    owner: Principal
    model_id: ModelId
    blocking: bool
    compress: bool
    env: Mapping[str, Any]
    trusted: bool

    @property
    def durable(self) -> bool:
        """Whether it outlives the daemon; one that somebody waits for on a socket does not."""
        return not self.blocking


@dataclass(frozen=True, slots=True)
class Job:
    """One accepted job. Times are seconds since the epoch; `status` is never `LOG`.

    `attempts` counts the times it was begun; `result_bytes` is 0 while and when there is no result.
    """

    job_id: str
    asked: Submission
    received_at: float
    status: Status = Status.QUEUED
    description: str = ""
    attempts: int = 0
    ended_at: float | None = None
    payload_bytes: int = 0
    result_bytes: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)

    def listing(self) -> dict[str, Any]:
        """Its row for the API, JSON-able."""
        return {
            "id": self.job_id,
            "model": self.asked.model_id,
            "owner": self.asked.owner.name,
            "status": self.status.value,
            "description": _in_short(self.description)[:200],
            "blocking": self.asked.blocking,
            "received_at": self.received_at,
            "ended_at": self.ended_at,
            "payload_bytes": self.payload_bytes,
            "result_bytes": self.result_bytes,
            **({"meta": dict(self.meta)} if self.meta else {}),
        }


_TRACEBACK = "Traceback (most recent call last):"


def _in_short(description: str) -> str:
    """Of a traceback what was raised at its end; all else as it is."""
    if not description.startswith(_TRACEBACK):
        return description
    lines = description.rpartition(_TRACEBACK)[2].split("\n")
    return "\n".join(itertools.dropwhile(lambda line: not line[:1].strip(), lines)) or description


@dataclass(frozen=True, slots=True)
class Update:
    """One thing to tell about a job. `result_bytes` is of a COMPLETED one."""

    job_id: str
    status: Status
    description: str = ""
    meta: Mapping[str, Any] | None = None
    result_bytes: int = 0
