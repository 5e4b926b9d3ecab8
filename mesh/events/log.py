"""The signed log of one node: appends, takes in what peers send, and tells what it now says.

One task does all the writing, one transaction at a time, this node's own events first; memory
changes only when the disk has. Knows nothing of links or of what membership events mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from mesh.clock import Clock
from mesh.errors import Busy, EventLogError, LogBehind, LogForked, LogRefused, MeshError
from mesh.events import apply as applying
from mesh.events import opening, snapshot
from mesh.events.intake import Intake, Outcome, Received, Report
from mesh.events.ledger import Ledger
from mesh.events.opening import Contents
from mesh.events.rules import Rules, Verify
from mesh.events.state import State
from mesh.events.store import MAX_PAGE_BYTES, PROOF_OVERHEAD_BYTES, Batch, Range, Store
from mesh.events.types import Draft, Event, Payload, Sign, seal
from mesh.ledger import ResourceLedger
from mesh.types import NodeId

logger = logging.getLogger(__name__)

SNAPSHOT_EVERY = 5000
"""Events between two snapshots: what a start after a crash has to fold again at most."""

_MAX_JOBS = 256
_EVENTS_PER_JOB = 64
_OWN_FIRST, _PEERS_NEXT = 0, 1
_CLOSE_TIMEOUT_S = 30.0
_SEEN_AT_PEERS = "seen at peers"


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Where the log lies and whose it is."""

    path: Path
    hearth_id: str
    own: NodeId


@dataclass(frozen=True, slots=True)
class Change:
    """What one transaction brought: new events in the order they were taken in, and the state."""

    events: tuple[Event, ...]
    state: State


@dataclass(order=True, slots=True)
class _Job:
    priority: int
    number: int
    run: Callable[[], Awaitable[Any]] = field(compare=False)
    done: asyncio.Future[Any] = field(compare=False)


class EventLog:
    """Use `open`, then `close`. `ledger` is for reading only.

    `on_change` and `on_report` are called in the event loop and must not block.
    """

    def __init__(
        self, settings: LogSettings, store: Store, intake: Intake, rules: Rules, sign: Sign
    ) -> None:
        self.ledger: Ledger = intake.ledger
        self.on_change: list[Callable[[Change], None]] = []
        self._settings = settings
        self._store = store
        self._intake = intake
        self._rules = rules
        self._sign = sign
        self._jobs: asyncio.PriorityQueue[_Job] = asyncio.PriorityQueue(_MAX_JOBS)
        self._numbers = 0
        self._closing = False
        self._since_snapshot = 0
        self._own_head = 0
        self._behind = ""
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
        ledger = Ledger(settings.hearth_id, rules, verify, clock, accounts)
        ledger.restore(contents.chains, contents.state)
        intake = Intake(ledger, clock, on_report)
        intake.orphans = contents.orphans
        log = cls(settings, store, intake, rules, sign)
        log._resume(contents)
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
        return self.ledger.state

    def muted(self, peer: NodeId) -> bool:
        """Whether a peer sent so many bad events that it is not listened to for a while."""
        return self._intake.mutes(peer)

    def blame(self, peer: NodeId) -> None:
        """Count something unreadable that a peer sent like a bad event."""
        self._intake.blame(peer)

    async def append(self, event_type: str, payload: Payload) -> Event:
        """Sign one event as this node's next; when this returns, it is on the disk and applied.

        Raises LogBehind, LogForked, LogRefused, LogFull, LogCorrupt, BadEvent, and Busy when too
        much waits to be written.
        """
        done: Event = await self._enqueue(_OWN_FIRST, partial(self._append, event_type, payload))
        return done

    async def ingest(self, received: Received, source: NodeId) -> Outcome:
        """Take in what a peer sent; what is valid is on the disk when this returns.

        Raises LogFull, LogCorrupt, Busy. A muted peer's events are not even decoded.
        """
        outcome = Outcome()
        for start in range(0, max(1, len(received.events)), _EVENTS_PER_JOB):
            part = Received(
                received.events[start : start + _EVENTS_PER_JOB],
                () if start else received.proofs,
            )
            if self.muted(source):
                break
            found: Outcome = await self._enqueue(_PEERS_NEXT, partial(self._ingest, part, source))
            outcome += found
        return outcome

    async def page(self, ranges: Sequence[Range], proofs: Sequence[NodeId]) -> Received:
        """Events of these ranges, as many as one page takes, and the fork proofs of authors."""
        found = await self._store.proofs(proofs, MAX_PAGE_BYTES)
        taken = sum(len(a[0]) + len(b[0]) + PROOF_OVERHEAD_BYTES for a, b in found)
        room = MAX_PAGE_BYTES - taken
        counting = [
            (author, first, min(last, self.ledger.height(author))) for author, first, last in ranges
        ]
        events = await self._store.page(counting, room) if room > 0 else []
        return Received(tuple(events), tuple(found))

    async def adopt(self) -> None:
        """Go on after a restored backup: the person is sure that peers hold all this node signed.

        If one of them held more, the next append would be a fork.
        """
        await self._enqueue(_OWN_FIRST, self._adopt)

    async def close(self) -> None:
        """Write what waits, snapshot the state, close the file."""
        if self._closing:
            return
        with suppress(MeshError):  # a full disk costs a snapshot, not an event
            await self._enqueue(_PEERS_NEXT + 1, self._snapshot)
        self._closing = True
        self._writer.cancel()
        await asyncio.wait([self._writer], timeout=_CLOSE_TIMEOUT_S)
        while not self._jobs.empty():
            self._jobs.get_nowait().done.cancel()
        await self._store.close()
        self.ledger.close()

    # The writer.

    async def _enqueue(self, priority: int, run: Callable[[], Awaitable[Any]]) -> Any:
        if self._closing or self._writer.done() or self._jobs.full():
            why = "closed" if not self._jobs.full() else "too far behind with writing"
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
        own = self._settings.own
        self._check_may_append()
        seq, prev = self.ledger.next_link(own)
        wall_ms = max(0, int(self._intake.clock.now().timestamp() * 1000))
        draft = Draft(
            self._settings.hearth_id, own, seq, prev, self.ledger.lamport + 1, wall_ms,
            event_type, payload,
        )  # fmt: skip
        event = seal(draft, self._sign)
        self.ledger.begin()
        try:
            self._intake.take_own(event)
            await self._commit(event)
        except BaseException:
            self.ledger.rollback()
            raise
        self._own_head = seq
        await self._committed()
        return event

    async def _ingest(self, received: Received, source: NodeId) -> Outcome:
        self.ledger.begin()
        try:
            outcome = await self._intake.take(received, source)
            await self._commit(None)
        except BaseException:
            self.ledger.rollback()
            raise
        await self._committed()
        return outcome

    async def _commit(self, appended: Event | None) -> None:
        """Put the transaction on the disk. An own event that came from outside stops appending."""
        proofs = await self._intake.prove(self._store.event)
        accepted, own = self.ledger.accepted, self._settings.own
        surprises = [e for e in accepted if e.author == own and e.seq > self._own_head]
        notes: dict[str, bytes] = {}
        if appended is not None:
            notes[opening.OWN_HEAD] = str(appended.seq).encode()
        elif surprises:
            notes[opening.BEHIND] = _SEEN_AT_PEERS.encode()
        if accepted or proofs:
            await self._store.write(Batch(accepted, proofs, self._intake.adopted, notes))
        self._intake.report_proofs(proofs)
        if opening.BEHIND in notes and not self._behind:
            self._behind = _SEEN_AT_PEERS
            error = _behind()
            self._intake.on_report(Report(error.code, own, error.message, error.fix))

    async def _committed(self) -> None:
        """Make the transaction visible, and what has to follow it."""
        events = tuple(self.ledger.accepted)
        before = self.ledger.state_at_begin
        self.ledger.commit()
        await self._refold()
        if events or self.ledger.state is not before:
            change = Change(events, self.ledger.state)
            for listener in self.on_change:
                listener(change)
        self._since_snapshot += len(events)
        if self._since_snapshot >= SNAPSHOT_EVERY:
            with suppress(EventLogError):  # the events are safe; the next start folds them again
                await self._snapshot()

    async def _refold(self) -> None:
        for author in self.ledger.state.stale:
            seq = 0
            while chain := await self._store.chain(author, seq + 1, self.ledger.stored(author)):
                if seq == 0:
                    self.ledger.refold(author, chain)
                else:
                    self.ledger.state = applying.apply(self._rules, self.ledger.state, chain)
                seq = chain[-1].seq

    async def _snapshot(self) -> None:
        if not self._since_snapshot:
            return
        dumped = await asyncio.to_thread(snapshot.dump, self.ledger.state, self._rules.version)
        if dumped is not None:
            await self._store.write(Batch(notes={opening.SNAPSHOT: dumped}))
            await self._store.compact()
            self._since_snapshot = 0

    async def _adopt(self) -> None:
        head = self.ledger.stored(self._settings.own)
        notes = {opening.BEHIND: b"", opening.OWN_HEAD: str(head).encode()}
        await self._store.write(Batch(notes=notes))
        self._behind, self._own_head = "", head

    def _resume(self, contents: Contents) -> None:
        self._own_head = contents.own_head
        self._behind = contents.behind
        self._since_snapshot = contents.events - contents.snapshot_events

    def _check_may_append(self) -> None:
        own = self._settings.own
        if own in self.state.frozen:
            raise LogForked(
                "This node has signed two different events with one sequence number.",
                fix="Its key was copied or its log restored: give it a new key and join again.",
            )
        if self._behind or self.ledger.stored(own) < self._own_head:
            raise _behind()
        limit = self.state.limit(own)
        if limit is not None and self.ledger.stored(own) >= limit:
            raise LogRefused(
                "This node was put out of the hearth; its events no longer count.",
                fix="Ask an anchor for a new invitation.",
            )


def _behind() -> LogBehind:
    return LogBehind(
        "This node has signed events that its log did not hold: it was restored from a backup,"
        " damaged, or its key was copied.",
        fix="Give the node a new key and join again; or, when all other nodes are reachable and"
        " in step, adopt what they hold and go on.",
    )
