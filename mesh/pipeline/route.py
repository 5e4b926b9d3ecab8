"""A route: who serves a request, a session on each of its hops, the activations on their way.

`open_route` picks, opens all hops at once, leaves out who refuses, and tries again; chat, harvest,
probes and jobs open their routes with it. In a `Route` an answer of one hop goes straight to the
next, in the link's own callback and in its wire form: no task wakes up in between, nothing is
converted. Only what leaves the last hop wakes the generation loop. Chunks of a prefill follow each
other through the hops by themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from mesh.errors import AddressLost, BadSteering, MeshError, NoRoute, PipelineStalled
from mesh.pipeline.claims import Claim
from mesh.pipeline.history import rows_of, slice_rows
from mesh.pipeline.hop import GenerationHop, HopSession, Patience
from mesh.pipeline.links import HopLink, HopLinks
from mesh.pipeline.refusal import RouteRefused, edits_refused, why_nobody
from mesh.pipeline.terms import SessionTerms
from mesh.pipeline.watch.oversight import Oversight
from mesh.routing.cover import ShardKey, key_of
from mesh.types import Pipeline, RouteHop
from mesh.wire.messages import WireTensor

logger = logging.getLogger(__name__)

FULL_DELAYS_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Waited one after the other, 1.55 s in all, by a harvest or a lens while every shard says that it
is full: what was closed elsewhere may not have reached it yet. Generations wait in line, see
`mesh.pipeline.room_line`."""

READABLE = 4
"""Tensors that left the last hop and can be read: more are never on their way unread, but those of
a prompt, of which the last row counts."""

T = TypeVar("T")
Picked = TypeVar("Picked")
Session = TypeVar("Session", bound=HopSession)


class HopLost(Exception):
    """`hop` failed, or refuses; the route's hop number `index` waits for a replacement."""

    def __init__(self, index: int, hop: RouteHop, error: MeshError) -> None:
        super().__init__(str(error))
        self.index = index
        self.hop = hop
        self.error = error


async def open_route(
    pick: Callable[[Collection[ShardKey]], Picked],
    open_hops: Callable[[Picked], Awaitable[T]],
    delays_s: Sequence[float] = (),
) -> T:
    """What `open_hops` makes of the first route on which every hop gives a session.

    `pick` gets the shards to leave out and raises NoRoute when nobody else is left; `open_hops`
    raises HopLost. Who has moved by then, or whom we have moved from, is asked again. While all
    that were asked are full, everything is tried again after each of `delays_s`.

    Raises:
        RouteRefused, and what else `pick` raises.
        ContextTooLong: no shard holds that many positions.
        DiskFull: no shard has disk for a harvest; names a node.
        BadSteering: a hop cannot apply one of the edits, and a second one says so, or is not there.
    """
    refused: dict[ShardKey, HopLost] = {}
    moved: set[ShardKey] = set()
    delays = iter(delays_s)
    while True:
        try:
            picked = pick(refused)
        except NoRoute as nobody:
            if not refused:
                raise
            error = why_nobody(nobody, list(refused.values()))
            is_full = isinstance(error, RouteRefused) and error.all_full
            delay = next(delays, None) if is_full else None
            if delay is None:
                raise error from None
            await asyncio.sleep(delay)
            refused.clear()
            continue
        try:
            return await open_hops(picked)
        except HopLost as lost:
            if isinstance(lost.error, BadSteering) and edits_refused(refused.values()):
                raise lost.error from None
            key = key_of(lost.hop.shard)
            if isinstance(lost.error, AddressLost) and key not in moved:
                moved.add(key)
            else:  # each such round excludes one shard more, so this ends
                refused[key] = lost
            logger.info("shard=%s refused: %s", lost.hop.shard.shard_id, lost.error)


async def open_sessions(
    hops: Sequence[RouteHop],
    links: HopLinks,
    claim: Callable[[RouteHop], Claim],
    session_on: Callable[[RouteHop, HopLink, Claim], Session],
) -> list[Session]:
    """A session on every hop, asked for at once, all or none. Raises HopLost."""
    # Before anything is awaited: whoever picks a route meanwhile has to know of these.
    claims = [claim(hop) for hop in hops]
    sessions: list[Session] = []

    async def open_one(hop: RouteHop, claimed: Claim) -> Session:
        link = await links.link(hop.shard.host, hop.shard.endpoint)
        session = session_on(hop, link, claimed)
        sessions.append(session)
        await session.open()
        return session

    try:
        return await _at_once(list(map(open_one, hops, claims)), hops)
    except BaseException:
        for session in sessions:
            session.close()
        for claimed in claims:
            claimed.release()
        raise


async def _at_once(calls: Sequence[Coroutine[Any, Any, T]], hops: Sequence[RouteHop]) -> list[T]:
    """What the hops' calls give, in order. Raises HopLost for one that fails, of several at a time
    the first in order, after the others were ended."""
    tasks = [
        asyncio.create_task(call, name=f"hop {hop.shard.shard_id}")
        for call, hop in zip(calls, hops, strict=True)
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for index, (hop, result) in enumerate(zip(hops, results, strict=True)):
        if isinstance(result, MeshError):
            raise HopLost(index, hop, result)
    failed = [each for each in results if isinstance(each, BaseException)]
    if failed:  # those that were ended for another's sake say nothing of why
        raise next((e for e in failed if not isinstance(e, asyncio.CancelledError)), failed[0])
    return [each for each in results if not isinstance(each, BaseException)]


class Route:
    """The hops of one generation: hidden states go in at the front, the last row comes out.

    `widened` counts tensors that overflowed the wire dtype and travelled wider.
    """

    def __init__(
        self, links: HopLinks, terms: SessionTerms, observer: Oversight, patience: Patience
    ) -> None:
        self.terms = terms
        self.widened = 0
        self.hops: list[GenerationHop] = []
        self._links = links
        self._observer = observer
        self._patience = patience
        self._picked: Pipeline | None = None
        self._left: deque[tuple[int, WireTensor]] = deque(maxlen=READABLE)
        self._waiter: asyncio.Future[None] | None = None
        self._target = 0
        self._served: dict[ShardKey, RouteHop] = {}
        self._liars: dict[ShardKey, MeshError] = {}

    async def open(self, pipeline: Pipeline) -> None:
        """Open a session on every hop at once. Raises HopLost for one that refuses."""
        self._picked = pipeline
        self.hops = await self._opened(pipeline.hops)
        self._note_served(pipeline.hops)

    async def begin_as(self, other: Route, positions: int) -> int:
        """Right after `open`: have every hop begin with what it holds of the first `positions` of
        `other`; how many all hold. None where the routes differ. Raises HopLost."""
        pairs = list(zip(self.hops, other.hops, strict=False))
        if len(self.hops) != len(other.hops) or not all(a.can_begin_as(b) for a, b in pairs):
            return 0
        held = min(await self._each([mine.begin_as(theirs, positions) for mine, theirs in pairs]))
        for mine, theirs in pairs:
            mine.has_begun_as(theirs, held)
        self._note_served(list(other._served.values()))
        self.require_trust()
        return held

    @property
    def pipeline(self) -> Pipeline:
        """What was picked, with the hops as they are now."""
        assert self._picked is not None  # noqa: S101 - asked for behind `open` only
        return replace(self._picked, hops=tuple(hop.hop for hop in self.hops))

    @property
    def history_bytes(self) -> int:
        """What is kept here in order to replay a lost hop."""
        return sum(hop.history.size_bytes for hop in self.hops)

    # Data

    def feed(self, tensor: WireTensor) -> None:
        """The next rows (1, rows, hidden) for the first hop."""
        self._count_widened(tensor)
        self.hops[0].accept(tensor)

    async def output(self, position: int) -> None:
        """Wait until every row before `position` has left the last hop.

        Raises:
            HopLost: a hop failed before that. Replace it and wait again.
        """
        while self.hops[-1].delivered < position:
            self._raise_lost()
            self._target = position
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def rows(self, start: int, stop: int) -> WireTensor:
        """Rows [start, stop) of what left the last hop lately, fed in one tensor. Also where a hop
        was replaced they came in one: a replay joins what was fed and divides none of it."""
        for first, tensor in reversed(self._left):
            if first <= start and stop <= first + rows_of(tensor):
                return slice_rows(tensor, start - first, stop - first)
        raise PipelineStalled(f"Rows {start} to {stop} are not here.", fix="Report this as a bug.")

    async def row(self, position: int, vocab: int) -> WireTensor:
        """All logits, fp32 (1, 1, vocab), of a row of the latest tensor, where the last hop gives
        candidates. Raises HopLost."""
        hop = self.hops[-1]
        try:
            return await hop.row(position, vocab)
        except MeshError as error:
            hop.fail(error)
            # Whoever replaces it can give the row once its own answer to it is here.
            hop.delivered = min(hop.delivered, position)
            raise HopLost(len(self.hops) - 1, hop.hop, error) from error

    def cut(self, position: int) -> None:
        """Forget everything from `position` on, in every hop."""
        for hop in self.hops:
            hop.cut(position)

    # Life

    async def replace(
        self, index: int, hops: Sequence[RouteHop], max_rows: int, *, count: int = 1
    ) -> None:
        """Put `hops` in the place of `count` from `index` on and replay their inputs.

        The others keep their caches. Raises HopLost when a replacement refuses or dies while it is
        opened; the old hops then stay in place, so that this can be tried again.
        """
        self.terms = self.terms.with_room(self.hops[0].history.length)
        try:
            fresh = await self._opened(hops)
        except HopLost as lost:
            raise HopLost(index, lost.hop, lost.error) from lost
        old = self.hops[index : index + count]
        for hop in old:
            hop.close()
        if count == len(self.hops):
            self._served.clear()  # every cache is rebuilt from the asker's own inputs
        self.hops[index : index + count] = fresh
        self._note_served(hops)
        # The first takes the inputs; only the last knows what the next hop has already seen. What
        # lies between is rebuilt from what the first returns.
        fresh[0].history = old[0].history
        fresh[-1].delivered = old[-1].delivered
        # Where longer steps have other bits, a near tie behind them would fall otherwise.
        short = filter(None, (hop.hop.shard.short_rows for hop in fresh))
        fresh[0].replay(max_rows, joined=min(short, default=None))

    def park(self) -> None:
        """Keep the caches, give the streams back. Raises LinkLost."""
        for hop in self.hops:
            hop.park()

    async def resume(self, reserve: int, limit: int) -> None:
        """Take the streams again, with room as in `SessionTerms`. Raises HopLost for a hop that has
        none or forgot."""
        # Also for whoever replaces a hop.
        self.terms = replace(self.terms, reserve=reserve, limit=limit)
        await self._each([hop.resume_with(self.terms) for hop in self.hops])

    async def seal(self, timeout_s: float) -> list[dict[str, Any]]:
        """End the harvest on every hop; each file with its node. Raises HopLost."""
        sealed = await self._each([hop.seal(timeout_s) for hop in self.hops])
        return [
            {**file, "node": hop.hop.shard.host, "node_name": hop.hop.shard.node_name}
            for hop, files in zip(self.hops, sealed, strict=True)
            for file in files
        ]

    def close(self) -> None:
        """Free every hop's session."""
        for hop in self.hops:
            hop.close()

    # Honesty

    @property
    def is_misled(self) -> bool:
        """Whether a hop's cache was computed from what a liar before it said."""
        return self._misled_by() is not None

    def distrust(self, liar: ShardKey, error: MeshError) -> None:
        """A shard lied: use none of its answers any more, nor what was computed from them."""
        if liar not in self._served:
            return
        self._liars[liar] = error
        for hop in self.hops:
            if key_of(hop.hop.shard) == liar:
                hop.fail(error)
        self._wake()

    def require_trust(self) -> None:
        """Raise HopLost when a liar had a part in what the caches hold."""
        self._refuse_liars(list(self._served.values()))

    # Private

    async def _opened(self, hops: Sequence[RouteHop]) -> list[GenerationHop]:
        try:
            opened = await open_sessions(hops, self._links, self._observer.claim, self._hop)
        except HopLost as lost:
            self._observer.failed(lost.hop, lost.error)
            raise
        try:
            self._refuse_liars(hops)
        except HopLost:
            for hop in opened:
                hop.close()
            raise
        return opened

    def _hop(self, hop: RouteHop, link: HopLink, claim: Claim) -> GenerationHop:
        session = GenerationHop(hop, link, claim, self.terms, self._patience, self._observer)
        session.on_output, session.on_lost = self._output, self._wake
        return session

    async def _each(self, calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        try:
            return await _at_once(calls, [hop.hop for hop in self.hops])
        except HopLost as lost:
            self._observer.failed(lost.hop, lost.error)
            raise

    def _output(self, hop: GenerationHop, tensor: WireTensor) -> None:
        self._count_widened(tensor)
        index = self.hops.index(hop)
        if index + 1 < len(self.hops):
            self.hops[index + 1].accept(tensor)
            return
        self._left.append((hop.delivered - rows_of(tensor), tensor))
        if self._waiter is not None and hop.delivered >= self._target:
            self._wake()

    def _count_widened(self, tensor: WireTensor) -> None:
        if tensor.dtype not in (self.terms.wire_dtype, "int8"):  # token rows are never too wide
            self.widened += 1

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _refuse_liars(self, hops: Sequence[RouteHop]) -> None:
        for index, hop in enumerate(hops):
            lie = self._observer.lie_of(hop)
            if lie is not None:
                raise HopLost(index, hop, lie)

    def _note_served(self, hops: Sequence[RouteHop]) -> None:
        for hop in hops:
            known = self._served.get(key_of(hop.shard))
            if known is None or hop.layers.stop < known.layers.stop:
                self._served[key_of(hop.shard)] = hop

    def _misled_by(self) -> RouteHop | None:
        # Behind the last hop there is no cache, only tokens that were said already.
        end = self.hops[-1].hop.layers.stop
        lies = (self._served[key] for key in self._liars if key in self._served)
        return next((hop for hop in lies if hop.layers.stop < end), None)

    def _raise_lost(self) -> None:
        liar = self._misled_by() if self._liars else None
        if liar is not None:
            raise HopLost(0, liar, self._liars[key_of(liar.shard)])
        for index, hop in enumerate(self.hops):
            if hop.error is not None:
                raise HopLost(index, hop.hop, hop.error)
