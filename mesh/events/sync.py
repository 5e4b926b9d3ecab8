"""One replica catching up with another, without I/O: messages in, messages and events out.

The one that wants to know drives an `CatchUp`; the other answers each request by itself and keeps
nothing. Heads are compared, what is missing is pulled in bounded pages, decisions before events;
where two chains of one author differ, the first difference is searched, because the two events
there prove the fork.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mesh.errors import SAME_VERSION, BadFrame
from mesh.events.chains import Chains
from mesh.events.decision import DecisionId
from mesh.events.docket import Docket
from mesh.events.intake import IntakeOutcome, Received
from mesh.events.messages import (
    HASH_BYTES,
    MAX_AUTHORS,
    MAX_PROBES,
    MAX_TIPS,
    Ask,
    Heads,
    LogMessage,
    Page,
    Probe,
    Probed,
    Pull,
)
from mesh.events.store import Range
from mesh.events.types import Place
from mesh.events.verdict import EventVerdict
from mesh.types import NodeId

_IDLE_PULLS = 2
"""Pulls of decisions that bring none before the rest is left for another time. The first may bring
what shows why something that was refused before is needed."""


@dataclass(frozen=True, slots=True)
class LogReplica:
    """What an exchange reads of this node's log."""

    chains: Chains
    docket: Docket


@dataclass(frozen=True, slots=True)
class Turn:
    """What to do next: send a message, or take in events and then call `ingested`; or it is over.

    `fruitless` says that the peer announced what it could not show.
    """

    send: LogMessage | None = None
    ingest: Received | None = None
    fruitless: bool = False


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


class CatchUp:
    """One catching-up with one peer; at most one per peer may run at a time."""

    def __init__(self, number: int, replica: LogReplica) -> None:
        self.number = number
        self._replica = replica
        self._theirs: Heads | None = None
        self._waiting: LogMessage = Ask(number)
        self._wanted: dict[NodeId, Place] = {}
        self._given_up: set[NodeId] = set()
        self._proofs_asked: set[NodeId] = set()
        self._searches: list[_Search] = []
        self._searched: set[NodeId] = set()
        self._conflict: NodeId | None = None
        self._idle = 0
        self._fruitless = False

    def start(self) -> LogMessage:
        """The first message."""
        return self._waiting

    def receive(self, message: LogMessage) -> Turn:
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
            fix=SAME_VERSION,
        )

    def ingested(self, outcome: IntakeOutcome) -> Turn:
        """The page's events have been judged."""
        chains = self._replica.chains
        if isinstance(self._waiting, Pull) and self._waiting.want:
            self._idle = 0 if outcome.decided else self._idle + 1
        for author in outcome.diverged:
            self._search(author, chains.height(author))
        # What waits for its author to be let in, or is no good, is given up; others may go on.
        self._given_up |= self._unmoved(outcome.offered)
        stuck = self._unmoved(self._wanted)
        if stuck and stuck == self._wanted.keys():
            # An honest page may lack an author, whose events come later than the others' that fill
            # it; but not all of them, unless it shows a fork.
            self._given_up |= stuck
            shows_fork = bool(outcome.diverged) or EventVerdict.FORKED in outcome.verdicts
            self._fruitless = self._fruitless or not shows_fork
        if self._conflict is not None and self._conflict not in chains.state.frozen:
            self._fruitless = True
        self._wanted, self._conflict = {}, None
        return self._next()

    def _unmoved(self, authors: Iterable[NodeId]) -> set[NodeId]:
        """Those of whom no more is here than when the page was asked for."""
        chains, wanted = self._replica.chains, self._wanted
        return {
            author
            for author in authors
            if (chains.generation(author), chains.height(author)) <= wanted.get(author, (0, 0))
        }

    def _next(self) -> Turn:
        theirs = self._theirs
        assert theirs is not None, "heads come first"  # noqa: S101  (our own invariant)
        message = self._next_decisions(theirs) or self._next_search() or self._next_pull(theirs)
        if message is None:
            for author in conflicting(self._replica, theirs):
                self._search(author, theirs.heads[author][1])
            message = self._next_search()
        if message is None:
            return Turn(fruitless=self._fruitless)
        self._waiting = message
        return Turn(send=message)

    def _next_decisions(self, theirs: Heads) -> Pull | None:
        """First of all, as they let the authors of events in."""
        docket = self._replica.docket
        want = lacking(docket, theirs)
        if not want or self._idle >= _IDLE_PULLS:
            return None
        return Pull(self.number, want=tuple(want[:MAX_TIPS]), have=docket.tips[:MAX_TIPS])

    def _next_search(self) -> LogMessage | None:
        chains = self._replica.chains
        while self._searches:
            search = self._searches[0]
            frozen = chains.state.frozen.get(search.author)
            if frozen is not None and frozen[1] < search.high:
                self._searches.pop(0)
                continue
            generation = chains.generation(search.author)
            if search.high - search.low > 1:
                return Probe(self.number, search.author, generation, search.points())
            self._searches.pop(0)
            self._conflict = search.author
            return Pull(self.number, ((search.author, generation, search.high, search.high),))
        return None

    def _narrow(self, author: NodeId, hashes: Mapping[int, bytes], seqs: tuple[int, ...]) -> None:
        search = self._searches[0]
        if author != search.author or not hashes.keys() >= set(seqs):
            self._searches.pop(0)
            self._fruitless = True
            return
        for seq in seqs:
            ours = self._replica.chains.id_at(author, seq)
            if ours is None or ours[:HASH_BYTES] != hashes[seq]:
                search.high = seq
                break
            search.low = seq

    def _next_pull(self, theirs: Heads) -> Pull | None:
        chains = self._replica.chains
        proofs = [a for a in unproven(chains, theirs) if a not in self._proofs_asked]
        self._proofs_asked.update(proofs)
        ranges = sorted(missing(chains, theirs, self._given_up))[:MAX_AUTHORS]
        self._wanted = {author: (generation, first - 1) for author, generation, first, _ in ranges}
        if not ranges and not proofs:
            return None
        return Pull(self.number, tuple(ranges), tuple(sorted(proofs)))

    def _search(self, author: NodeId, high: int) -> None:
        if high > 0 and author not in self._searched:
            self._searched.add(author)
            self._searches.append(_Search(author, 0, high))


def lacking(docket: Docket, theirs: Heads) -> list[DecisionId]:
    """The decisions that a peer with these heads has and this replica could use."""
    return list(dict.fromkeys((*docket.lacks(theirs.tips), *docket.wanted)))


def missing(chains: Chains, theirs: Heads, but: Iterable[NodeId] = ()) -> Iterable[Range]:
    """The events that a peer with these heads has and this replica could use."""
    skipped = set(but)
    for author, (generation, seq, _) in theirs.heads.items():
        ours = chains.generation(author)
        if author in skipped or generation < ours:
            continue
        if generation > ours:
            limit = chains.state.membership.limit(author)
            if limit is None or limit > (generation, 0):
                yield author, generation, 1, seq
            continue
        limit, height = chains.state.limit(author), chains.height(author)
        last = seq if limit is None or limit[0] > generation else min(seq, limit[1])
        if last > height and not chains.is_full(author):
            yield author, generation, height + 1, last


def conflicting(replica: LogReplica, theirs: Heads) -> Iterable[NodeId]:
    """Authors of whom the peer holds another chain than this replica."""
    chains = replica.chains
    for author, (generation, seq, short) in theirs.heads.items():
        if generation == chains.generation(author) and seq <= chains.height(author):
            ours = chains.id_at(author, seq)
            if ours is not None and ours[:HASH_BYTES] != short:
                yield author


def unproven(chains: Chains, theirs: Heads) -> Iterable[NodeId]:
    """Authors of whom the peer has proof of a fork that is not known here."""
    for author, place in theirs.forks.items():
        known = chains.state.frozen.get(author)
        if place[0] == chains.generation(author) and (known is None or place <= known):
            yield author


def wants_something(replica: LogReplica, theirs: Heads) -> bool:
    """Whether an exchange with a peer of these heads would bring anything."""
    return (
        bool(replica.docket.lacks(theirs.tips))
        or any(unproven(replica.chains, theirs))
        or any(missing(replica.chains, theirs))
        or any(conflicting(replica, theirs))
    )


def heads_of(replica: LogReplica, number: int) -> Heads:
    """This replica's heads as a message.

    Of more authors than that takes: those who spoke last, and of the rest others with each number.
    """
    found = replica.chains.heads().items()
    heads = {author: (at, seq, full[:HASH_BYTES]) for author, (at, seq, full) in found}
    forks = {author: (at, last + 1) for author, (at, last) in replica.chains.state.frozen.items()}
    authors = list(heads)
    if len(authors) > MAX_AUTHORS:
        half = MAX_AUTHORS // 2
        silent = deque(authors[half:])
        silent.rotate(-half * number)
        authors = [*authors[:half], *list(silent)[:half]]
    some = {author: heads[author] for author in authors}
    return Heads(number, some, forks, replica.docket.tips[:MAX_TIPS])


def answer_probe(chains: Chains, probe: Probe) -> Probed:
    """The ids that were asked for; none of another generation than the one here."""
    is_here = probe.generation == chains.generation(probe.author)
    found = {seq: chains.id_at(probe.author, seq) for seq in probe.seqs if is_here}
    hashes = {seq: full[:HASH_BYTES] for seq, full in found.items() if full is not None}
    return Probed(probe.number, probe.author, hashes)
