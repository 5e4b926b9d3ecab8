"""A hearth for the tests of the log: real keys, plain rules of membership, replicas in memory."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Coroutine, Generator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from mesh.events import apply as applying
from mesh.events.intake import Intake, Outcome, Received, Report
from mesh.events.ledger import Ledger
from mesh.events.log import EventLog, LogSettings
from mesh.events.messages import Ask, Message, Page, Probe, Pull, from_dict, to_dict
from mesh.events.state import AuthorFold, State
from mesh.events.store import MAX_PAGE_EVENTS
from mesh.events.sync import Exchange, answer_probe, heads_of
from mesh.events.types import (
    GENESIS,
    MODEL_PUBLISHED,
    PLACEMENT_WISHED,
    TOKEN_REVOKED,
    Draft,
    Event,
    EventId,
    Payload,
    seal,
)
from mesh.identity.keys import NodeKey, node_id
from mesh.ledger import ResourceLedger
from mesh.types import NodeId

T = TypeVar("T")

OPENED: list[EventLog] = []
"""Every log that `open_node` opened; closing one twice does nothing."""

FOUNDED, ADDED, REVOKED = "hearth.founded", "member.added", "member.revoked"
HEARTH = "hearth-of-the-tests"
TYPES = (MODEL_PUBLISHED, PLACEMENT_WISHED, TOKEN_REVOKED, "a.newer.type")
FIELDS = {MODEL_PUBLISHED: "model_id", PLACEMENT_WISHED: "model_id", TOKEN_REVOKED: "token_id"}


class FakeClock:
    """Time that moves when a test says so."""

    def __init__(self, wall: datetime | None = None) -> None:
        self.seconds = 1000.0
        self.wall = wall or datetime(2030, 1, 1, tzinfo=UTC)

    def monotonic(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return self.wall + timedelta(seconds=self.seconds - 1000.0)


@functools.cache
def key(number: int) -> NodeKey:
    """The same key for the same number, in every process."""
    return NodeKey(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"%d" % number).digest()))


@dataclass(frozen=True)
class Members:
    """Who is in. The founder alone puts somebody out and wishes placements; all may let in."""

    founder: NodeId | None = None
    keys: dict[NodeId, bytes] = field(default_factory=dict)
    cuts: dict[NodeId, int] = field(default_factory=dict)

    def limit(self, author: NodeId) -> int | None:
        return self.cuts.get(author)

    def standing(self, author: NodeId) -> tuple[bool, int | None]:
        return author in self.keys, self.cuts.get(author)

    def admits(self, event: Event) -> bool:
        return event.author == self.founder or event.type != PLACEMENT_WISHED


class HouseRules:
    """The rules that go with `Members`."""

    version = "tests/1"

    def concerns(self, event_type: str) -> bool:
        return event_type in (FOUNDED, ADDED, REVOKED)

    def derive(self, events: Sequence[Event]) -> Members:
        founders = [event for event in events if introduces_itself(event)]
        if not founders:
            return Members()
        founder = founders[0]
        cuts: dict[NodeId, int] = {}
        for event in events:
            if event.type == REVOKED and event.author == founder.author:
                subject, last = NodeId(event.payload["node"]), event.payload["last_seq"]
                cuts[subject] = min(last, cuts.get(subject, last))
        keys = {founder.author: founder.payload["key"]}
        for event in events:
            cut = cuts.get(event.author)
            if event.type == ADDED and event.author in keys and (cut is None or event.seq <= cut):
                keys[node_id(event.payload["key"])] = event.payload["key"]
        return Members(founder.author, keys, cuts)


def introduces_itself(event: Event) -> bool:
    """Whether an event is the founding one: it brings its author's key along."""
    return (
        event.type == FOUNDED
        and isinstance(event.payload, dict)
        and type(event.payload.get("key")) is bytes
        and node_id(event.payload["key"]) == event.author
    )


class Verifier:
    """Real signatures; counts what they cost."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, event: Event, membership: Any) -> bool | None:
        public = membership.keys.get(event.author)
        if public is None and introduces_itself(event):
            public = event.payload["key"]
        if public is None:
            return None
        self.calls += 1
        try:
            Ed25519PublicKey.from_public_bytes(public).verify(event.signature, event.signed_bytes)
        except InvalidSignature:
            return False
        return True


class Author:
    """Somebody who signs a chain; copies of it fork."""

    def __init__(self, number: int) -> None:
        self.key = key(number)
        self.id = self.key.node_id
        self.seq = 0
        self.prev: EventId = GENESIS
        self.lamport = 0

    def fork(self) -> Author:
        other = Author.__new__(Author)
        other.__dict__.update(self.__dict__)
        return other

    def draft(self, event_type: str, payload: Payload, lamport: int = 0) -> Draft:
        lamport = max(self.lamport + 1, lamport)
        return Draft(
            HEARTH, self.id, self.seq + 1, self.prev, lamport, 1_893_456_000_000, event_type,
            payload,
        )  # fmt: skip

    def sign(self, event_type: str, payload: Payload, lamport: int = 0) -> Event:
        event = seal(self.draft(event_type, payload, lamport), self.key.sign)
        self.seq, self.prev, self.lamport = event.seq, event.id, event.lamport
        return event

    def publish(self, model: str, lamport: int = 0) -> Event:
        return self.sign(MODEL_PUBLISHED, {"model_id": model}, lamport)

    def found(self) -> Event:
        return self.sign(FOUNDED, {"key": self.key.public_bytes})

    def add(self, other: Author, lamport: int = 0) -> Event:
        return self.sign(ADDED, {"key": other.key.public_bytes}, lamport)

    def revoke(self, other: NodeId, last_seq: int, lamport: int = 0) -> Event:
        return self.sign(REVOKED, {"node": other, "last_seq": last_seq}, lamport)


def household(count: int) -> tuple[list[Author], list[Event]]:
    """A founder and the others it let in."""
    authors = [Author(number) for number in range(count)]
    events = [authors[0].found()]
    events += [authors[0].add(other) for other in authors[1:]]
    for author in authors:
        author.lamport = max(author.lamport, count)
    return authors, events


def facts(authors: list[Author], count: int, rng: random.Random) -> list[Event]:
    """Facts of random kinds by random authors, some of whom have not heard of the others."""
    events = []
    for _ in range(count):
        author = rng.choice(authors)
        kind = rng.choice(TYPES)
        payload = {FIELDS.get(kind, "what"): f"subject-{rng.randrange(4)}", "n": rng.random()}
        lamport = rng.choice([0, max(other.lamport for other in authors) + 1])
        events.append(author.sign(kind, payload, lamport))
    return events


def signed(event: Event) -> tuple[bytes, bytes]:
    return event.body, event.signature


def meaning(state: State) -> object:
    """What must be equal on two replicas; what an author said that never counted may differ."""
    said: dict[NodeId, AuthorFold] = {
        author: fold for author, fold in state.authors.items() if fold.seq
    }
    return state.membership, said, dict(state.frozen), state.stale


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run what only ever gives way, without an event loop."""
    while True:
        try:
            work.send(None)
        except StopIteration as stop:
            result: T = stop.value
            return result


class MemoryReplica:
    """The log without a disk: what property tests make thousands of."""

    def __init__(
        self, clock: FakeClock | None = None, accounts: ResourceLedger | None = None
    ) -> None:
        self.clock = clock or FakeClock()
        self.rules = HouseRules()
        self.verifier = Verifier()
        self.reports: list[Report] = []
        self.ledger = Ledger(HEARTH, self.rules, self.verifier, self.clock, accounts)
        self.intake = Intake(self.ledger, self.clock, self.reports.append)
        self.rows: dict[NodeId, list[Event]] = {}
        self.proofs: dict[NodeId, tuple[Event, Event]] = {}

    @property
    def state(self) -> State:
        return self.ledger.state

    def take(self, events: Sequence[Event], source: str = "peer") -> Outcome:
        return self.receive(Received(tuple(signed(event) for event in events)), source)

    def receive(self, received: Received, source: str = "peer") -> Outcome:
        self.ledger.begin()
        outcome = finish(self.intake.take(received, NodeId(source)))
        proofs = finish(self.intake.prove(self._stored))
        for event in self.ledger.accepted:
            self.rows.setdefault(event.author, []).append(event)
        self.proofs.update({first.author: (first, second) for first, second in proofs})
        self.intake.report_proofs(proofs)
        self.ledger.commit()
        for author in self.ledger.state.stale:
            self.ledger.refold(author, self.rows.get(author, []))
        return outcome

    async def _stored(self, author: NodeId, seq: int) -> Event | None:
        return self.rows[author][seq - 1]

    def answer(self, request: Message) -> Message:
        match request:
            case Pull(number, ranges, proofs):
                events = [
                    event
                    for author, first, last in ranges
                    for event in self.rows.get(author, [])[
                        first - 1 : min(last, self.ledger.height(author))
                    ]
                ]
                events.sort(key=lambda event: event.order)
                evidence = [self.proofs[author] for author in proofs if author in self.proofs]
                return Page(
                    number,
                    Received(
                        tuple(signed(event) for event in events[:MAX_PAGE_EVENTS]),
                        tuple((signed(a), signed(b)) for a, b in evidence),
                    ),
                )
            case Probe():
                return answer_probe(self.ledger, request)
            case Ask(number):
                return heads_of(self.ledger, number)
        raise AssertionError(request)

    def pull_from(self, other: MemoryReplica, name: str = "peer") -> Generator[None, None, bool]:
        """One exchange, message by message; what it gives at the end is `fruitless`."""
        exchange = Exchange(1, self.ledger)
        message = exchange.start()
        while True:
            yield
            answer = from_dict(to_dict(other.answer(from_dict(to_dict(message)))))
            yield
            turn = exchange.receive(answer)
            if turn.ingest is not None:
                turn = exchange.ingested(self.receive(turn.ingest, name))
            if turn.send is None:
                return turn.fruitless
            message = turn.send

    def catch_up(self, other: MemoryReplica) -> bool:
        exchange = self.pull_from(other)
        while True:
            try:
                next(exchange)
            except StopIteration as stop:
                return bool(stop.value)


def reference(events: Sequence[Event], frozen: dict[NodeId, int] | None = None) -> State:
    return applying.fold(HouseRules(), events, frozen or {})


@dataclass
class Node:
    """A log on disk with what a test wants to look at."""

    log: EventLog
    author: Author
    clock: FakeClock
    verifier: Verifier
    reports: list[Report]

    def kinds(self) -> list[str]:
        return [report.kind for report in self.reports]


async def open_node(path: Path, number: int = 0, hearth_id: str = HEARTH) -> Node:
    """Open (or create) the log of key `number`."""
    author, clock, verifier = Author(number), FakeClock(), Verifier()
    reports: list[Report] = []
    log = await EventLog.open(
        LogSettings(path, hearth_id, author.id),
        rules=HouseRules(),
        verify=verifier,
        sign=author.key.sign,
        clock=clock,
        on_report=reports.append,
    )
    OPENED.append(log)
    return Node(log, author, clock, verifier, reports)


def altered(event: Event, **changes: Any) -> Event:
    return replace(event, **changes)
