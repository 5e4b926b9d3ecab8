"""Opens the hops of a generation, and keeps finished ones for the request that continues them.

A finished generation's caches stay on its hops, parked, with the tokens they stand for. A later
prompt of the same principal that begins with those tokens takes them over and prefills only what is
new: that is what makes the second turn of a chat quick. One that only begins as another text of the
same principal does, with the same system prompt perhaps, gets copies of what the hops hold of that.
Nobody else is told of them, not even by being quicker. Parked caches are bounded in number and age
here, and may be dropped by the hops at any time; then the prompt is prefilled afresh.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from mesh.clock import Clock
from mesh.errors import LinkLost, MeshError
from mesh.pipeline.hop import Patience
from mesh.pipeline.links import HopLinks
from mesh.pipeline.room_line import RoomLine
from mesh.pipeline.route import HopLost, Route, open_route
from mesh.pipeline.terms import SessionTerms
from mesh.pipeline.watch.oversight import Oversight
from mesh.routing.cover import ShardKey
from mesh.routing.router import UNSERVED, ShardRouter
from mesh.types import LayerRange, Pipeline, RouteHop

logger = logging.getLogger(__name__)

MAX_PARKED = 4
PARKED_SECONDS = 600.0
MAX_PARKED_BYTES = 512 << 20
MIN_COPIED = 64
"""Tokens in common that are worth another round trip before the first step."""


@dataclass(slots=True, eq=False)
class GenerationSession:
    """The hops of one generation and the tokens whose states they hold.

    `fallback`: all hops are at home because the mesh could not; `may_go_home`: that may still be.
    `steady`: so many of its tokens stay as they are while it is live. `lent`: how many others are
    just copying from it, until when nobody goes on with it.
    """

    route: Route
    request_id: str = ""
    failovers: int = 0
    fallback: bool = False
    may_go_home: bool = False
    token_ids: list[int] = field(default_factory=list)
    parked_at: float = 0.0
    steady: int = 0
    lent: int = 0

    def cut(self, position: int) -> None:
        """Forget every token from `position` on, in every hop."""
        self.route.cut(position)
        del self.token_ids[position:]


class Sessions:
    """Every session of one model at this asker, live or parked."""

    def __init__(
        self,
        links: HopLinks,
        router: ShardRouter,
        clock: Clock,
        patience: Patience,
        observer: Oversight,
        *,
        line: RoomLine | None = None,
        keeps_states: bool = False,
    ) -> None:
        """`keeps_states`: hops have running states, which cannot be cut anywhere. What they still
        have of a session that begins as a prompt does is copied then, as far as they say."""
        self.max_parked_bytes = MAX_PARKED_BYTES
        self.line = line or RoomLine()
        self._links = links
        self._router = router
        self._clock = clock
        self._patience = patience
        self._observer = observer
        self._keeps_states = keeps_states
        self._parked: list[GenerationSession] = []
        self.live: dict[int, GenerationSession] = {}
        self.busy = asyncio.Event()
        """Set while any is live."""

    async def acquire(
        self, prompt: Sequence[int], terms: SessionTerms, total_layers: int, *, at_home: bool
    ) -> GenerationSession:
        """A session whose `token_ids` are a proper prefix of `prompt`, empty when nothing is kept.

        One that was kept at home is used `at_home` only, and while nobody else serves the model.

        Raises:
            NoRoute, WeightsMismatch: as `ShardRouter.pick`.
            BadRequest, ContextTooLong: a hop cannot serve such a request at all.
            BadSteering: a hop cannot apply one of the edits.
        """
        unserved = at_home and not self._is_served(terms, total_layers)
        kept = self._take_parked(prompt, terms, at_home=unserved)
        if kept is not None and self._keeps_states and kept[1] < len(kept[0].token_ids):
            return await self._begun_as_parked(kept[0], terms, total_layers, prompt)
        if kept is not None:
            session, common = kept
            try:
                await session.route.resume(terms.reserve, terms.limit)
                session.route.require_trust()
            except (HopLost, LinkLost) as gone:
                logger.info("parked session not resumed: %s", gone)
                session.route.close()
            except BaseException:
                session.route.close()
                raise
            else:
                session.failovers = 0
                session.cut(common)
                session.steady = len(prompt)
                return self._register(session)
        return await self.open_fresh(terms, total_layers, prompt=prompt)

    async def _begun_as_parked(
        self,
        parked: GenerationSession,
        terms: SessionTerms,
        total_layers: int,
        prompt: Sequence[int],
    ) -> GenerationSession:
        """A session in the place of one that goes on otherwise than it did. Raises as `acquire`."""
        self._parked.append(parked)
        try:
            return await self.open_fresh(terms, total_layers, prompt=prompt, instead=parked)
        finally:
            if parked in self._parked:
                self._parked.remove(parked)
                parked.route.close()

    async def open_fresh(
        self,
        terms: SessionTerms,
        total_layers: int,
        delays_s: Sequence[float] = (),
        *,
        prompt: Sequence[int] = (),
        instead: GenerationSession | None = None,
    ) -> GenerationSession:
        """A session with empty caches, or with copies of what another one holds of `prompt`: on the
        same hops where those are as free as others, or where it is `instead` of that one.

        Raises as `acquire`. `delays_s` as in `open_route`.
        """

        source, _ = self._most_alike(prompt, terms)

        def pick(refused: Collection[ShardKey]) -> Pipeline:
            there = None if source is None or refused else source.route.pipeline
            if there is not None and source is instead:
                return there
            free = self._router.pick(
                terms.model_id, terms.weights_sha256, total_layers, exclude=refused
            )
            if there is not None and self._router.are_as_free(there.hops, free.hops):
                return replace(free, hops=there.hops)
            return free

        async def opened(pipeline: Pipeline) -> GenerationSession:
            route = await self._opened(pipeline, terms)
            try:
                held = await self._begin_as(route, source, prompt)
            except BaseException:
                route.close()
                raise
            return GenerationSession(route, token_ids=list(prompt[:held]), steady=len(prompt))

        return self._register(await open_route(pick, opened, delays_s))

    async def open_at_home(
        self, hops: Sequence[RouteHop], terms: SessionTerms, total_layers: int
    ) -> GenerationSession:
        """A session with empty caches on hops of this machine alone. Raises HopLost."""
        pipeline = Pipeline(terms.model_id, terms.weights_sha256, total_layers, tuple(hops))
        route = await self._opened(pipeline, terms)
        return self._register(GenerationSession(route, fallback=True))

    def release(self, session: GenerationSession, *, keep: bool) -> None:
        """Give a session back: parked for a follow-up when `keep`, else freed on every hop. A
        second time changes nothing."""
        if self.live.pop(id(session), None) is None:
            return
        if not self.live:
            self.busy.clear()
        if not (keep and session.token_ids and self._park(session)):
            session.route.close()
        self.line.freed()

    def known(self) -> list[GenerationSession]:
        """Live and parked sessions."""
        return [*self.live.values(), *self._parked]

    async def close(self) -> None:
        """Free everything."""
        for session in self.known():
            session.route.close()
        self._parked.clear()
        self.live.clear()
        self.busy.clear()
        await self._links.close()

    # Private

    def _register(self, session: GenerationSession) -> GenerationSession:
        self.live[id(session)] = session
        self.busy.set()
        return session

    async def _opened(self, pipeline: Pipeline, terms: SessionTerms) -> Route:
        route = Route(self._links, terms, self._observer, self._patience)
        await route.open(pipeline)
        return route

    async def _begin_as(
        self, route: Route, source: GenerationSession | None, prompt: Sequence[int]
    ) -> int:
        """How many tokens of `prompt` the hops of a fresh route hold, copied from `source`.

        Raises HopLost.
        """
        # It may be another's by now, or gone, since the route was picked.
        if source is None or all(source is not each for each in self.known()):
            return 0
        try:
            source.route.require_trust()
        except HopLost:  # by whom it went through once: it would be refused on every route
            return 0
        source.lent += 1
        try:
            return await route.begin_as(source.route, self._in_common(source, prompt))
        finally:
            source.lent -= 1

    def _in_common(self, session: GenerationSession, prompt: Sequence[int]) -> int:
        """With how many of its tokens `prompt` begins, of those that it does not take back. One of
        the prompt at least must be fed: its row is what the next token comes from."""
        common = min(common_prefix(session.token_ids, prompt), len(prompt) - 1)
        return min(common, session.steady) if id(session) in self.live else common

    def _most_alike(
        self, prompt: Sequence[int], terms: SessionTerms
    ) -> tuple[GenerationSession | None, int]:
        """The session that has most in common with `prompt`, if that is worth it; how much."""
        source, common = None, MIN_COPIED - 1
        for session in self.known():
            shared = self._in_common(session, prompt)
            if shared > common and _are_alike(session.route.terms, terms):
                source, common = session, shared
        return source, common

    def _park(self, session: GenerationSession) -> bool:
        try:
            session.route.park()
        except MeshError:
            return False
        session.parked_at = self._clock.monotonic()
        self._parked.append(session)
        self.expire()
        return True

    def _is_served(self, terms: SessionTerms, total_layers: int) -> bool:
        whole = LayerRange(0, total_layers)
        try:
            self._router.cover(terms.model_id, terms.weights_sha256, whole)
        except UNSERVED:
            return False
        return True

    def _take_parked(
        self, prompt: Sequence[int], terms: SessionTerms, *, at_home: bool
    ) -> tuple[GenerationSession, int] | None:
        best: tuple[int, GenerationSession] | None = None
        for session in self._parked:
            if session.lent or not _are_alike(session.route.terms, terms):
                continue
            if session.fallback and not at_home:
                continue
            # One token at least must be fed again: its row is what the next token comes from.
            common = min(common_prefix(session.token_ids, prompt), len(prompt) - 1)
            # A cache that shares only its beginning (a system prompt, say) belongs to another
            # conversation, which would lose it.
            if 2 * common >= len(session.token_ids) and (best is None or common > best[0]):
                best = (common, session)
        # What another has more in common is copied instead; then each conversation keeps its own.
        if (
            best is None
            or best[0] == 0
            or best[0] + MIN_COPIED <= self._most_alike(prompt, terms)[1]
        ):
            return None
        self._parked.remove(best[1])
        return best[1], best[0]

    def expire(self) -> None:
        """Drop what was parked too long, or is too much; called now and then."""
        oldest = self._clock.monotonic() - PARKED_SECONDS
        while self._parked and (
            len(self._parked) > MAX_PARKED
            or self._parked[0].parked_at < oldest
            or sum(session.route.history_bytes for session in self._parked) > self.max_parked_bytes
        ):
            self._parked.pop(self._next_to_go(oldest)).route.close()

    def _next_to_go(self, oldest: float) -> int:
        """What is too old; else the oldest of whoever has most, so that nobody displaces others."""
        if self._parked[0].parked_at < oldest:
            return 0
        accounts = [session.route.terms.principal.account for session in self._parked]
        return accounts.index(max(accounts, key=accounts.count))


def _are_alike(one: SessionTerms, other: SessionTerms) -> bool:
    """Whether what was computed on these terms would be the same on the other, for the same
    caller."""
    if one.principal != other.principal or one.is_long is not other.is_long:
        return False
    return one.wire_dtype is other.wire_dtype and one.edits == other.edits


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """With how many of the same tokens both begin."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


async def expire_regularly(sessions: Sessions, every_s: float) -> None:
    """Run `Sessions.expire` for ever; the engine owns the task."""
    while True:
        await asyncio.sleep(every_s)
        sessions.expire()
