"""From bytes a peer sent to events in the ledger: decoding, counting what is bad, fork proofs.

Works inside a transaction that somebody else opens and writes. Refuses to know of disks and links.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Self

from mesh.clock import Clock
from mesh.errors import BadEvent, LogRefused
from mesh.events.ledger import Ledger, Verdict
from mesh.events.opening import Signed
from mesh.events.store import Proof
from mesh.events.types import Event, decode
from mesh.ledger import Resource, of_peer
from mesh.types import NodeId

SKEW_S = 600.0
"""How far ahead of our clock an author's may be before somebody is told."""

# Judging this many events takes a few milliseconds; then the event loop gets its turn.
_EVENTS_PER_TURN = 16
_MAX_WARNED = 1024


@dataclass(frozen=True, slots=True)
class Received:
    """Events and fork proofs as they travel: bodies with their signatures."""

    events: tuple[Signed, ...] = ()
    proofs: tuple[tuple[Signed, Signed], ...] = ()


@dataclass(slots=True)
class Outcome:
    """What became of events a peer sent.

    `offered` are the authors of all that could be read, `diverged` those of whom the peer holds
    another chain.
    """

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    offered: set[NodeId] = field(default_factory=set)
    diverged: set[NodeId] = field(default_factory=set)

    def __iadd__(self, more: Outcome) -> Self:
        self.verdicts += more.verdicts
        self.offered |= more.offered
        self.diverged |= more.diverged
        return self


@dataclass(frozen=True, slots=True)
class Report:
    """Something people should know: a stable kind, whom it is about, a sentence, what to do."""

    kind: str
    node: NodeId | None
    message: str
    fix: str


class Intake:
    """Feeds a ledger, on whose accounts it counts what peers send.

    `orphans` are events a repair saved that wait for their predecessor.
    """

    def __init__(self, ledger: Ledger, clock: Clock, on_report: Callable[[Report], None]) -> None:
        self.ledger = ledger
        self.clock = clock
        self.on_report = on_report
        self.orphans: dict[NodeId, dict[int, Signed]] = {}
        self.adopted: list[tuple[NodeId, int]] = []
        self._proofs: list[Proof] = []
        self._warned: set[NodeId] = set()
        self._full: set[NodeId] = set()

    def mutes(self, source: NodeId) -> bool:
        """Whether a peer sent so much that is bad that it is not listened to for a while."""
        accounts = self.ledger.accounts
        return accounts.exhausted(of_peer(source), Resource.BAD_EVENTS_PER_MINUTE)

    async def take(self, received: Received, source: NodeId) -> Outcome:
        """Offer everything to the ledger."""
        outcome = Outcome()
        self._proofs = []
        for first, second in received.proofs:
            outcome.verdicts[self._take_proof(first, second, source)] += 1
        for number, (body, signature) in enumerate(received.events, 1):
            if self.mutes(source):
                break
            self._take_event(body, signature, source, outcome)
            if number % _EVENTS_PER_TURN == 0:
                await asyncio.sleep(0)
        self.settle(source)
        return outcome

    def take_own(self, event: Event) -> None:
        """Offer an event of this node. Raises LogRefused unless its peers would take it."""
        verdict = self.ledger.offer(event)
        if verdict is Verdict.ACCEPTED:
            self.settle(None)
            return
        list(self.ledger.pending.take(event.author, event.seq))  # it must not come true later
        raise LogRefused(
            f"No node of the hearth would take this event ({verdict}).",
            fix="Join the hearth first; its log must know this node's key.",
        )

    def settle(self, source: NodeId | None) -> None:
        """Let what waited for the accepted events follow them."""
        self.adopted = []
        self._settle_held()
        for author, waiting in self.orphans.items():
            while (seq := self.ledger.stored(author) + 1) in waiting:
                if self.ledger.offer(decode(*waiting[seq]), source) is not Verdict.ACCEPTED:
                    break
                self.adopted.append((author, seq))
                self._settle_held()
        for event in self.ledger.accepted:
            self._check_clock(event)
            signer = of_peer(event.author)
            self.ledger.accounts.charge(signer, Resource.EVENTS_PER_MINUTE)

    async def prove(self, stored: Callable[[NodeId, int], Awaitable[Event | None]]) -> list[Proof]:
        """Freeze the authors that turned out to have forked; the proofs to keep."""
        proofs, self._proofs = self._proofs, []
        fresh = {(event.author, event.seq): event for event in self.ledger.accepted}
        for author, other in list(self.ledger.conflicts.items()):
            ours = fresh.get((author, other.seq)) or await stored(author, other.seq)
            if ours is not None:
                proofs.append((ours, other))
        for first, _ in proofs:
            self.ledger.freeze(first.author, first.seq)
        return proofs

    def report_proofs(self, proofs: list[Proof]) -> None:
        """Tell people of forks, once they are on the disk."""
        for first, _ in proofs:
            self.on_report(
                Report(
                    "log_forked", first.author,
                    f"{first.author} has signed two different events with number {first.seq}:"
                    " its key was copied, or its log restored from a backup.",
                    "Nothing it signed from there on counts. Revoke it and let it join with a new"
                    " key.",
                )
            )  # fmt: skip

    def blame(self, source: NodeId) -> None:
        """Count something bad that a peer sent; too much of it mutes the peer."""
        accounts = self.ledger.accounts
        if accounts.charge(of_peer(source), Resource.BAD_EVENTS_PER_MINUTE):
            self.on_report(
                Report(
                    "peer_muted", source,
                    f"{source} sent too many events that are forged or malformed.",
                    "It is not listened to for some minutes. If that repeats, revoke it.",
                )
            )  # fmt: skip

    def _take_event(self, body: bytes, signature: bytes, source: NodeId, outcome: Outcome) -> None:
        try:
            event = decode(body, signature)
        except BadEvent:
            verdict = Verdict.MALFORMED
        else:
            verdict = self._offer(event, source)
            outcome.offered.add(event.author)
            if verdict is Verdict.DIVERGED:
                outcome.diverged.add(event.author)
        outcome.verdicts[verdict] += 1
        self._charge(source, verdict)

    def _offer(self, event: Event, source: NodeId) -> Verdict:
        author, fresh = event.author, event.seq > self.ledger.stored(event.author)
        spent = self.ledger.accounts.exhausted(of_peer(author), Resource.EVENTS_PER_MINUTE)
        if fresh and spent:
            return Verdict.LATER
        verdict = self.ledger.offer(event, source)
        if verdict is Verdict.FULL and author not in self._full and len(self._full) < _MAX_WARNED:
            self._full.add(author)
            self.on_report(
                Report(
                    "author_full", author,
                    f"{author} has signed as many events as a hearth keeps of one member.",
                    "What it signs from here on counts nowhere. Revoke it, and let it join with a"
                    " new key.",
                )
            )  # fmt: skip
        return verdict

    def _take_proof(self, first: Signed, second: Signed, source: NodeId) -> Verdict:
        try:
            proof = decode(*first), decode(*second)
        except BadEvent:
            verdict = Verdict.MALFORMED
        else:
            verdict = self.ledger.judge_proof(*proof)
            if verdict is Verdict.FORKED:
                self.ledger.freeze(proof[0].author, proof[0].seq)
                self._proofs.append(proof)
        self._charge(source, verdict)
        return verdict

    def _settle_held(self) -> None:
        for source, verdict in self.ledger.settle():
            if source is not None:
                self._charge(source, verdict)

    def _charge(self, source: NodeId, verdict: Verdict) -> None:
        if verdict.is_bad:
            self.blame(source)

    def _check_clock(self, event: Event) -> None:
        ahead_s = event.wall_ms / 1000 - self.clock.now().timestamp()
        if ahead_s < SKEW_S or event.author in self._warned or len(self._warned) >= _MAX_WARNED:
            return
        self._warned.add(event.author)
        self.on_report(
            Report(
                "clock_skew", event.author,
                f"The clock of {event.author} is {ahead_s / 60:.0f} minutes ahead of this one.",
                "Nothing depends on it but the times that are shown. Set the clock that is wrong.",
            )
        )  # fmt: skip
