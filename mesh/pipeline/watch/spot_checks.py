"""Spot checks: now and then a hop's work is done again on another host and compared.

A host that computes the last step of a session must have computed all before it, so one check
compares every row the hop has answered since the check before: a single one finds any earlier lie.
The answers it needs are the next hop's inputs, which are kept anyway; only the last hop's are kept
for this. Checks run beside the generation, at most one for each and few in all. Their host cannot
tell them from real work, so a check that takes the stream a generation needs is ended by the asker.
What nobody else holds is checked at home where it is small enough; else it stays unchecked, and is
counted as that.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from mesh.errors import BadFrame, MeshError, PipelineStalled
from mesh.pipeline.claims import Claims
from mesh.pipeline.history import rows_of
from mesh.pipeline.hop import GenerationHop, HopSession, Patience
from mesh.pipeline.links import HopLinks
from mesh.pipeline.terms import SessionTerms
from mesh.pipeline.watch.evidence import (
    Mismatch,
    Record,
    Tolerance,
    digest,
    disagreement,
    pieces,
    rows_said,
    tolerance,
)
from mesh.pipeline.watch.reputation import Reputations
from mesh.processes.tasks import end, spawn
from mesh.routing.cover import Candidate, key_of
from mesh.routing.router import ShardSource
from mesh.types import LayerRange, RouteHop, ShardDescriptor
from mesh.wire.messages import WireTensor

logger = logging.getLogger(__name__)

NEWCOMER_SESSIONS = 3
"""Sessions of a host unknown to this asker that get a check each, whatever is drawn."""

MAX_RUNNING = 2
_TIMEOUT_S = 30.0

YIELD_SECONDS = 5.0
"""For how long a host that was found full is spared checks."""

FIRST_REFUSAL_S, LONGEST_REFUSAL_S = 15.0, 1800.0
"""For how long layers that did not load at home are not asked for again: twice as long each time,
because some reasons pass, such as a process that starts again, and others do not."""


Judge = Callable[[LayerRange], Awaitable[RouteHop]]
"""Loads a span on this machine to check others by. Raises MeshError when that is not to be."""


@dataclass(frozen=True, slots=True)
class SpotCheckSettings:
    """`probability` that a step of a hop is checked; 0 switches all checks off.

    `own_host` is this machine, whose own shards need no check and whose word needs no vote.
    `routed`: the model sends rows to experts or keeps states, so that honest hosts may differ by
    much.
    """

    probability: float
    own_host: str
    routed: bool = False


@dataclass(frozen=True, slots=True)
class SpotFinding:
    """Two hosts gave different answers to the same inputs.

    `liar` is the one that was outvoted or contradicted by this machine; None when nobody could
    tell. `excess` is how many times the tolerance they are apart, at the rows from `position` on.
    """

    checked: ShardDescriptor
    reference: ShardDescriptor
    liar: ShardDescriptor | None
    position: int
    excess: float
    digests: tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Layers did not load at home: not asked for until then, after so many seconds of waiting."""

    until: float
    wait_s: float


class SpotChecks:
    """Draws steps to check and checks them. Owned by the asker, fed by `Oversight`."""

    def __init__(
        self,
        links: HopLinks,
        replicas: ShardSource,
        reputations: Reputations,
        on_finding: Callable[[SpotFinding], None],
        judge: Judge,
        settings: SpotCheckSettings,
        rng: random.Random,
    ) -> None:
        self._links = links
        self._replicas = replicas
        self._reputations = reputations
        self._on_finding = on_finding
        self._judge = judge
        self._refusals: dict[LayerRange, _Refusal] = {}
        self._settings = settings
        self.rng = rng
        self._records: dict[GenerationHop, Record] = {}
        self._met: Counter[str] = Counter()
        self._busy: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._full_until: dict[str, float] = {}

    def answered(self, hop: GenerationHop, position: int, tensor: WireTensor) -> None:
        """A hop's answer passed all other checks; perhaps it is checked against another host."""
        if self._settings.probability <= 0 or self._is_own(hop.hop.shard):
            return
        record = self._records.get(hop)
        if record is None:
            record = Record(hop.hop, hop.terms, hop.history, position)
            self._records[hop] = record
        if position > record.end:
            return  # the answer to a step of before a cut
        if position < record.end:
            record.cut(position)
        record.outputs.append(tensor)
        if self._is_due(record):
            self._start(record)

    def cut(self, hop: GenerationHop, position: int) -> None:
        """The session goes back to `position`. At 0 another text begins: a check of the one before
        is finished, as at the end of a session."""
        if position == 0:
            self.closed(hop)
        elif (record := self._records.get(hop)) is not None:
            record.cut(position)

    def closed(self, hop: GenerationHop) -> None:
        """The session's text ended, or it rests; a check under way is finished."""
        record = self._records.pop(hop, None)
        if record is not None:
            record.end_session()

    async def yield_to(self, host: str) -> bool:
        """A generation found `host` full: end every check. Whether one may have held its stream."""
        now = asyncio.get_running_loop().time()
        self._full_until = {h: until for h, until in self._full_until.items() if until > now}
        self._full_until[host] = now + YIELD_SECONDS
        had_any = bool(self._tasks)
        await end(self._tasks)
        return had_any

    @property
    def running(self) -> int:
        """How many checks are under way."""
        return len(self._tasks)

    async def settled(self) -> None:
        """Until no check is under way."""
        while self._tasks:
            await asyncio.gather(*self._tasks)
            await asyncio.sleep(0)  # those that have ended leave the set one step later

    async def close(self) -> None:
        """End every check and free what they hold."""
        await end(self._tasks)
        for hop in list(self._records):
            self.closed(hop)

    # Private

    def _is_due(self, record: Record) -> bool:
        drawn = self.rng.random() < self._settings.probability
        host = record.hop.shard.host
        if not drawn and (record.greeted or self._met[host] >= NEWCOMER_SESSIONS):
            return False
        return len(self._tasks) < MAX_RUNNING and id(record.terms) not in self._busy

    def _start(self, record: Record) -> None:
        generation = record.terms  # one object for all hops of a generation
        record.running = record.greeted = True
        record.rewound = False
        self._busy.add(id(generation))
        task = spawn(self._run(record), f"check {record.hop.shard.shard_id}")
        self._tasks.add(task)
        # Not at the end of the work: a task that is cancelled before its first step has none.
        task.add_done_callback(partial(self._ran, record, id(generation)))

    def _ran(self, record: Record, generation: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._busy.discard(generation)
        record.running = False
        if record.ended or record.rewound or task.cancelled():
            record.close()

    async def _run(self, record: Record) -> None:
        shard = record.hop.shard
        outcome = "unchecked"
        try:
            outcome = await self._check(record)
        except MeshError as error:
            # The other host is busy, slow or gone: that says nothing of the one to be checked.
            logger.info("shard=%s not checked: %s", shard.shard_id, error)
            record.close()
        self._reputations.checked(key_of(shard), outcome)
        self._met[shard.host] += outcome == "agreed"

    async def _check(self, record: Record) -> str:
        if record.shadow is not None:
            try:
                await record.shadow.resume()
            except MeshError:
                record.close()  # its host needed the room; it may still have some for a new one
        if record.shadow is None:
            record.shadow = await self._shadow(record, {record.hop.shard.host})
        if record.shadow is None or record.end <= max(record.start, record.shadow.length):
            return "unchecked"  # nobody to ask, or meanwhile the session went back behind it all
        mismatch = await self._compare(record, record.shadow)
        if mismatch is not None:
            return await self._accuse(record, record.shadow, mismatch)
        record.shadow.park()
        return "agreed"

    async def _compare(self, record: Record, shadow: HopSession) -> Mismatch | None:
        """Bring the shadow up to the hop's last answer; the first rows where it differs."""
        allowed = self._tolerance(record, record.hop.shard, shadow.hop.shard)
        # All before the first await: the generation goes on, and may even go back.
        start = max(shadow.length, record.start)
        said, inputs = record.rows(start, record.end), record.inputs.copy()
        for position, tensor in pieces(inputs, shadow.length, record.end):
            answer = rows_said(await self._asked(record.terms, shadow, position, tensor))
            first, last = max(position, start), position + rows_of(tensor)
            if first >= last:
                continue
            ours, other = said[first - start : last - start], answer[first - position :]
            excess = disagreement(ours, other, allowed)
            if excess > 1.0:
                return Mismatch(inputs, first, last, ours, other, excess)
        return None

    async def _accuse(self, record: Record, shadow: HopSession, found: Mismatch) -> str:
        """Find out who is wrong, and say so."""
        checked, reference = record.hop.shard, shadow.hop.shard
        liar: ShardDescriptor | None = None
        if self._is_own(reference):
            liar = checked
        else:
            liar = await self._vote(record, shadow, found)
        digests = (digest(found.said), digest(found.other))
        finding = SpotFinding(checked, reference, liar, found.start, found.excess, digests)
        record.close()
        self._on_finding(finding)
        if liar is None:
            return "doubtful"
        return "lied" if liar is checked else "agreed"

    async def _vote(
        self, record: Record, shadow: HopSession, found: Mismatch
    ) -> ShardDescriptor | None:
        """The host that a third one contradicts while it agrees with the other; None when unclear.

        Raises nothing: without a third word the question stays open.
        """
        checked, reference = record.hop.shard, shadow.hop.shard
        third: HopSession | None = None
        try:
            third = await self._shadow(record, {checked.host, reference.host})
            if third is None:
                return None
            answers = []
            for position, tensor in pieces(found.inputs, 0, found.stop):
                answers.append(rows_said(await self._asked(record.terms, third, position, tensor)))
            rows = np.concatenate(answers)[found.start : found.stop]
        except MeshError as error:
            logger.info("no third opinion on shard=%s: %s", checked.shard_id, error)
            return None
        finally:
            if third is not None:
                third.close()
        judge = third.hop.shard
        accused = disagreement(found.said, rows, self._tolerance(record, checked, judge)) > 1.0
        doubter = disagreement(found.other, rows, self._tolerance(record, reference, judge)) > 1.0
        if accused == doubter:
            return None
        return checked if accused else reference

    async def _shadow(self, record: Record, without: set[str]) -> HopSession | None:
        """A fresh session on the best other host; None when there is none to ask."""
        hop, terms = record.hop, record.terms
        usable = [
            candidate
            for candidate in self._replicas.candidates(terms.model_id)
            if self._may_judge(candidate, hop, terms, without)
        ]
        if usable:
            best = min(usable, key=lambda c: self._rank(c, hop.shard))
            chosen = RouteHop(best.descriptor, hop.layers)
        elif self._settings.own_host in without or (home := await self._home(hop)) is None:
            return None
        else:
            chosen = home
        link = await self._links.link(chosen.shard.host, chosen.shard.endpoint)
        claim = Claims().claim(
            key_of(chosen.shard)
        )  # it makes room for generations, not they for it
        patience = Patience(_TIMEOUT_S, _TIMEOUT_S)
        shadow = HopSession(chosen, link, claim, terms.for_checking(), patience)
        try:
            await shadow.open()
        except BaseException:
            shadow.close()
            raise
        return shadow

    async def _asked(
        self, terms: SessionTerms, shadow: HopSession, position: int, tensor: WireTensor
    ) -> WireTensor:
        """What another host answers to the hop's input. Raises what it answers, BadFrame."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await shadow.exchange(position, tensor)
        except TimeoutError:
            raise PipelineStalled("a spot check stalled.", fix="It is not used again.") from None
        layers, asked = shadow.hop.layers, terms.for_checking()
        if not asked.fits(layers, position, tensor.shape, answer):
            raise BadFrame("a spot check got no answer of its kind.", fix="It is not used again.")
        return asked.aligned(layers, tensor.shape[1], answer)

    async def _home(self, hop: RouteHop) -> RouteHop | None:
        """The same layers on this machine; None when they are not to be loaded here."""
        loop, refused = asyncio.get_running_loop(), self._refusals.get(hop.layers)
        if refused is not None and loop.time() < refused.until:
            return None
        try:
            home = await self._judge(hop.layers)
        except MeshError as error:
            wait_s = min(LONGEST_REFUSAL_S, 2 * refused.wait_s if refused else FIRST_REFUSAL_S)
            self._refusals[hop.layers] = _Refusal(loop.time() + wait_s, wait_s)
            logger.info("layers %s are not checked at home: %s", hop.layers, error)
            return None
        self._refusals.pop(hop.layers, None)
        same = (home.shard.weights_sha256, home.shard.dtype)
        return home if same == (hop.shard.weights_sha256, hop.shard.dtype) else None

    def _may_judge(
        self, candidate: Candidate, hop: RouteHop, terms: SessionTerms, without: set[str]
    ) -> bool:
        shard = candidate.descriptor
        return (
            shard.host not in without
            and self._full_until.get(shard.host, 0.0) <= asyncio.get_running_loop().time()
            and shard.weights_sha256 == hop.shard.weights_sha256
            and shard.dtype == hop.shard.dtype  # another format honestly differs by percents
            and shard.layers.covers(hop.layers)
            and terms.is_served_by(shard, hop.layers)
            and (candidate.penalty == 0 or candidate.is_self)
        )

    def _rank(
        self, candidate: Candidate, checked: ShardDescriptor
    ) -> tuple[bool, bool, int, float]:
        """This machine first: its word needs no vote. Then the same kernels, then the idle."""
        shard = candidate.descriptor
        other_class = shard.determinism_class != checked.determinism_class
        return (not candidate.is_self, other_class, candidate.queue_depth, self.rng.random())

    def _tolerance(self, record: Record, one: ShardDescriptor, other: ShardDescriptor) -> Tolerance:
        wire, routed = record.terms.wire_dtype, self._settings.routed
        return tolerance(wire, one, other, routed=routed)

    def _is_own(self, shard: ShardDescriptor) -> bool:
        return shard.host == self._settings.own_host
