"""Everything one asker watches its hops for: pace, sanity, honesty; and what follows from it.

Every hop reports here. The verdicts come from its neighbours in this package; this module ties them
to hops, reputations and events.
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
from mesh.pipeline.claims import Claim, Claims
from mesh.pipeline.history import slice_rows
from mesh.pipeline.hop import GenerationHop
from mesh.pipeline.watch.latency import HopLatency, StepOverdue
from mesh.pipeline.watch.reputation import Reputations
from mesh.pipeline.watch.sanity import (
    Envelope,
    contradiction,
    corrupt,
    impossible,
    not_finite,
    rows_as_floats,
)
from mesh.pipeline.watch.spot_checks import SpotChecks, SpotFinding
from mesh.routing.cover import ShardKey, key_of
from mesh.types import RouteHop, ShardDescriptor
from mesh.wire.messages import WireTensor
from mesh.wire.token_rows import top_from_wire

MAX_EVENTS = 256
MAX_PACES = 1024
"""Shards whose pace is remembered; the one that was asked about longest ago makes room."""

_NO_FAULT = (
    BadRequest, BadSteering, Busy, CacheFull, ContextTooLong, DiskFull, NotEnoughMemory,
    SessionGone,
)  # fmt: skip
"""Answers that say nothing against a host: it is full, forgot, or was asked something wrong."""


class Oversight:
    """Is told what all hops of an asker do, and may refuse what they answer.

    The owner sets `spot_checks` where there are to be any, and `expel`, which is called with a
    shard that lied and has to keep it, and what it said, out of every generation.
    """

    def __init__(self, clock: Clock, *, ceiling_s: float, asker: str = "") -> None:
        """`asker` is the name of whoever asks, see `Claims`."""
        self.reputations = Reputations(clock)
        self.claims = Claims(asker)
        self.envelope = Envelope()
        self.spot_checks: SpotChecks | None = None
        self.expel: Callable[[ShardDescriptor], None] = lambda liar: None
        self._ceiling_s = ceiling_s
        self._latencies: dict[ShardKey, HopLatency] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)

    # What hops say

    def claim(self, hop: RouteHop) -> Claim:
        """Count a session that is about to be opened on this hop."""
        return self.claims.claim(key_of(hop.shard))

    def answered(
        self, hop: GenerationHop, position: int, tensor: WireTensor, kept: int, elapsed_s: float
    ) -> MeshError | None:
        """Check an answer of the right shape before anybody uses it; an error refuses it. Of its
        rows, those behind the first `kept` are about what was taken back meanwhile."""
        shard = hop.hop.shard
        key = key_of(shard)
        ends = hop.terms.remote_ends
        if ends is not None and ends.gives_candidates(hop.hop.layers):
            fault = impossible(top_from_wire(tensor), ends.vocab_size)
        elif not hop.terms.edits and (ends is None or ends.bears_hidden(hop.hop.layers)):
            fault = self.envelope.check(hop.hop.layers.stop, tensor, shard.host)
        else:
            # The bounds are those of the model as it is, in front of its final norm; of others
            # only nonsense is noticed.
            fault = not_finite(tensor)
            if fault and any(e.site.layer < hop.hop.layers.start for e in hop.terms.edits):
                # What came in may have been larger than this hop's number format holds.
                return BadSteering(
                    f"Steered like this, what leaves layer {hop.hop.layers.stop - 1} is not"
                    " finite any more.",
                    fix="Lower the strength.",
                    param="strength",
                )
        if fault:
            return self.corrupted(hop.hop, fault)
        self.reputations.served(key)
        latency = self.latency(key)
        latency.answered_at = asyncio.get_running_loop().time()
        if hop.times.count:  # the first of a session may have had to wait for the weights
            latency.answered(tensor.shape[1], elapsed_s)
        if self.spot_checks is not None and kept:
            self.spot_checks.answered(hop, position, slice_rows(tensor, 0, kept))
        return None

    def gave_row(self, hop: RouteHop, said: WireTensor, row: WireTensor) -> MeshError | None:
        """Check all logits of a row against the candidates that the hop `said` it has; an error
        refuses them."""
        fault = contradiction(top_from_wire(said), rows_as_floats(row)[0])
        return self.corrupted(hop, fault) if fault else None

    def corrupted(self, hop: RouteHop, what: str) -> MeshError:
        """Report a hop that answered `what` instead of activations; the error of that."""
        self._event("shard_corrupt", hop.shard, layers=str(hop.layers), seen=what)
        return corrupt(hop.shard.node_name, what)

    def failed(self, hop: RouteHop, error: MeshError) -> None:
        """Note a hop that could not be opened, or was lost."""
        key = key_of(hop.shard)
        if isinstance(error, _NO_FAULT):
            return
        if isinstance(error, StepOverdue):
            now = asyncio.get_running_loop().time()
            if not self.latency(key).given_up(error.since, now):
                return  # of the silence that was counted already
        self.reputations.failed(key, error.message)

    def lie_of(self, hop: RouteHop) -> MeshError | None:
        """The error of a shard that was caught in a wrong answer; None for an honest one."""
        if not self.reputations.is_liar(key_of(hop.shard)):
            return None
        return corrupt(hop.shard.node_name, "a wrong answer to somebody else meanwhile")

    async def make_room(self, hop: RouteHop) -> bool:
        """Free what checks hold on a hop that is full; whether anything was."""
        return self.spot_checks is not None and await self.spot_checks.yield_to(hop.shard.host)

    def cut(self, hop: GenerationHop, position: int) -> None:
        """Forget what was seen of a hop from `position` on; what went into it is still there."""
        if self.spot_checks is not None:
            self.spot_checks.cut(hop, position)

    def closed(self, hop: GenerationHop) -> None:
        """Check nothing more of a session that ended, or was parked."""
        if self.spot_checks is not None:
            self.spot_checks.closed(hop)

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

    def limit_s(self, hop: GenerationHop) -> float:
        """After how long without an answer the hop should be replaced if it can be."""
        since = hop.waiting_since
        if not hop.times.count or since is None:
            return self._ceiling_s
        return self.latency(key_of(hop.hop.shard)).limit_s(hop.waiting_rows, since)

    def rows(self) -> list[dict[str, Any]]:
        """Reputations and paces in JSON-able form."""
        rows = self.reputations.rows()
        for row in rows:
            key = (row["host"], row["shard_id"])
            latency = self._latencies.get(key) or HopLatency(self._ceiling_s)
            row["p50_ms"] = round(latency.percentile_ms(0.50), 3)
            row["p95_ms"] = round(latency.percentile_ms(0.95), 3)
        return rows

    def take_events(self) -> list[dict[str, Any]]:
        """What happened since the last call; each has a ``type``."""
        events = list(self._events)
        self._events.clear()
        return events

    def found(self, finding: SpotFinding) -> None:
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
                self.reputations.doubted(key_of(shard), "a spot check disagreed, nobody could tell")
            self._event("shard_doubtful", shards[0], other=shards[1].node_name, **facts)
            return
        known = self.reputations.is_liar(key_of(finding.liar))
        self.reputations.lied(key_of(finding.liar), "it was caught in a wrong answer")
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
