"""What a generation does when a hop is lost, or is about to go.

Others are picked for its layers and its inputs are replayed into them. After too many losses, or
when nobody else serves the layers, the whole model goes on at home where that is possible. The
tokens so far are never touched: only caches are rebuilt.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from mesh.errors import BadSteering, CacheFull, ContextTooLong, MeshError, NoRoute
from mesh.pipeline.chain import HopLost
from mesh.pipeline.sessions import GenerationSession, replaced
from mesh.routing.cover import ShardKey, key_of
from mesh.routing.router import UNSERVED, ShardRouter
from mesh.types import (
    LayerRange,
    PipelineAborted,
    RouteHop,
    ShardFailover,
    ShardStatus,
    StreamFrame,
)

CHUNK_ROWS = 128
"""Rows of one prefill chunk: enough for an efficient matrix product, few enough to overlap hops."""

CHUNK_BYTES = 1 << 20
"""A chunk fits one frame, so that it need not be cut and put together again."""

LocalModel = Callable[[], Awaitable[Sequence[RouteHop]]]
"""Loads the whole model at home; hops over all its layers. Raises MeshError when it cannot."""


@dataclass(frozen=True, slots=True)
class RecoverySettings:
    """How much a generation puts up with.

    The `fallback_after`-th loss sends it home, when `go_home` allows that. After `max_failovers`
    it is given up. `retry_delays_s` are waited, one after the other, while nobody serves the lost
    layers and it cannot go home.
    """

    fallback_after: int = 2
    max_failovers: int = 16
    retry_delays_s: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8, 1.6)


class Recovery:
    """Repairs one session. `local_model` is None when this request may not or cannot go home."""

    def __init__(
        self,
        session: GenerationSession,
        router: ShardRouter,
        hidden_size: int,
        settings: RecoverySettings,
        local_model: LocalModel | None,
    ) -> None:
        self._session = session
        self._router = router
        self._rows = chunk_rows(hidden_size)
        self._settings = settings
        self._local_model = local_model
        self._excluded: set[ShardKey] = set()
        self._stays: set[ShardKey] = set()
        session.may_go_home = local_model is not None and not session.fallback

    async def recover(self, lost: HopLost) -> AsyncGenerator[StreamFrame, None]:
        """Replace a lost hop; PipelineAborted and NoRoute when that stays impossible, or CacheFull
        when it is room that nobody has.

        Raises BadSteering when the hop is not at fault: any other would refuse the edits as well.
        """
        if isinstance(lost.error, BadSteering):
            raise lost.error
        session, shard = self._session, lost.hop.shard
        status = "full" if isinstance(lost.error, _NO_ROOM) else "degraded"
        yield ShardStatus(shard.shard_id, shard.node_name, status, str(lost.error))
        self._excluded.add(key_of(shard))
        session.failovers += 1
        hops: tuple[RouteHop, ...] = ()
        if session.failovers < self._settings.fallback_after or session.fallback:
            hops = await self._elsewhere(lost, ())
        if not hops:
            was_home = session.fallback
            async for notice in self._home(lost):
                yield notice
            if session.fallback and not was_home:
                return
            hops = await self._elsewhere(lost, self._settings.retry_delays_s)
        if not hops:
            hops = await self._afresh(lost)
        if not hops:
            error = _no_room(lost) if status == "full" else _gone(lost)
            yield PipelineAborted(error.message)
            raise error
        yield self._failover(lost.hop, hops)

    async def leave_draining_hops(self) -> AsyncGenerator[StreamFrame, None]:
        """Move off hops whose host is about to stop, where somebody else serves their layers.

        A hop that nobody can replace is used on: its host waits for us.
        """
        left: set[ShardKey] = set()
        while (index := self._movable()) is not None:
            hop = self._session.chain.stations[index].hop
            key = key_of(hop.shard)
            left.add(key)
            try:
                picked = self._router.repick(
                    self._session.pipeline, index, self._excluded | self._stays | left
                )
                await self._session.chain.replace(index, picked, self._rows)
            except HopLost as refused:
                left.add(key_of(refused.hop.shard))
                continue
            except UNSERVED:
                self._stays.add(key)
                continue
            yield ShardStatus(hop.shard.shard_id, hop.shard.node_name, "draining", "it is stopping")
            self._note(index, picked)
            yield self._failover(hop, picked)

    # Private

    async def _elsewhere(self, lost: HopLost, delays: Sequence[float]) -> tuple[RouteHop, ...]:
        """Hops that now replace the lost one; empty when nobody could after all `delays`."""
        session, waits = self._session, iter(delays)
        while session.failovers <= self._settings.max_failovers:
            if session.chain.is_misled:
                return await self._afresh(lost)
            try:
                hops = self._router.repick(session.pipeline, lost.index, self._excluded)
                await session.chain.replace(lost.index, hops, self._rows)
            except HopLost as again:
                self._excluded.add(key_of(again.hop.shard))
            except UNSERVED:
                wait = next(waits, None)
                if wait is None:
                    return ()
                await asyncio.sleep(wait)
                # Nobody else is left, so those who failed are as good as any: one may be back.
                self._excluded.clear()
            else:
                self._note(lost.index, hops)
                return hops
        return ()

    async def _afresh(self, lost: HopLost) -> tuple[RouteHop, ...]:
        """A whole new route, after the sessions on all other hops were given back as well.

        What replaces the lost hop may lack just the stream that the next hop holds for us; and
        where a hop lied, the caches behind it hold what it said.
        """
        session, pipeline = self._session, self._session.pipeline
        chain, whole = session.chain, LayerRange(0, pipeline.total_layers)
        if len(chain.stations) == 1 or session.failovers > self._settings.max_failovers:
            return ()
        chain.close()
        failed = {key_of(lost.hop.shard)}
        while True:
            try:
                hops = self._router.cover(pipeline.model_id, pipeline.weights_sha256, whole, failed)
                await chain.replace(0, hops, self._rows, count=len(chain.stations))
            except UNSERVED:
                return ()
            except HopLost as again:
                failed.add(key_of(again.hop.shard))
                continue
            session.pipeline = replaced(pipeline, 0, hops, count=len(pipeline.hops))
            return hops

    async def _home(self, lost: HopLost) -> AsyncGenerator[StreamFrame, None]:
        """Go on with the whole model at home; nothing happens when that cannot be."""
        if self._local_model is None or not self._session.may_go_home:
            return
        self._session.may_go_home = False
        chain = self._session.chain
        try:
            hops = tuple(await self._local_model())
            await chain.replace(0, hops, self._rows, count=len(chain.stations))
        except (MeshError, HopLost):
            return  # it does not fit here, or its process failed: others are asked after all
        self._session.fallback = True
        pipeline = self._session.pipeline
        self._session.pipeline = replaced(pipeline, 0, hops, count=len(pipeline.hops))
        yield PipelineAborted(f"{lost.error.message} The answer goes on from the local model.")

    def _movable(self) -> int | None:
        for index, station in enumerate(self._session.chain.stations):
            if station.is_draining and key_of(station.hop.shard) not in self._stays:
                return index
        return None

    def _note(self, index: int, hops: Sequence[RouteHop]) -> None:
        self._session.pipeline = replaced(self._session.pipeline, index, hops)

    def _failover(self, lost: RouteHop, hops: Sequence[RouteHop]) -> ShardFailover:
        replacements = tuple(hop.shard.shard_id for hop in hops)
        return ShardFailover(lost.shard.shard_id, replacements, len(self._session.token_ids))


def chunk_rows(hidden_size: int) -> int:
    """How many rows of a prefill travel together."""
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES // (4 * hidden_size)))


_NO_ROOM = (CacheFull, ContextTooLong)
"""What a hop answers to a step that its caches have no room for."""


def _no_room(lost: HopLost) -> CacheFull:
    return CacheFull(
        f"{lost.hop.shard.node_name} has no room for more of this text in its caches, nor has"
        " anybody else.",
        fix="Ask again when others have ended, or raise kv_tokens where these layers run.",
    )


def _gone(lost: HopLost) -> NoRoute:
    return NoRoute(
        f"{lost.hop.shard.node_name} was lost with layers {lost.hop.layers} and nobody else "
        f"serves them: {lost.error.message}",
        fix="Start a node that holds them (`hearthnet up --layers LO-HI`), then ask again.",
    )
