"""Opens the hops of a generation, and keeps finished ones for the request that continues them.

A finished generation's caches stay on its hops, parked, with the tokens they stand for. A later
prompt of the same principal that begins with those tokens takes them over and prefills only what is
new: that is what makes the second turn of a chat quick. Nobody else is told of them, not even by
being quicker. Parked caches are bounded in number and age here, and may be dropped by the hops at
any time; then the prompt is prefilled afresh.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from mesh.clock import Clock
from mesh.errors import BadSteering, ContextTooLong, LinkLost, MeshError, NoRoute
from mesh.pipeline.chain import Chain, HopLost
from mesh.pipeline.lines import Lines
from mesh.pipeline.opening import Patience
from mesh.pipeline.overseer import Overseer
from mesh.pipeline.terms import SessionTerms
from mesh.routing.cover import ShardKey, key_of
from mesh.routing.router import UNSERVED, ShardRouter
from mesh.types import LayerRange, Pipeline, RouteHop

logger = logging.getLogger(__name__)

MAX_PARKED = 4
PARKED_SECONDS = 600.0
MAX_PARKED_BYTES = 512 << 20


@dataclass(slots=True)
class GenerationSession:
    """The hops of one generation and the tokens whose states they hold.

    `fallback`: all hops are at home because the mesh could not; `may_go_home`: that may still be.
    """

    chain: Chain
    pipeline: Pipeline
    request_id: str = ""
    failovers: int = 0
    fallback: bool = False
    may_go_home: bool = False
    token_ids: list[int] = field(default_factory=list)
    parked_at: float = 0.0

    @property
    def history_bytes(self) -> int:
        """What the asker keeps in order to replay a lost hop."""
        return sum(station.history.size_bytes for station in self.chain.stations)


class Sessions:
    """Every session of one model at this asker, live or parked."""

    def __init__(
        self,
        lines: Lines,
        router: ShardRouter,
        clock: Clock,
        patience: Patience,
        overseer: Overseer,
    ) -> None:
        self._lines = lines
        self._router = router
        self._clock = clock
        self._patience = patience
        self._overseer = overseer
        self._parked: list[GenerationSession] = []
        self.live: dict[str, GenerationSession] = {}

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
        at_home = at_home and not self._is_served(terms, total_layers)
        kept = self._take_parked(prompt, terms, at_home=at_home)
        if kept is not None:
            session, common = kept
            try:
                await session.chain.resume(terms.reserve, terms.limit)
                session.chain.require_trust()
            except (HopLost, LinkLost) as gone:
                logger.info("parked session not resumed: %s", gone)
                session.chain.close()
            except BaseException:
                session.chain.close()
                raise
            else:
                session.failovers = 0
                session.chain.cut(common)
                del session.token_ids[common:]
                return self._register(session)
        return await self.open_fresh(terms, total_layers)

    async def open_fresh(self, terms: SessionTerms, total_layers: int) -> GenerationSession:
        """A session with empty caches; raises as `acquire`."""
        return self._register(await self._open(terms, total_layers))

    async def open_at_home(
        self, hops: Sequence[RouteHop], terms: SessionTerms, total_layers: int
    ) -> GenerationSession:
        """A session with empty caches on hops of this machine alone. Raises HopLost."""
        chain = self._chain(terms)
        await chain.open(hops)
        pipeline = Pipeline(
            _new_id(), terms.model_id, terms.weights_sha256, total_layers, tuple(hops),
            self._clock.now(),
        )  # fmt: skip
        return self._register(GenerationSession(chain, pipeline, fallback=True))

    def release(self, session: GenerationSession, *, keep: bool) -> None:
        """Give a session back: parked for a follow-up when `keep`, else freed on every hop."""
        self.live.pop(session.pipeline.pipeline_id, None)
        if not keep or not session.token_ids:
            session.chain.close()
            return
        try:
            session.chain.park()
        except MeshError:
            session.chain.close()
            return
        session.parked_at = self._clock.monotonic()
        self._parked.append(session)
        self._trim()

    def known(self) -> list[GenerationSession]:
        """Live and parked sessions."""
        return [*self.live.values(), *self._parked]

    def expire(self) -> None:
        """Drop what was parked too long; called now and then."""
        self._trim()

    async def close(self) -> None:
        """Free everything."""
        for session in self.known():
            session.chain.close()
        self._parked.clear()
        self.live.clear()
        await self._lines.close()

    # Private

    def _register(self, session: GenerationSession) -> GenerationSession:
        self.live[session.pipeline.pipeline_id] = session
        return session

    async def _open(self, terms: SessionTerms, total_layers: int) -> GenerationSession:
        """On a route where every hop admits it: a hop at its limit makes the router pick again."""
        refused: dict[ShardKey, HopLost] = {}
        while True:
            try:
                pipeline = self._router.pick(
                    terms.model_id,
                    terms.weights_sha256,
                    total_layers,
                    pipeline_id=_new_id(),
                    now=self._clock.now(),
                    exclude=refused,
                )
            except NoRoute as nobody:
                raise _with_refusals(nobody, list(refused.values())) from None
            chain = self._chain(terms)
            try:
                await chain.open(pipeline.hops)
            except HopLost as lost:
                if isinstance(lost.error, BadSteering):
                    raise lost.error from None
                # Each round excludes one shard more, so this ends.
                refused[key_of(lost.hop.shard)] = lost
                logger.info("shard=%s refused: %s", lost.hop.shard.shard_id, lost.error)
                continue
            return GenerationSession(chain, pipeline)

    def _chain(self, terms: SessionTerms) -> Chain:
        return Chain(self._lines, terms, self._overseer, self._patience)

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
            kept = session.chain.terms
            if kept.principal != terms.principal:
                continue
            if kept.wire_dtype is not terms.wire_dtype or kept.edits != terms.edits:
                continue
            if session.fallback and not at_home:
                continue
            # One token at least must be fed again: its row is what the next token comes from.
            common = min(_common_prefix(session.token_ids, prompt), len(prompt) - 1)
            # A cache that shares only its beginning (a system prompt, say) belongs to another
            # conversation, which would lose it.
            if 2 * common >= len(session.token_ids) and (best is None or common > best[0]):
                best = (common, session)
        if best is None or best[0] == 0:
            return None
        self._parked.remove(best[1])
        return best[1], best[0]

    def _trim(self) -> None:
        oldest = self._clock.monotonic() - PARKED_SECONDS
        while self._parked and (
            len(self._parked) > MAX_PARKED
            or self._parked[0].parked_at < oldest
            or sum(session.history_bytes for session in self._parked) > MAX_PARKED_BYTES
        ):
            self._parked.pop(self._next_to_go(oldest)).chain.close()

    def _next_to_go(self, oldest: float) -> int:
        """What is too old; else the oldest of whoever has most, so that nobody displaces others."""
        if self._parked[0].parked_at < oldest:
            return 0
        accounts = [session.chain.terms.principal.account for session in self._parked]
        return accounts.index(max(accounts, key=accounts.count))


def replaced(
    pipeline: Pipeline, index: int, hops: Sequence[RouteHop], *, count: int = 1
) -> Pipeline:
    """The same pipeline with `count` hops from `index` on exchanged for `hops`."""
    return Pipeline(
        pipeline.pipeline_id,
        pipeline.model_id,
        pipeline.weights_sha256,
        pipeline.total_layers,
        (*pipeline.hops[:index], *hops, *pipeline.hops[index + count :]),
        pipeline.established_at,
    )


def _new_id() -> str:
    return uuid.uuid4().hex[:12]


def _with_refusals(nobody: NoRoute, refused: Sequence[HopLost]) -> MeshError:
    """The router's error with what each shard that was asked said; or what they all said."""
    if refused and all(isinstance(lost.error, ContextTooLong) for lost in refused):
        return refused[-1].error
    said = "".join(f" {lost.hop.shard.node_name}: {lost.error.message}" for lost in refused)
    return NoRoute(nobody.message + said, fix=nobody.fix) if said else nobody


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


async def expire_regularly(sessions: Sessions, every_s: float) -> None:
    """Run `Sessions.expire` for ever; the engine owns the task."""
    while True:
        await asyncio.sleep(every_s)
        sessions.expire()
