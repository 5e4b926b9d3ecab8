"""Finds the hops that make no progress and has them replaced.

Where somebody else, or the local model, could take over, the limit is what this hop usually needs
(`mesh.pipeline.watch.latency`); where nobody could, the configured one: giving up a slow hop for
itself helps nobody. A shard that answers another generation of this asker meanwhile makes progress,
and is given what the largest of the steps needs that it owes: they take turns on it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from mesh.pipeline.hop import GenerationHop
from mesh.pipeline.sessions import GenerationSession, Sessions
from mesh.pipeline.watch.latency import StepOverdue
from mesh.pipeline.watch.oversight import Oversight
from mesh.routing.cover import ShardKey, key_of
from mesh.routing.router import UNSERVED, ShardRouter

TICK_S = 0.25
_STARVED = 10
"""Of the ceiling: so long a generation is not without an answer, whoever else gets any."""

_LATE_S = 0.25
"""A tick this late was our own doing: answers lay unread and seem slow."""


class StallWatch:
    """Watches every live session of an asker. `ceiling_s` is the configured limit."""

    def __init__(
        self, sessions: Sessions, router: ShardRouter, oversight: Oversight, *, ceiling_s: float
    ) -> None:
        self._sessions = sessions
        self._router = router
        self._oversight = oversight
        self._ceiling_s = ceiling_s

    async def run(self) -> None:
        """Look every `TICK_S` seconds while a session is live, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await self._sessions.busy.wait()
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            # Judged as of when the tick was due: a turn of the loop has read what came before that.
            # What came later, while the loop was busy, may not be read yet.
            self.look(due, is_late=loop.time() - due >= _LATE_S)

    def look(self, now: float, *, is_late: bool = False) -> None:
        """Fail every hop that owes an answer for too long at `now`, or long answers too slowly;
        the latter not when it `is_late`, for then it may be us who are slow."""
        owed = [
            (session, hop, since)
            for session in self._sessions.live.values()
            for hop in session.route.hops
            if (since := hop.waiting_since) is not None and hop.error is None
        ]
        limits_s: defaultdict[ShardKey, float] = defaultdict(float)
        for _, hop, since in owed:
            key = key_of(hop.hop.shard)
            limit_s = self._oversight.latency(key).limit_s(hop.waiting_rows, since)
            limits_s[key] = max(limits_s[key], limit_s)
        for session, hop, since in owed:
            self._judge(session, hop, since, limits_s[key_of(hop.hop.shard)], now, is_late)

    def _judge(
        self,
        session: GenerationSession,
        hop: GenerationHop,
        since: float,
        limit_s: float,
        now: float,
        is_late: bool,
    ) -> None:
        shard = hop.hop.shard
        latency = self._oversight.latency(key_of(shard))
        limit_s = max(limit_s, self._oversight.limit_s(hop))
        waited_s = now - max(since, latency.answered_at)
        slow = not is_late and latency.is_slow(hop.waiting_rows)
        if waited_s > self._ceiling_s or now - since > _STARVED * self._ceiling_s:
            limit_s, slow = self._ceiling_s, False
        elif not (waited_s > limit_s or slow) or not self._is_replaceable(session, hop):
            return
        what = "answers much slower than usual" if slow else f"gave no answer for {limit_s:.3g} s"
        hop.fail(
            StepOverdue(
                f"{shard.node_name} {what}.",
                fix="Another shard is tried; see `hearthnet status`.",
                since=since,
            )
        )

    def _is_replaceable(self, session: GenerationSession, hop: GenerationHop) -> bool:
        if session.may_go_home:
            return True
        terms, lost = hop.terms, hop.hop
        try:
            self._router.cover(
                terms.model_id, terms.weights_sha256, lost.layers, {key_of(lost.shard)}
            )
        except UNSERVED:
            return False
        return True
