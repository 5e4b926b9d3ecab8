"""A hearth for the tests of the log: real keys, real decisions, replicas in memory."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Coroutine, Generator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mesh.accounts.ledger import ResourceLedger
from mesh.events import apply as applying
from mesh.events.authoring import LogSettings
from mesh.events.chains import Chains
from mesh.events.decision import DecisionDraft, SignedDecision
from mesh.events.decision import seal as seal_decision
from mesh.events.docket import Docket
from mesh.events.graph import Graph
from mesh.events.intake import Intake, IntakeOutcome, Received, Report
from mesh.events.log import EventLog
from mesh.events.messages import Ask, LogMessage, Page, Probe, Pull, from_dict, to_dict
from mesh.events.state import AuthorFold, State
from mesh.events.store import MAX_PAGE_EVENTS
from mesh.events.sync import CatchUp, LogReplica, answer_probe, heads_of
from mesh.events.types import (
    GENESIS,
    MODEL_PUBLISHED,
    STEERING_PUBLISHED,
    TOKEN_REVOKED,
    Draft,
    Event,
    EventId,
    Payload,
    seal,
)
from mesh.identity import decisions
from mesh.identity.certificates import make_certificate
from mesh.identity.decisions import Added, Decision, Founded, LevelChanged, Revoked
from mesh.identity.keys import NodeKey
from mesh.identity.membership import HearthRules, verify
from mesh.identity.recovery import recovery_key
from mesh.identity.roster import Cut, Roster, TrustLevel
from mesh.types import NodeId

T = TypeVar("T")

OPENED: list[EventLog] = []
"""Every log that `open_node` opened; closing one twice does nothing."""

TYPES = (MODEL_PUBLISHED, STEERING_PUBLISHED, TOKEN_REVOKED, "a.newer.type")
FIELDS = {MODEL_PUBLISHED: "model_id", STEERING_PUBLISHED: "name", TOKEN_REVOKED: "token_id"}
FOUNDED_MS = 1_893_456_000_000
CODE = "0000-0000-0000-0000-0000-0000-02MC"

Record = Event | SignedDecision


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


def founding() -> Founded:
    """The one of key 0."""
    public = recovery_key(CODE).public_key().public_bytes_raw()
    return Founded("Home", bytes(16), make_certificate(key(0)), "0", public, FOUNDED_MS)


HEARTH = decisions.hearth_id(founding())


class Verifier:
    """Real signatures; counts what they cost."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, event: Event, membership: Any) -> bool | None:
        self.calls += event.author in membership.keys
        return verify(event, membership)


class Author:
    """Somebody who signs a chain; copies of it fork."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.key = key(number)
        self.id = self.key.node_id
        self.generation = 1
        self.ids: list[EventId] = []
        self.lamport = 0

    @property
    def seq(self) -> int:
        return len(self.ids)

    @property
    def prev(self) -> EventId:
        return self.ids[-1] if self.ids else GENESIS

    def fork(self) -> Author:
        other = Author.__new__(Author)
        other.__dict__.update(self.__dict__)
        other.ids = list(self.ids)
        return other

    def begin_again(self) -> None:
        self.generation += 1
        self.ids = []

    def draft(self, event_type: str, payload: Payload, lamport: int = 0) -> Draft:
        lamport = max(self.lamport + 1, lamport)
        return Draft(
            HEARTH, self.id, self.generation, self.seq + 1, self.prev, lamport, FOUNDED_MS,
            event_type, payload,
        )  # fmt: skip

    def sign(self, event_type: str, payload: Payload, lamport: int = 0) -> Event:
        event = seal(self.draft(event_type, payload, lamport), self.key.sign)
        self.ids.append(event.id)
        self.lamport = event.lamport
        return event

    def publish(self, model: str, lamport: int = 0) -> Event:
        return self.sign(MODEL_PUBLISHED, {"model_id": model}, lamport)

    def cut(self, last_seq: int) -> Cut:
        return Cut(self.generation, last_seq, self.ids[last_seq - 1]) if last_seq else NOTHING


NOTHING = Cut(0, 0, b"")


class House:
    """The decisions of a hearth that key 0 founds, each seeing all those before."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.founder = Author(0)
        self.founded = self.say(founding(), wall_ms=FOUNDED_MS)

    def say(
        self, decision: Decision, by: Author | None = None, *, wall_ms: int = 0
    ) -> SignedDecision:
        parents = self.graph.tips
        kind, payload = decisions.encode(decision)
        author = by or self.founder
        draft = DecisionDraft(
            HEARTH, author.id, self.graph.depth_after(parents), wall_ms, kind, payload, parents
        )
        signed_one = seal_decision(draft, author.key.sign)
        self.graph.add(signed_one)
        return signed_one

    def add(self, other: Author, level: TrustLevel = TrustLevel.TRUSTED) -> SignedDecision:
        return self.say(Added(make_certificate(other.key), str(other.number), level))

    def change(self, other: Author, level: TrustLevel) -> SignedDecision:
        return self.say(LevelChanged(other.id, level))

    def revoke(self, other: Author, last_seq: int) -> SignedDecision:
        return self.say(Revoked(other.id, other.cut(last_seq)))


def household(count: int) -> tuple[House, list[Author], list[Record]]:
    """A hearth, its founder and the others it let in, and the decisions that did."""
    house = House()
    authors = [house.founder] + [Author(number) for number in range(1, count)]
    events: list[Record] = [house.founded, *(house.add(other) for other in authors[1:])]
    return house, authors, events


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


def signed(event: Record) -> tuple[bytes, bytes]:
    return event.body, event.signature


def received(events: Sequence[Record]) -> Received:
    """Records as a page brings them."""
    return Received(
        tuple(signed(event) for event in events if isinstance(event, Event)),
        (),
        tuple(signed(event) for event in events if isinstance(event, SignedDecision)),
    )


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
        self.verifier = Verifier()
        self.reports: list[Report] = []
        self.docket = Docket(HEARTH, HearthRules(HEARTH))
        self.chains = Chains(HEARTH, self.docket.membership, self.verifier, self.clock, accounts)
        self.replica = LogReplica(self.chains, self.docket)
        self.intake = Intake(self.docket, self.chains, self.clock, self.reports.append)
        self.rows: dict[NodeId, list[Event]] = {}
        self.proofs: dict[NodeId, tuple[Event, Event]] = {}

    @property
    def state(self) -> State:
        return self.chains.state

    @property
    def roster(self) -> Roster:
        assert isinstance(self.docket.membership, Roster)
        return self.docket.membership

    def take(self, events: Sequence[Record], source: str = "peer") -> IntakeOutcome:
        return self.receive(received(events), source)

    def receive(self, received: Received, source: str = "peer") -> IntakeOutcome:
        self.chains.begin()
        self.docket.begin()
        self.intake.begin()
        decided = self.intake.deliberate(received.decisions)
        outcome = finish(self.intake.take(received, NodeId(source), decided))
        proofs = finish(self.intake.prove(self._stored))
        for author in self.chains.replaced:
            self.rows.pop(author, None)
        for event in self.chains.accepted:
            if event.generation == self.chains.generation(event.author):
                self.rows.setdefault(event.author, []).append(event)
        self.proofs.update({first.author: (first, second) for first, second in proofs})
        self.intake.report_proofs(proofs)
        self.chains.commit()
        self.docket.commit(self.state.membership)
        for author in self.state.stale:
            self.chains.state = applying.refold(self.state, author, self.rows.get(author, []))
        return outcome

    async def _stored(self, author: NodeId, seq: int) -> Event | None:
        return self.rows[author][seq - 1]

    def answer(self, request: LogMessage) -> LogMessage:
        match request:
            case Pull():
                return Page.of(request.number, self._page(request))
            case Probe():
                return answer_probe(self.chains, request)
            case Ask(number):
                return heads_of(self.replica, number)
        raise AssertionError(request)

    def _page(self, pull: Pull) -> Received:
        decided = [signed(d) for d in self.docket.graph.between(pull.have, pull.want)]
        events = [
            event
            for author, generation, first, last in pull.ranges
            if generation == self.chains.generation(author)
            for event in self.rows.get(author, [])[
                first - 1 : min(last, self.chains.height(author))
            ]
        ]
        events.sort(key=lambda event: event.order)
        evidence = [self.proofs[author] for author in pull.proofs if author in self.proofs]
        return Received(
            tuple(signed(event) for event in events[:MAX_PAGE_EVENTS]),
            tuple((signed(a), signed(b)) for a, b in evidence),
            tuple(decided[:MAX_PAGE_EVENTS]),
        )

    def pull_from(self, other: MemoryReplica, name: str = "peer") -> Generator[None, None, bool]:
        """One exchange, message by message; what it gives at the end is `fruitless`."""
        exchange = CatchUp(1, self.replica)
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


def reference(events: Sequence[Record], frozen: dict[NodeId, Any] | None = None) -> State:
    docket = Docket(HEARTH, HearthRules(HEARTH))
    docket.load(event for event in events if isinstance(event, SignedDecision))
    facts = [event for event in events if isinstance(event, Event)]
    return applying.fold(docket.membership, facts, frozen or {})


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


async def open_node(
    path: Path,
    number: int = 0,
    hearth_id: str = HEARTH,
    accounts: ResourceLedger | None = None,
    **settings: int,
) -> Node:
    """Open (or create) the log of key `number`."""
    author, clock, verifier = Author(number), FakeClock(), Verifier()
    reports: list[Report] = []
    log = await EventLog.open(
        LogSettings(path, hearth_id, author.id, **settings),
        rules=HearthRules(hearth_id),
        verify=verifier,
        sign=author.key.sign,
        clock=clock,
        on_report=reports.append,
        accounts=accounts,
    )
    OPENED.append(log)
    return Node(log, author, clock, verifier, reports)


def altered(event: Any, **changes: Any) -> Any:
    """An event, or the draft of one, with other fields."""
    return msgspec.structs.replace(event, **changes)


async def found(node: Node) -> SignedDecision:
    """The founding by key 0, as its first decision."""
    kind, payload = decisions.encode(founding())
    return await node.log.decide(kind, lambda parents, wall_ms: payload, wall_ms=FOUNDED_MS)


async def let_in(node: Node, other: Author) -> SignedDecision:
    """One more member, let in by a node's own decision."""
    added = Added(make_certificate(other.key), str(other.number), TrustLevel.TRUSTED)
    kind, payload = decisions.encode(added)
    return await node.log.decide(kind, lambda parents, wall_ms: payload)
