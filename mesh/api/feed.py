"""The feed that dashboards and scripts follow: what happened, and what of the picture is new.

One update carries both, and updates come at most ten times a second whatever happens: events are
kept and come together, the picture is looked at once for each update, for all that follow. Nobody
who follows, nothing that is looked at. A caller sees of it what its key lets it see elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol

from mesh.api.auth import Access, Caller
from mesh.api.services import MeshView
from mesh.identity.api_keys import Scope
from mesh.types import Principal

PACE_S = 0.1
"""Updates are at least so far apart."""

IDLE_S = 0.5
"""The picture is looked at so often when nothing says that it has changed."""

KNOWN_S = 5.0
"""A follower of events hears so soon that its key was revoked, if nothing happens before."""

JOBS_S = 1.0
"""The queue's files are read so often at most."""


class Jobs(Protocol):
    """The queue, as far as the feed shows it."""

    async def overview(self, who: Principal | None) -> dict[str, list[dict[str, Any]]]:
        """The jobs of `who`, None: all."""


class DashboardFeed:
    """Makes updates for any number of followers."""

    def __init__(
        self,
        view: MeshView,
        access: Access,
        jobs: Jobs | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._access = access
        self._jobs = jobs
        self._now = now
        self._status: dict[str, Any] = {}
        self._looked_s = float("-inf")

    async def events(
        self, caller: Caller, after: int | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Events alone, each as it happens, without end. Raises Unauthorized when the caller's key
        is revoked."""
        async with aclosing(self._view.batches(after, pace_s=0.0, idle_s=KNOWN_S)) as batches:
            async for events in batches:
                self._access.require_known(caller)
                for event in events:
                    yield event

    async def follow(
        self, caller: Caller, after: int | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Updates without end: ``{"last_id", "missed", "events": [...], "status": {...}}``.

        `last_id` is the newest event's that was given, by which a reader comes back; `missed`
        counts those after `after` that are not kept any more. `status` has the parts of
        `MeshView.status` that changed, all of them at first, and ``jobs`` for whoever may see any.
        Raises Unauthorized when the caller's key is revoked.
        """
        sent: dict[str, Any] = {}
        jobs_s = float("-inf")
        batches = self._view.batches(after, pace_s=PACE_S, idle_s=IDLE_S)
        async with aclosing(batches):
            last_id = after
            async for events in batches:
                self._access.require_known(caller)
                picture = self._look()
                if self._now() - jobs_s >= JOBS_S or not sent:
                    picture = {**picture, **await self._jobs_of(caller)}
                    jobs_s = self._now()
                news = {k: v for k, v in picture.items() if k not in sent or sent[k] != v}
                if not (news or events) and sent:
                    continue
                sent |= news
                missed = 0
                if events:
                    begins = events[0]["id"]
                    if last_id is not None and begins > last_id:
                        missed = begins - last_id - 1
                    last_id = events[-1]["id"]
                yield {"last_id": last_id, "missed": missed, "events": events, "status": news}

    def _look(self) -> dict[str, Any]:
        """The picture; one that was just taken for another follower does as well."""
        now = self._now()
        if now - self._looked_s >= PACE_S / 2:
            self._status, self._looked_s = self._view.status(), now
        return self._status

    async def _jobs_of(self, caller: Caller) -> dict[str, Any]:
        if self._jobs is None or not caller.allows(Scope.INTERVENTIONS):
            return {}
        return {"jobs": await self._jobs.overview(caller.lists_jobs_of)}
