"""From bytes a peer sent to decisions in the docket and events in the chains.

Decodes, counts what is bad, and finds proofs of forked chains.

Works inside transactions that somebody else opens and writes. Refuses to know of disks and links.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from mesh.accounts.ledger import Resource, of_peer
from mesh.clock import Clock, claimed
from mesh.errors import BadEvent, LogRefused
from mesh.events.chains import Chains
from mesh.events.docket import Docket, Signed
from mesh.events.rules import Membership
from mesh.events.store import Proof
from mesh.events.types import Event, Place, decode
from mesh.events.verdict import EventVerdict
from mesh.types import NodeId
from mesh.units import lasting

SKEW_S = 600.0
"""How far ahead of our clock an author's may be before somebody is told."""

# Judging this many events takes a few milliseconds; then the event loop gets its turn.
_EVENTS_PER_TURN = 16
_MAX_WARNED = 1024


@dataclass(frozen=True, slots=True)
class Received:
    """Events, fork proofs and decisions as they travel: bodies with their signatures."""

    events: tuple[Signed, ...] = ()
    proofs: tuple[tuple[Signed, Signed], ...] = ()
    decisions: tuple[Signed, ...] = ()


@dataclass(frozen=True, slots=True)
class Deliberated:
    """What became of decisions a peer sent, in their order, and who is in then."""

    verdicts: tuple[EventVerdict, ...]
    membership: Membership


@dataclass(slots=True)
class IntakeOutcome:
    """What became of events a peer sent.

    `offered` are the authors of all that could be read, `diverged` those of whom the peer holds
    another chain, `decided` counts the decisions that were taken in.
    """

    verdicts: Counter[EventVerdict] = field(default_factory=Counter)
    decided: int = 0
    offered: set[NodeId] = field(default_factory=set)
    diverged: set[NodeId] = field(default_factory=set)

    def __iadd__(self, more: IntakeOutcome) -> Self:
        self.verdicts += more.verdicts
        self.decided += more.decided
        self.offered |= more.offered
        self.diverged |= more.diverged
        return self


@dataclass(frozen=True, slots=True)
class Report:
    """Something people should know: a stable kind, whom it is about, a sentence, what to do, and
    by when on this machine's clock that is no longer so, where it ends by itself (ISO 8601)."""

    kind: str
    node: NodeId | None
    message: str
    fix: str
    until: str | None = None


class Intake:
    """Feeds a docket and chains, on whose accounts it counts what peers send.

    `orphans` are events a repair saved that wait for their predecessor, by generation and number.
    """

    def __init__(
        self, docket: Docket, chains: Chains, clock: Clock, on_report: Callable[[Report], None]
    ) -> None:
        self.docket = docket
        self.chains = chains
        self.clock = clock
        self.on_report = on_report
        self.orphans: dict[NodeId, dict[Place, Signed]] = {}
        self.adopted: list[tuple[NodeId, Place]] = []
        self._proofs: list[Proof] = []
        self._warned: dict[NodeId, int] = {}
        """By whose clock is ahead: until when, in Unix milliseconds."""
        self._full: set[NodeId] = set()

    def mutes(self, source: NodeId) -> bool:
        """Whether a peer sent so much that is bad that it is not listened to for a while."""
        accounts = self.chains.accounts
        return accounts.exhausted(of_peer(source), Resource.BAD_EVENTS_PER_MINUTE)

    def begin(self) -> None:
        """Open a transaction: what the one before left, if it failed, is none of it."""
        self.adopted, self._proofs = [], []

    def deliberate(self, received: Sequence[Signed]) -> Deliberated:
        """Offer decisions, in a worker thread: it takes as long as they are entangled."""
        return Deliberated(tuple(self.docket.take(received)), self.docket.derive())

    async def take(self, received: Received, source: NodeId, decided: Deliberated) -> IntakeOutcome:
        """Offer events and proofs, after the decisions, which bring the keys for them."""
        outcome = IntakeOutcome(decided=len(self.docket.fresh))
        if outcome.decided:
            self.chains.follow(decided.membership)
        for verdict in decided.verdicts:
            outcome.verdicts[verdict] += 1
            self._charge(source, verdict)
        for first, second in received.proofs:
            outcome.verdicts[self._take_proof(first, second, source)] += 1
        muted = self.mutes(source)
        for number, (body, signature) in enumerate(received.events, 1):
            if muted:
                break
            if self._take_event(body, signature, source, outcome).is_bad:
                muted = self.mutes(source)
            if number % _EVENTS_PER_TURN == 0:
                await asyncio.sleep(0)
        self.settle(source)
        return outcome

    def take_own(self, event: Event) -> None:
        """Offer an event of this node. Raises LogRefused unless its peers would take it."""
        verdict = self.chains.offer(event)
        if verdict is EventVerdict.ACCEPTED:
            self.settle(None)
            return
        list(self.chains.pending.take(event.author, event.seq))  # it must not come true later
        raise LogRefused(
            f"No node of the hearth would take this event ({verdict}).",
            fix="Join the hearth first; its log must know this node's key.",
        )

    def settle(self, source: NodeId | None) -> None:
        """Let what waited for the accepted events follow them."""
        self._settle_held()
        for author, waiting in self.orphans.items():
            while (place := self._next_place(author)) in waiting:
                if self.chains.offer(decode(*waiting[place]), source) is not EventVerdict.ACCEPTED:
                    break
                self.adopted.append((author, place))
                self._settle_held()
        for event in self.chains.accepted:
            self._check_clock(event)
        for author, count in Counter(event.author for event in self.chains.accepted).items():
            self.chains.accounts.charge(of_peer(author), Resource.EVENTS_PER_MINUTE, count)

    async def prove(self, stored: Callable[[NodeId, int], Awaitable[Event | None]]) -> list[Proof]:
        """Freeze the authors that turned out to have forked; the proofs to keep."""
        proofs, self._proofs = self._proofs, []
        fresh = {(event.author, event.place): event for event in self.chains.accepted}
        for author, other in list(self.chains.conflicts.items()):
            ours = fresh.get((author, other.place)) or await stored(author, other.seq)
            if ours is not None and ours.place == other.place:
                proofs.append((ours, other))
        for first, _ in proofs:
            self.chains.freeze(first.author, first.place)
        return proofs

    def report_proofs(self, proofs: list[Proof]) -> None:
        """Tell people of forks, once they are on the disk."""
        for first, _ in proofs:
            self.on_report(
                Report(
                    "facts_forked", first.author,
                    f"{first.author} has signed two different facts with number {first.seq}: its"
                    " log was restored from a backup, or its key copied.",
                    "It says again by itself what its own log and the machines linked to it have of"
                    " both; deploy again what `hearthnet status` misses. If it was not restored,"
                    " revoke it.",
                )
            )  # fmt: skip

    def blame(self, source: NodeId) -> None:
        """Count something bad that a peer sent; too much of it mutes the peer."""
        accounts = self.chains.accounts
        if accounts.charge(of_peer(source), Resource.BAD_EVENTS_PER_MINUTE):
            self.on_report(
                Report(
                    "peer_muted", source,
                    f"{source} sent too many events that are forged or malformed.",
                    "It is not listened to for some minutes. If that repeats, revoke it.",
                )
            )  # fmt: skip

    def _next_place(self, author: NodeId) -> Place:
        return max(1, self.chains.generation(author)), self.chains.stored(author) + 1

    def _take_event(
        self, body: bytes, signature: bytes, source: NodeId, outcome: IntakeOutcome
    ) -> EventVerdict:
        try:
            event = decode(body, signature)
        except BadEvent:
            verdict = EventVerdict.MALFORMED
        else:
            verdict = self._offer(event, source)
            outcome.offered.add(event.author)
            if verdict is EventVerdict.DIVERGED:
                outcome.diverged.add(event.author)
        outcome.verdicts[verdict] += 1
        self._charge(source, verdict)
        return verdict

    def _offer(self, event: Event, source: NodeId) -> EventVerdict:
        author, accounts = event.author, self.chains.accounts
        is_fresh = event.place >= self._next_place(author)
        if is_fresh and accounts.exhausted(of_peer(author), Resource.EVENTS_PER_MINUTE):
            return EventVerdict.LATER
        verdict = self.chains.offer(event, source)
        if (
            verdict is EventVerdict.FULL
            and author not in self._full
            and len(self._full) < _MAX_WARNED
        ):
            self._full.add(author)
            self.on_report(
                Report(
                    "author_full", author,
                    f"{author} has signed as many events as a hearth keeps of one member.",
                    "What it signs from here on counts nowhere until it begins a new chain, which"
                    " hearthnet does by itself.",
                )
            )  # fmt: skip
        return verdict

    def _take_proof(self, first: Signed, second: Signed, source: NodeId) -> EventVerdict:
        try:
            proof = decode(*first), decode(*second)
        except BadEvent:
            verdict = EventVerdict.MALFORMED
        else:
            verdict = self.chains.judge_proof(*proof)
            if verdict is EventVerdict.FORKED:
                self.chains.freeze(proof[0].author, proof[0].place)
                self._proofs.append(proof)
        self._charge(source, verdict)
        return verdict

    def _settle_held(self) -> None:
        for source, verdict in self.chains.settle():
            if source is not None:
                self._charge(source, verdict)

    def _charge(self, source: NodeId, verdict: EventVerdict) -> None:
        if verdict.is_bad:
            self.blame(source)

    def _check_clock(self, event: Event) -> None:
        now_s, warned = self.clock.now().timestamp(), self._warned
        ahead_s, known_ms = event.wall_ms / 1000 - now_s, warned.get(event.author)
        if ahead_s < SKEW_S or (known_ms is None and len(warned) >= _MAX_WARNED):
            return
        if known_ms is not None and known_ms / 1000 > now_s:
            return
        warned[event.author] = event.wall_ms
        self.on_report(
            Report(
                "clock_skew", event.author,
                f"The clock of {event.author} is {lasting(ahead_s)} ahead of this one.",
                "Nothing depends on it but the times that are shown. Set the clock that is wrong.",
                # It may have been this machine's, which has been set since.
                until=claimed(event.wall_ms).isoformat(),
            )
        )  # fmt: skip
