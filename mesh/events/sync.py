"""One replica catching up with another, without I/O: messages in, messages and events out.

The one that wants to know drives an `Exchange`; the other answers each request by itself and keeps
nothing. Heads are compared, what is missing is pulled in bounded pages; where two chains of one
author differ, the first difference is searched, because the two events there prove the fork.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from mesh.errors import BadFrame
from mesh.events.intake import Outcome, Received
from mesh.events.messages import (
    HASH_BYTES,
    MAX_AUTHORS,
    MAX_PROBES,
    Ask,
    Heads,
    Message,
    Page,
    Probe,
    Probed,
    Pull,
)
from mesh.events.state import State
from mesh.events.store import Range
from mesh.events.types import EventId
from mesh.types import NodeId


class Replica(Protocol):
    """What an exchange reads of this node's log; `mesh.events.ledger.Ledger` is one."""

    @property
    def state(self) -> State:
        """For limits and forks."""

    def height(self, author: NodeId) -> int:
        """The author's last sequence number here that counts."""

    def is_full(self, author: NodeId) -> bool:
        """Whether nothing more of this author is kept here."""

    def id_at(self, author: NodeId, seq: int) -> EventId | None:
        """The id of an event here."""

    def heads(self) -> Mapping[NodeId, tuple[int, EventId]]:
        """Each author's last event that counts."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What to do next: send a message, or take in events and then call `ingested`; or it is over.

    `fruitless` says that the peer announced what it could not show.
    """

    send: Message | None = None
    ingest: Received | None = None
    fruitless: bool = False

    @property
    def over(self) -> bool:
        """Whether the exchange is at its end."""
        return self.send is None and self.ingest is None


@dataclass(slots=True)
class _Search:
    """For the first event in which two chains differ: `low` is equal (or 0), `high` differs."""

    author: NodeId
    low: int
    high: int

    def points(self) -> tuple[int, ...]:
        """What to ask for next: evenly spread between the two."""
        between = self.high - self.low - 1
        count = min(MAX_PROBES, between)
        return tuple(self.low + 1 + i * between // count for i in range(count))


class Exchange:
    """One catching-up with one peer; at most one per peer may run at a time."""

    def __init__(self, number: int, replica: Replica) -> None:
        self.number = number
        self._replica = replica
        self._theirs: Heads | None = None
        self._waiting: Message = Ask(number)
        self._wanted: dict[NodeId, int] = {}
        self._given_up: set[NodeId] = set()
        self._proofs_asked: set[NodeId] = set()
        self._searches: list[_Search] = []
        self._searched: set[NodeId] = set()
        self._conflict: NodeId | None = None
        self._fruitless = False

    def start(self) -> Message:
        """The first message."""
        return self._waiting

    def receive(self, message: Message) -> Turn:
        """The peer's answer. Raises BadFrame when it answers something else."""
        match message, self._waiting:
            case Heads(), Ask():
                self._theirs = message
                return self._next()
            case Page(received=received), Pull():
                return Turn(ingest=received)
            case Probed(author=author, hashes=hashes), Probe(seqs=seqs):
                self._narrow(author, hashes, seqs)
                return self._next()
        raise BadFrame(
            "A peer answered something else than it was asked.",
            fix="Run the same hearthnet version on both machines.",
        )

    def ingested(self, outcome: Outcome) -> Turn:
        """The page's events have been judged."""
        for author in outcome.diverged:
            self._search(author, self._replica.height(author))
        for author in outcome.offered or set(self._wanted):
            if self._replica.height(author) <= self._wanted.get(author, 0):
                # It waits for another author's event, or is no good; others may go on.
                self._given_up.add(author)
        if self._conflict is not None and self._conflict not in self._replica.state.frozen:
            self._fruitless = True
        self._wanted, self._conflict = {}, None
        return self._next()

    def _next(self) -> Turn:
        theirs = self._theirs
        assert theirs is not None, "heads come first"  # noqa: S101  (our own invariant)
        message = self._next_search() or self._next_pull(theirs)
        if message is None:
            for author in conflicting(self._replica, theirs):
                self._search(author, theirs.heads[author][0])
            message = self._next_search()
        if message is None:
            return Turn(fruitless=self._fruitless)
        self._waiting = message
        return Turn(send=message)

    def _next_search(self) -> Message | None:
        while self._searches:
            search = self._searches[0]
            frozen = self._replica.state.frozen.get(search.author)
            if frozen is not None and frozen < search.high:
                self._searches.pop(0)
                continue
            if search.high - search.low > 1:
                return Probe(self.number, search.author, search.points())
            self._searches.pop(0)
            self._conflict = search.author
            return Pull(self.number, ((search.author, search.high, search.high),))
        return None

    def _narrow(self, author: NodeId, hashes: Mapping[int, bytes], seqs: tuple[int, ...]) -> None:
        search = self._searches[0]
        if author != search.author or not hashes.keys() >= set(seqs):
            self._searches.pop(0)
            self._fruitless = True
            return
        for seq in seqs:
            ours = self._replica.id_at(author, seq)
            if ours is None or ours[:HASH_BYTES] != hashes[seq]:
                search.high = seq
                break
            search.low = seq

    def _next_pull(self, theirs: Heads) -> Pull | None:
        proofs = []
        for author, seq in theirs.forks.items():
            known = self._replica.state.frozen.get(author)
            if author not in self._proofs_asked and (known is None or seq <= known):
                proofs.append(author)
        self._proofs_asked.update(proofs)
        ranges = sorted(missing(self._replica, theirs, self._given_up))[:MAX_AUTHORS]
        self._wanted = {author: first - 1 for author, first, _ in ranges}
        if not ranges and not proofs:
            return None
        return Pull(self.number, tuple(ranges), tuple(sorted(proofs)))

    def _search(self, author: NodeId, high: int) -> None:
        if high > 0 and author not in self._searched:
            self._searched.add(author)
            self._searches.append(_Search(author, 0, high))


def missing(replica: Replica, theirs: Heads, but: Iterable[NodeId] = ()) -> Iterable[Range]:
    """What a peer with these heads has and this replica could use."""
    skipped = set(but)
    for author, (seq, _) in theirs.heads.items():
        limit = replica.state.limit(author)
        last = seq if limit is None else min(seq, limit)
        height = replica.height(author)
        if last > height and author not in skipped and not replica.is_full(author):
            yield author, height + 1, last


def conflicting(replica: Replica, theirs: Heads) -> Iterable[NodeId]:
    """Authors of whom the peer holds another chain than this replica."""
    for author, (seq, short) in theirs.heads.items():
        if seq <= replica.height(author):
            ours = replica.id_at(author, seq)
            if ours is not None and ours[:HASH_BYTES] != short:
                yield author


def wants_something(replica: Replica, theirs: Heads) -> bool:
    """Whether an exchange with a peer of these heads would bring anything."""
    forks = any(
        (known := replica.state.frozen.get(author)) is None or seq <= known
        for author, seq in theirs.forks.items()
    )
    return forks or any(missing(replica, theirs)) or any(conflicting(replica, theirs))


def heads_of(replica: Replica, number: int) -> Heads:
    """This replica's heads as a message."""
    heads = {author: (seq, full[:HASH_BYTES]) for author, (seq, full) in replica.heads().items()}
    forks = {author: last + 1 for author, last in replica.state.frozen.items()}
    return Heads(number, dict(list(heads.items())[:MAX_AUTHORS]), forks)


def answer_probe(replica: Replica, probe: Probe) -> Probed:
    """The ids that were asked for."""
    found = {seq: replica.id_at(probe.author, seq) for seq in probe.seqs}
    hashes = {seq: full[:HASH_BYTES] for seq, full in found.items() if full is not None}
    return Probed(probe.number, probe.author, hashes)
