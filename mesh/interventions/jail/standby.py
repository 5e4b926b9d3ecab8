"""One job of a jail that is forked and walled in before there is a payload for it.

Of the kind that was run last: whoever traces a model traces it again. It has run no code but ours.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mesh.errors import Busy, JailUnavailable
from mesh.interventions.jail.limits import JobLimits

if TYPE_CHECKING:
    from mesh.interventions.jail.job import JailedJob

logger = logging.getLogger(__name__)

_AFTER_S = 0.02
"""After a job's end, whose result has the first claim on the processor."""
_PAYLOAD_BYTES = 1 << 20
"""What it has room for beside its own memory."""


@dataclass(frozen=True, slots=True)
class JobKind:
    """What jobs have in common that could stand in for one another."""

    entry: str
    hint: str | None
    limits: JobLimits


class Standby:
    """See the module. `fork` makes a job of a kind with room for a payload of so many bytes."""

    def __init__(self, fork: Callable[[JobKind, int], Awaitable[JailedJob]]) -> None:
        self._fork = fork
        self._kind: JobKind | None = None
        self._job: JailedJob | None = None
        self._forking: asyncio.Task[None] | None = None
        self._begun: JobKind | None = None
        """What is forked at this moment."""
        self._is_closed = False

    async def take(self, kind: JobKind, payload_bytes: int) -> JailedJob | None:
        """The job that stands by or nearly does, where it is of that kind and lives."""
        if self._forking is not None and kind == self._begun:
            await asyncio.wait([self._forking])
        job = self._job
        if job is None or not job.lives or kind != self._kind or payload_bytes > _PAYLOAD_BYTES:
            return None
        self._job = None
        return job

    def keep(self, kind: JobKind) -> None:
        """Have one of that kind stand by, instead of one of another."""
        is_there = self._job is not None and self._job.lives and kind == self._kind
        if not (is_there or self._is_closed or self._forking is not None):
            self._drop()
            self._forking = asyncio.create_task(self._refill(kind), name="jail-standby")

    async def close(self) -> None:
        """Have none any more."""
        self._is_closed = True
        if self._forking is not None:
            self._forking.cancel()
            await asyncio.gather(self._forking, return_exceptions=True)
        self._drop()

    async def _refill(self, kind: JobKind) -> None:
        try:
            await asyncio.sleep(_AFTER_S)
            self._begun = kind
            self._kind, self._job = kind, await self._fork(kind, _PAYLOAD_BYTES)
        except (Busy, JailUnavailable) as error:  # the next job is forked when it comes
            logger.info("no job stands by: %s", error)
        finally:
            self._forking = self._begun = None

    def _drop(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.kill()
            job.abandon()
