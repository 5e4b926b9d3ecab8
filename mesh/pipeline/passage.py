"""Takes tokens through the hops of one session to logits, whatever happens to a hop.

When a hop is lost, others are picked for its layers, its inputs are replayed into them, and the
wait goes on where it was: the caller only sees notices of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import torch

from mesh.errors import NoRoute
from mesh.pipeline.chain import HopLost
from mesh.pipeline.model import AskerModel
from mesh.pipeline.sessions import GenerationSession, raise_if_hopeless, replaced
from mesh.routing.cover import ShardKey, key_of
from mesh.routing.router import ShardRouter
from mesh.types import (
    HopTiming,
    PipelineAborted,
    RouteHop,
    ShardFailover,
    ShardStatus,
    StreamFrame,
)
from mesh.wire.activations import to_torch, to_wire

CHUNK_ROWS = 128
"""Rows of one prefill chunk: enough for an efficient matrix product, few enough to overlap hops."""

CHUNK_BYTES = 1 << 20
"""A chunk fits one frame, so that it need not be cut and put together again."""


@dataclass(frozen=True, slots=True)
class RecoverySettings:
    """How long a lost hop is worth waiting for.

    After `max_failovers` losses in one generation it is given up. `retry_delays_s` are waited, one
    after the other, while nobody serves the lost layers.
    """

    max_failovers: int = 8
    retry_delays_s: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8, 1.6)


class Passage:
    """Moves one session forward; `logits` (vocab,) belong to the last token fed."""

    def __init__(
        self,
        model: AskerModel,
        session: GenerationSession,
        router: ShardRouter,
        recovery: RecoverySettings,
    ) -> None:
        self.logits = torch.empty(0)
        self._ends = model.ends
        self._rows = max(1, min(CHUNK_ROWS, CHUNK_BYTES // (4 * model.hidden_size)))
        self._session = session
        self._router = router
        self._recovery = recovery
        self._excluded: set[ShardKey] = set()

    @property
    def route(self) -> tuple[RouteHop, ...]:
        """The hops as they are now."""
        return self._session.pipeline.hops

    @property
    def failovers(self) -> int:
        """How many hops were replaced so far."""
        return self._session.failovers

    def timings(self) -> tuple[HopTiming, ...]:
        """Percentiles per hop."""
        return tuple(station.timing() for station in self._session.chain.stations)

    async def advance(self, ids: Sequence[int]) -> AsyncGenerator[StreamFrame, None]:
        """Feed `ids` after what the session holds and set `logits`; yields notices only.

        Chunks follow each other through the hops. At most one more than there are hops is on its
        way at once, so that every hop is busy and memory stays bounded.
        """
        session = self._session
        rows = self._rows
        for start in range(0, len(ids), rows):
            chunk = list(ids[start : start + rows])
            hidden = self._ends.embed(torch.tensor([chunk]), len(session.token_ids))
            session.chain.feed(to_wire(hidden, session.chain.terms.wire_dtype))
            session.token_ids += chunk
            under_way = rows * (len(session.chain.stations) + 1)
            if start + rows < len(ids) and len(session.token_ids) > under_way:
                async for notice in self._reach(len(session.token_ids) - under_way):
                    yield notice
        async for notice in self._reach(len(session.token_ids)):
            yield notice
        row = await session.chain.output(len(session.token_ids))
        self.logits = self._ends.logits(to_torch(row))[0, -1]

    async def _reach(self, position: int) -> AsyncGenerator[StreamFrame, None]:
        while True:
            try:
                await self._session.chain.output(position)
            except HopLost as lost:
                raise_if_hopeless(lost)
                async for notice in self._recover(lost):
                    yield notice
            else:
                return

    async def _recover(self, lost: HopLost) -> AsyncGenerator[StreamFrame, None]:
        """Replace a lost hop; PipelineAborted and NoRoute when that stays impossible."""
        session, shard = self._session, lost.hop.shard
        yield ShardStatus(shard.shard_id, shard.node_name, "degraded", str(lost.error))
        self._excluded.add(key_of(shard))
        session.failovers += 1
        hops: tuple[RouteHop, ...] = ()
        delays = iter(self._recovery.retry_delays_s)
        while not hops and session.failovers <= self._recovery.max_failovers:
            try:
                picked = self._router.repick(session.pipeline, lost.index, self._excluded)
                await session.chain.replace(lost.index, picked, self._rows)
                hops = picked
            except HopLost as again:
                raise_if_hopeless(again)
                self._excluded.add(key_of(again.hop.shard))
            except NoRoute:
                delay = next(delays, None)
                if delay is None:
                    break
                await asyncio.sleep(delay)
                # Nobody else is left, so those who failed are as good as any: one may be back.
                self._excluded.clear()
        if not hops:
            error = _gone(lost)
            yield PipelineAborted(error.message)
            raise error
        session.pipeline = replaced(session.pipeline, lost.index, hops)
        replacements = tuple(hop.shard.shard_id for hop in hops)
        yield ShardFailover(shard.shard_id, replacements, len(session.token_ids))


def _gone(lost: HopLost) -> NoRoute:
    return NoRoute(
        f"{lost.hop.shard.node_name} was lost with layers {lost.hop.layers} and nobody else "
        f"serves them: {lost.error.message}",
        fix="Start a node that holds them (`hearthnet up --layers LO-HI`), then ask again.",
    )
