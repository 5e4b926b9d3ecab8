"""The signed log of one node: appends, takes in what peers send, and tells what it now says.

Two kinds of records: decisions about members, a graph (`mesh.events.docket`), and facts, a chain
per author (`mesh.events.chains`). One task does all the writing, one transaction at a time, this
node's own first; memory changes only when the disk has. Knows nothing of links or of what
decisions mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from mesh.accounts.ledger import ResourceLedger
from mesh.clock import Clock
from mesh.errors import Busy, EventLogError, LogFull, MeshError
from mesh.events import apply as applying
from mesh.events import opening, snapshot
from mesh.events.authoring import Author, LogSettings, Say
from mesh.events.chains import Chains
from mesh.events.decision import SignedDecision
from mesh.events.docket import Docket, Signed
from mesh.events.intake import Deliberated, Intake, IntakeOutcome, Received, Report
from mesh.events.messages import Pull
from mesh.events.recalling import PeersCopy
from mesh.events.rules import Membership, Rules, Verify
from mesh.events.state import State
from mesh.events.store import (
    MAX_PAGE_BYTES,
    MAX_PAGE_EVENTS,
    PROOF_OVERHEAD_BYTES,
    RECORD_OVERHEAD_BYTES,
    Store,
    WriteBatch,
)
from mesh.events.sync import LogReplica
from mesh.events.types import Event, Order, Payload, Sign
from mesh.types import NodeId

logger = logging.getLogger(__name__)

_MAX_JOBS = 256
_EVENTS_PER_JOB = 64
_OWN_FIRST, _PEERS_NEXT, _LAST = range(3)
_CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class LogChange:
    """What one transaction brought, in the order it was taken in, and the state."""

    events: tuple[Event, ...]
    decisions: tuple[SignedDecision, ...]
    state: State


@dataclass(order=True, slots=True)
class _Job:
    priority: int
    number: int
    run: Callable[[], Awaitable[Any]] = field(compare=False)
    done: asyncio.Future[Any] = field(compare=False)


class EventLog:
    """Use `open`, then `close`. `chains`, `docket` and `replica` are for reading only.

    `on_change` and `on_report` are called in the event loop and must not block.
    """

    def __init__(
        self, settings: LogSettings, store: Store, intake: Intake, rules: Rules, sign: Sign
    ) -> None:
        self.chains: Chains = intake.chains
        self.docket: Docket = intake.docket
        self.replica = LogReplica(intake.chains, intake.docket)
        self.on_change: list[Callable[[LogChange], None]] = []
        self._store = store
        self._intake = intake
        self._rules = rules
        self._author = Author(settings, intake, sign)
        self._jobs: asyncio.PriorityQueue[_Job] = asyncio.PriorityQueue(_MAX_JOBS + 1)
        self._numbers = 0
        self._closing = False
        self._snapshot_every = settings.snapshot_every
        self._since_snapshot = 0
        self._is_full = False
        self._writer = asyncio.create_task(self._work(), name="event log writer")

    @classmethod
    async def open(
        cls,
        settings: LogSettings,
        *,
        rules: Rules,
        verify: Verify,
        sign: Sign,
        clock: Clock,
        on_report: Callable[[Report], None],
        accounts: ResourceLedger | None = None,
    ) -> Self:
        """Open the file, repairing it if needed (which is reported), and start the writer.

        What peers send and sign is counted on `accounts`, by default on the log's own. Raises
        SchemaTooNew, LogCorrupt, LogFull, and BadValue for another hearth's file.
        """
        store, contents, mended = await Store.open(settings.path, settings.hearth_id, rules)
        membership = contents.docket.membership
        chains = Chains(settings.hearth_id, membership, verify, clock, accounts)
        chains.restore(contents.chains, contents.state)
        intake = Intake(contents.docket, chains, clock, on_report)
        intake.orphans = contents.orphans
        log = cls(settings, store, intake, rules, sign)
        log._author.head, log._author.restarts = contents.own_head, contents.restart
        log._since_snapshot = contents.events - contents.snapshot_events
        await log._refold()
        if mended is not None:
            on_report(
                Report(
                    "log_repaired", None,
                    f"The event log was damaged: {mended.events + mended.orphans} events are whole,"
                    f" {mended.unreadable} places could not be read.",
                    f"What is missing comes from peers. The damaged file is {mended.kept_at}.",
                )
            )  # fmt: skip
        return log

    @property
    def state(self) -> State:
        """What the log says now."""
        return self.chains.state

    def muted(self, peer: NodeId) -> bool:
        """Whether a peer sent so many bad events that it is not listened to for a while."""
        return self._intake.mutes(peer)

    def blame(self, peer: NodeId) -> None:
        """Count something unreadable that a peer sent like a bad event."""
        self._intake.blame(peer)

    async def append(self, event_type: str, payload: Payload) -> Event:
        """Sign one event as this node's next; when this returns, it is on the disk and applied.

        Where this node's chain was lost, forked or is full, it begins again with what is still
        news. Raises LogRefused, LogFull, LogCorrupt, BadEvent, and Busy when too much waits to be
        written.
        """
        done: Event = await self._enqueue(_OWN_FIRST, partial(self._append, event_type, payload))
        return done

    async def decide(
        self,
        decision_type: str,
        say: Say,
        *,
        after_everything: bool = False,
        wall_ms: int | None = None,
    ) -> SignedDecision:
        """Sign a decision; when this returns, it is on the disk and in force as far as it goes.

        It comes after what this node acknowledges, or after everything there is, and is dated by
        this node's clock unless told otherwise. Raises as `append` does.
        """
        sign = partial(
            self._author.decide, decision_type, say, after_everything=after_everything,
            wall_ms=wall_ms,
        )  # fmt: skip
        done: SignedDecision = await self._enqueue(_OWN_FIRST, partial(self._decide, sign))
        return done

    async def ingest(self, received: Received, source: NodeId) -> IntakeOutcome:
        """Take in what a peer sent; what is valid is on the disk when this returns.

        Raises LogFull, LogCorrupt, Busy. A muted peer's events are not even decoded.
        """
        outcome = IntakeOutcome()
        for start in range(0, max(1, len(received.events)), _EVENTS_PER_JOB):
            part = Received(
                received.events[start : start + _EVENTS_PER_JOB],
                () if start else received.proofs,
                () if start else received.decisions,
            )
            if self.muted(source):
                break
            found: IntakeOutcome = await self._enqueue(
                _PEERS_NEXT, partial(self._ingest, part, source)
            )
            outcome += found
        return outcome

    def peers_copy(self) -> PeersCopy:
        """What reads from one peer what this node itself has said in another history."""
        return PeersCopy(self._author.recalled)

    async def page(self, pull: Pull, reader: NodeId | None = None) -> Received:
        """What is pulled, as much as one page takes: decisions first, then proofs, then events."""
        decided: list[Signed] = []
        room = MAX_PAGE_BYTES
        for decision in self.docket.graph.between(pull.have, pull.want):
            room -= len(decision.body) + RECORD_OVERHEAD_BYTES
            if decided and (room < 0 or len(decided) >= MAX_PAGE_EVENTS):
                break
            decided.append((decision.body, decision.signature))
        found = await self._store.proofs(pull.proofs, room) if room > 0 else []
        room -= sum(len(a[0]) + len(b[0]) + PROOF_OVERHEAD_BYTES for a, b in found)
        counting = [
            (author, generation, first, min(last, self.chains.last_for(reader, author)))
            for author, generation, first, last in pull.ranges
            if generation == self.chains.generation(author)
        ]
        events = await self._store.page(counting, room) if room > 0 else []
        return Received(tuple(events), tuple(found), tuple(decided))

    async def newest(self, before: Order, count: int, author: NodeId | None) -> list[Event]:
        """See `Store.newest`."""
        return await self._store.newest(before, count, author)

    async def close(self) -> None:
        """Write what waits, snapshot the state, close the file."""
        if self._closing:
            return
        # A full disk costs a snapshot, not an event; a slow one holds nobody up for ever.
        with suppress(MeshError, TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._enqueue(_LAST, self._snapshot)
        self._closing = True
        self._writer.cancel()
        await asyncio.wait([self._writer], timeout=_CLOSE_TIMEOUT_S)
        while not self._jobs.empty():
            self._jobs.get_nowait().done.cancel()
        await self._store.close()
        self.chains.close()

    # The writer.

    async def _enqueue(self, priority: int, run: Callable[[], Awaitable[Any]]) -> Any:
        is_full = self._jobs.qsize() >= _MAX_JOBS + (priority == _LAST)
        if self._closing or self._writer.done() or is_full:
            why = "too far behind with writing" if is_full else "closed"
            raise Busy(f"The event log is {why}.", fix="Try again in a moment.")
        self._numbers += 1
        done = asyncio.get_running_loop().create_future()
        self._jobs.put_nowait(_Job(priority, self._numbers, run, done))
        return await done

    async def _work(self) -> None:
        while True:
            job = await self._jobs.get()
            try:
                result = await job.run()
            except asyncio.CancelledError:
                job.done.cancel()
                raise
            except Exception as error:  # noqa: BLE001  (goes to whoever waits for this job)
                if not job.done.done():
                    job.done.set_exception(error)
            else:
                if not job.done.done():
                    job.done.set_result(result)

    async def _append(self, event_type: str, payload: Payload) -> Event:
        self._begin()
        try:
            event = self._author.extend(event_type, payload, await self._said())
            await self._commit(event)
        except BaseException:
            self._rollback()
            raise
        await self._committed()
        return event

    async def _decide(
        self, sign: Callable[[], tuple[Membership, SignedDecision]]
    ) -> SignedDecision:
        self._begin()
        try:
            membership, decision = await asyncio.to_thread(sign)
            self.chains.follow(membership)
            await self._commit(None)
        except BaseException:
            self._rollback()
            raise
        await self._committed()
        return decision

    async def _ingest(self, received: Received, source: NodeId) -> IntakeOutcome:
        self._begin()
        try:
            decided = Deliberated((), self.docket.membership)
            if received.decisions:
                decided = await asyncio.to_thread(self._intake.deliberate, received.decisions)
            outcome = await self._intake.take(received, source, decided)
            await self._commit(None)
        except BaseException:
            self._rollback()
            raise
        await self._committed()
        return outcome

    def _begin(self) -> None:
        self.chains.begin()
        self.docket.begin()
        self._intake.begin()

    def _rollback(self) -> None:
        self.chains.rollback()
        self.docket.rollback()

    async def _commit(self, appended: Event | None) -> None:
        """Put the transaction on the disk."""
        proofs = await self._intake.prove(self._stored)
        chains, author = self.chains, self._author
        accepted, decided, head = chains.accepted, self.docket.fresh, author.seen(chains.accepted)
        notes = {opening.OWN_HEAD: opening.place_note(head)} if head > author.head else {}
        if appended is not None and author.restarts:
            notes[opening.RESTART] = b""
        if accepted or proofs or decided:
            replaced = [(node, chains.generation(node)) for node in chains.replaced]
            await self._write(
                WriteBatch(accepted, decided, proofs, self._intake.adopted, replaced, notes)
            )
        if appended is None and head > author.head:
            author.tell_restored()
        author.head, author.restarts = head, author.restarts and appended is None
        self._intake.report_proofs(proofs)

    async def _write(self, batch: WriteBatch) -> None:
        try:
            await self._store.write(batch)
        except LogFull as error:
            if not self._is_full:  # said once, until something is written again
                self._is_full = True
                self._intake.on_report(Report(error.code, None, error.message, error.fix))
            raise
        self._is_full = False

    async def _stored(self, author: NodeId, seq: int) -> Event | None:
        found = await self._store.chain((author, self.chains.generation(author), seq, seq))
        return found[0] if found else None

    async def _committed(self) -> None:
        """Make the transaction visible, and what has to follow it."""
        events, decided = tuple(self.chains.accepted), tuple(self.docket.fresh)
        before = self.chains.state_at_begin
        self.chains.commit()
        if decided:
            await asyncio.to_thread(self.docket.commit, self.chains.state.membership)
        try:
            await self._refold()
        except EventLogError as error:  # they stay stale: the next transaction tries again
            logger.warning("what some members said is withheld: %s", error)
        if events or decided or self.chains.state is not before:
            change = LogChange(events, decided, self.chains.state)
            for listener in self.on_change:
                listener(change)
        self._since_snapshot += len(events)
        if self._since_snapshot >= self._snapshot_every:
            with suppress(EventLogError):  # the events are safe; the next start folds them again
                await self._snapshot()

    async def _said(self) -> State:
        """The state with all that this node has said: where it forked its chain, what either of its
        histories says after that counts for nobody before it is said again."""
        own, state = self._author.node_id, self.chains.state
        if own not in state.frozen:
            return state
        folded = await self._folded(applying.unfrozen(state, own), own)
        return self._author.recalled.added_to(folded)

    async def _refold(self) -> None:
        for author in self.chains.state.stale:
            self.chains.state = await self._folded(self.chains.state, author)

    async def _folded(self, state: State, author: NodeId) -> State:
        """With the whole chain of a stale author."""
        seq = 0
        where, last = (author, self.chains.generation(author)), self.chains.stored(author)
        while chain := await self._store.chain((*where, seq + 1, last)):
            state = applying.apply(state, chain) if seq else applying.refold(state, author, chain)
            seq = chain[-1].seq
        return state

    async def _snapshot(self) -> None:
        if not self._since_snapshot:
            return
        dumped = await asyncio.to_thread(snapshot.dump, self.chains.state, self._rules.version)
        if dumped is not None:
            await self._store.write(WriteBatch(notes={opening.SNAPSHOT: dumped}))
            await self._store.compact()
        self._since_snapshot = 0
