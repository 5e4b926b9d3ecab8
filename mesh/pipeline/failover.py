"""What a generation does when a hop is lost, or is about to go.

Others are picked for its layers and its inputs are replayed into them. After too many losses, or
when nobody else serves the layers, the whole model goes on at home where that is possible. The
tokens so far are never touched: only caches are rebuilt.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from random import uniform

from mesh.errors import (
    AddressLost,
    BadSteering,
    CacheFull,
    ContextTooLong,
    MeshError,
    NoRoute,
)
from mesh.pipeline.history import chunk_rows
from mesh.pipeline.room_line import JITTER
from mesh.pipeline.route import HopLost, open_route
from mesh.pipeline.sessions import GenerationSession
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

LocalModel = Callable[[], Awaitable[Sequence[RouteHop]]]
"""Loads the whole model at home; hops over all its layers. Raises MeshError when it cannot."""


NO_ROOM = (CacheFull, ContextTooLong)
"""What a hop answers to a step that its caches have no room for."""


@dataclass(frozen=True, slots=True)
class FailoverSettings:
    """How much a generation puts up with.

    The `fallback_after`-th loss sends it home, when `go_home` allows that. After `max_failovers`
    it is given up. `retry_delays_s` are waited, one after the other, while nobody serves the lost
    layers and it cannot go home, and then `moved_delays_s` where this machine has moved: the others
    are there, and are met again.
    """

    fallback_after: int = 2
    max_failovers: int = 16
    retry_delays_s: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8, 1.6)
    moved_delays_s: tuple[float, ...] = (3.2, 6.4)

    def delays_s(self, error: MeshError) -> tuple[float, ...]:
        """What is waited after this loss."""
        has_moved = isinstance(error, AddressLost)
        return self.retry_delays_s + self.moved_delays_s * has_moved


class Failover:
    """Repairs one session. `local_model` is None when this request may not or cannot go home."""

    def __init__(
        self,
        session: GenerationSession,
        router: ShardRouter,
        row_size: int,
        settings: FailoverSettings,
        local_model: LocalModel | None,
    ) -> None:
        self._session = session
        self._router = router
        self._rows = chunk_rows(row_size)
        self._settings = settings
        self._local_model = local_model
        self._excluded: set[ShardKey] = set()
        self._stays: set[ShardKey] = set()
        self._doubts_refusal = True

    async def recover(self, lost: HopLost) -> AsyncGenerator[StreamFrame, None]:
        """Replace a lost hop; PipelineAborted and NoRoute when that stays impossible, or CacheFull
        when it is room that nobody has.

        Raises BadSteering when a second hop refuses the edits, or none can be asked in the place of
        the first.
        """
        session, shard = self._session, lost.hop.shard
        self._excluded.add(key_of(shard))
        session.failovers += 1
        hops: tuple[RouteHop, ...] = ()
        if isinstance(lost.error, BadSteering):
            if self._doubts_refusal:
                hops = await self._replaced(lost.index, self._excluded)
            if not hops:
                raise lost.error
            self._doubts_refusal = False
        status = "full" if isinstance(lost.error, NO_ROOM) else "degraded"
        yield ShardStatus(shard.shard_id, shard.node_name, status, lost.error.message)
        if hops:
            yield self._notice(lost.hop, hops, status)
            return
        if session.failovers < self._settings.fallback_after or session.fallback:
            hops = await self._elsewhere(lost, ())
        if not hops:
            at_home = await self._home(lost)
            if at_home is not None:
                yield at_home
                return
            delays = self._settings.delays_s(lost.error)
            hops = await self._elsewhere(lost, delays) or await self._afresh(lost)
        if not hops:
            error = _no_room(lost) if status == "full" else _gone(lost)
            yield PipelineAborted(error.message)
            raise error
        if hops[0] is not lost.hop:
            yield self._notice(lost.hop, hops, status)

    async def leave_draining_hops(self) -> AsyncGenerator[StreamFrame, None]:
        """Move off hops whose host is about to stop, where somebody else serves their layers.

        A hop that nobody can replace is used on: its host waits for us.
        """
        left: set[ShardKey] = set()
        while (index := self._movable()) is not None:
            hop = self._session.route.hops[index].hop
            left.add(key_of(hop.shard))
            hops = await self._replaced(index, self._excluded | self._stays | left)
            if not hops:
                self._stays.add(key_of(hop.shard))
                continue
            yield ShardStatus(hop.shard.shard_id, hop.shard.node_name, "draining", "it is stopping")
            yield self._notice(hop, hops, "draining")

    # Private

    async def _elsewhere(self, lost: HopLost, delays: Sequence[float]) -> tuple[RouteHop, ...]:
        """Hops that now replace the lost one, or itself where it had no room and has some now;
        empty when nobody could after all `delays`."""
        session, waits = self._session, iter(delays)
        while session.failovers <= self._settings.max_failovers:
            if session.route.is_misled:
                return await self._afresh(lost)
            hops = await self._replaced(lost.index, self._excluded)
            wait = next(waits, None)
            if hops or wait is None:
                return hops
            # Of several that wait for each other's room, one gives up before the others do.
            await asyncio.sleep(wait * uniform(1 - JITTER, 1 + JITTER))  # noqa: S311 - no secret
            if isinstance(lost.error, CacheFull) and await self._has_room_by_now(lost.index):
                return (lost.hop,)
            # Nobody else is left, so those who failed are as good as any: one may be back.
            self._excluded.clear()
        return ()

    async def _has_room_by_now(self, index: int) -> bool:
        """Whether the hop, which had no room for more of the session, goes on with it. Another
        session in its place would have to have room beside it."""
        session = self._session
        hop = session.route.hops[index]
        if not hop.go_on(self._rows):
            return False
        try:
            await session.route.output(len(session.token_ids))
        except HopLost:
            return hop.error is None  # else another one is next to be replaced
        return True

    async def _afresh(self, lost: HopLost) -> tuple[RouteHop, ...]:
        """A whole new route, after the sessions on all other hops were given back as well.

        What replaces the lost hop may lack just the stream that the next hop holds for us; and
        where a hop lied, the caches behind it hold what it said.
        """
        session = self._session
        count = len(session.route.hops)
        if count == 1 or session.failovers > self._settings.max_failovers:
            return ()
        session.route.close()
        return await self._replaced(0, {key_of(lost.hop.shard)}, count=count)

    async def _replaced(
        self, index: int, excluded: set[ShardKey], *, count: int = 1
    ) -> tuple[RouteHop, ...]:
        """Hops that now stand in the place of the one at `index`, or of all `count` that there are;
        empty when nobody is left. Who refuses joins the `excluded`."""
        route = self._session.route
        pipeline = route.pipeline
        model_id, weights, whole = (
            pipeline.model_id, pipeline.weights_sha256, LayerRange(0, pipeline.total_layers),
        )  # fmt: skip

        def pick(refused: Collection[ShardKey]) -> tuple[RouteHop, ...]:
            excluded.update(refused)
            if count == 1:
                return self._router.repick(pipeline, index, excluded)
            return self._router.cover(model_id, weights, whole, excluded)

        async def put(hops: tuple[RouteHop, ...]) -> tuple[RouteHop, ...]:
            await route.replace(index, hops, self._rows, count=count)
            return hops

        try:
            return await open_route(pick, put)
        except (*UNSERVED, BadSteering, ContextTooLong):
            return ()

    async def _home(self, lost: HopLost) -> PipelineAborted | None:
        """Go on with the whole model at home, and what to say of that; None when that cannot be."""
        session, route = self._session, self._session.route
        if self._local_model is None or not session.may_go_home:
            return None
        session.may_go_home = False
        try:
            hops = tuple(await self._local_model())
            await route.replace(0, hops, self._rows, count=len(route.hops))
        except (MeshError, HopLost):
            return None  # it does not fit here, or its process failed: others are asked after all
        session.fallback = True
        return PipelineAborted(f"{lost.error.message} The answer goes on from the local model.")

    def _movable(self) -> int | None:
        for index, hop in enumerate(self._session.route.hops):
            if hop.is_draining and key_of(hop.hop.shard) not in self._stays:
                return index
        return None

    def _notice(self, lost: RouteHop, hops: Sequence[RouteHop], status: str) -> ShardFailover:
        replacements = tuple(hop.shard.shard_id for hop in hops)
        position = len(self._session.token_ids)
        return ShardFailover(lost.shard.shard_id, replacements, position, status)


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
