"""Everything one asker watches its hops for: pace, sanity, honesty; and what follows from it.

Every station reports here. The verdicts come from `mesh.health`, the spot checks from
`mesh.pipeline.audit`; this module ties them to stations, standings and events.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from mesh.clock import Clock
from mesh.errors import (
    BadRequest,
    BadSteering,
    Busy,
    CacheFull,
    ContextTooLong,
    DiskFull,
    MeshError,
    NotEnoughMemory,
    SessionGone,
)
from mesh.health.latency import HopLatency, StepOverdue
from mesh.health.sanity import Envelope, corrupt, not_finite
from mesh.health.standing import Standings
from mesh.pipeline.audit import Auditor, Finding
from mesh.pipeline.claims import Claim, Claims
from mesh.pipeline.station import Station
from mesh.routing.cover import ShardKey, key_of
from mesh.types import RouteHop, ShardDescriptor
from mesh.wire.messages import WireTensor

MAX_EVENTS = 256
MAX_PACES = 1024
"""Shards whose pace is remembered; the one that was asked about longest ago makes room."""

_NO_FAULT = (
    BadRequest, BadSteering, Busy, CacheFull, ContextTooLong, DiskFull, NotEnoughMemory,
    SessionGone,
)  # fmt: skip
"""Answers that say nothing against a host: it is full, forgot, or was asked something wrong."""


class Oversight:
    """Implements `mesh.pipeline.station.Overseer`; one for all generations of an asker.

    The owner sets `auditor` when there are to be spot checks, and `expel`, which is called with a
    shard that lied and has to keep it, and what it said, out of every generation.
    """

    def __init__(self, clock: Clock, *, ceiling_s: float, asker: str = "") -> None:
        """`asker` is the name of whoever asks, see `Claims`."""
        self.standings = Standings(clock)
        self.claims = Claims(asker)
        self.envelope = Envelope()
        self.auditor: Auditor | None = None
        self.expel: Callable[[ShardDescriptor], None] = lambda liar: None
        self._ceiling_s = ceiling_s
        self._latencies: dict[ShardKey, HopLatency] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)

    # Overseer

    def claim(self, hop: RouteHop) -> Claim:
        """See `Overseer.claim`."""
        return self.claims.claim(key_of(hop.shard))

    def answered(
        self, station: Station, position: int, tensor: WireTensor, elapsed_s: float
    ) -> MeshError | None:
        """See `Overseer.answered`."""
        shard = station.hop.shard
        key = key_of(shard)
        if station.terms.edits:
            # The bounds are those of the model as it is; steered, only nonsense is noticed.
            fault = not_finite(tensor)
            if fault and any(e.site.layer < station.hop.layers.start for e in station.terms.edits):
                # What came in may have been larger than this hop's number format holds.
                return BadSteering(
                    f"Steered like this, what leaves layer {station.hop.layers.stop - 1} is not"
                    " finite any more.",
                    fix="Lower the strength.",
                    param="strength",
                )
        else:
            fault = self.envelope.check(station.hop.layers.stop, tensor, shard.host)
        if fault:
            return self.corrupted(station.hop, fault)
        self.standings.served(key)
        if station.answers:  # the first of a session may have had to wait for the weights
            self.latency(key).answered(tensor.shape[1], elapsed_s)
        if self.auditor is not None:
            self.auditor.answered(station, position, tensor)
        return None

    def corrupted(self, hop: RouteHop, what: str) -> MeshError:
        """See `Overseer.corrupted`."""
        self._event("shard_corrupt", hop.shard, layers=str(hop.layers), seen=what)
        return corrupt(hop.shard.node_name, what)

    def failed(self, hop: RouteHop, error: MeshError) -> None:
        """See `Overseer.failed`."""
        key = key_of(hop.shard)
        if isinstance(error, _NO_FAULT):
            return
        if isinstance(error, StepOverdue):
            now = asyncio.get_running_loop().time()
            if not self.latency(key).given_up(error.since, now):
                return  # of the silence that was counted already
        self.standings.failed(key, error.message)

    def trusts(self, key: ShardKey) -> bool:
        """See `Overseer.trusts`."""
        return not self.standings.is_liar(key)

    async def make_room(self, hop: RouteHop) -> bool:
        """See `Overseer.make_room`."""
        return self.auditor is not None and await self.auditor.yield_to(hop.shard.host)

    def cut(self, station: Station, position: int) -> None:
        """See `Overseer.cut`."""
        if self.auditor is not None:
            self.auditor.cut(station, position)

    def closed(self, station: Station) -> None:
        """See `Overseer.closed`."""
        if self.auditor is not None:
            self.auditor.closed(station)

    # What the rest of the asker asks

    def latency(self, key: ShardKey) -> HopLatency:
        """What is known of a shard's pace."""
        known = self._latencies.pop(key, None)
        if known is None:
            if len(self._latencies) >= MAX_PACES:
                del self._latencies[next(iter(self._latencies))]
            known = HopLatency(self._ceiling_s)
        self._latencies[key] = known  # at the end: in use
        return known

    def limit_s(self, station: Station) -> float:
        """After how long without an answer the station's hop should be replaced if it can be."""
        since = station.waiting_since
        if not station.answers or since is None:
            return self._ceiling_s
        return self.latency(key_of(station.hop.shard)).limit_s(station.waiting_rows, since)

    def rows(self) -> list[dict[str, Any]]:
        """Standings and paces in JSON-able form."""
        rows = self.standings.rows()
        for row in rows:
            latency = self.latency((row["host"], row["shard_id"]))
            row["p50_ms"] = round(latency.percentile_ms(0.50), 3)
            row["p95_ms"] = round(latency.percentile_ms(0.95), 3)
        return rows

    def take_events(self) -> list[dict[str, Any]]:
        """What happened since the last call; each has a ``type``."""
        events = list(self._events)
        self._events.clear()
        return events

    def found(self, finding: Finding) -> None:
        """A spot check found two hosts that disagree."""
        shards = (finding.checked, finding.reference)
        digests = dict(zip((shard.node_name for shard in shards), finding.digests, strict=True))
        facts = {
            "position": finding.position,
            "excess": round(finding.excess, 2),
            "digests": digests,
        }
        if finding.liar is None:
            for shard in shards:
                self.standings.doubted(key_of(shard), "a spot check disagreed, nobody could tell")
            self._event("shard_doubtful", shards[0], other=shards[1].node_name, **facts)
            return
        known = self.standings.is_liar(key_of(finding.liar))
        self.standings.lied(key_of(finding.liar), "it was caught in a wrong answer")
        if known:
            return  # of another generation, which the first finding took it out of, too
        honest = shards[1] if finding.liar is shards[0] else shards[0]
        self._event("shard_lied", finding.liar, other=honest.node_name, **facts)
        self.expel(finding.liar)

    def _event(self, kind: str, shard: ShardDescriptor, **fields: Any) -> None:
        self._events.append(
            {
                "type": kind,
                "shard_id": shard.shard_id,
                "node": shard.node_name,
                "node_id": shard.host,
                **fields,
            }
        )
