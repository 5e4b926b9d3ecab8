"""The log in memory: every author's chain of ids, what waits, what forked, and the state.

Decides on each event that is offered and never does I/O; whoever stores the events brackets the
offers with `begin` and `commit` or `rollback`, so that memory never says more than the disk.
Checks that cost nothing come before the signature.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

from mesh import allowances
from mesh.clock import Clock
from mesh.errors import Busy
from mesh.events import apply as applying
from mesh.events.pending import Pending
from mesh.events.rules import Rules, Verify
from mesh.events.state import State
from mesh.events.types import GENESIS, MAX_INT63, Event, EventId
from mesh.ledger import Hold, Resource, ResourceLedger, of_peer
from mesh.types import NodeId

MAX_LAMPORT_LEAP = 1 << 20
"""How far ahead of everything known an event's lamport may be."""

_ID_BYTES = 32


class Verdict(StrEnum):
    """What became of an offered event."""

    ACCEPTED = "accepted"
    KNOWN = "known"
    HELD = "held"
    """It waits for an earlier event of its chain or for its author's key."""
    VOID = "void"
    """It lies beyond where its author was cut or forked."""
    DIVERGED = "diverged"
    """It continues another chain than ours; looking for where they part will show a fork."""
    FORKED = "forked"
    """It is properly signed and differs from ours of the same author and sequence number."""
    FULL = "full"
    """Its author has signed as much as a hearth keeps of one."""
    LATER = "later"
    """Its author has signed too much within a minute; it is fetched again."""
    MALFORMED = "malformed"
    FOREIGN = "foreign"
    """It belongs to another hearth."""
    TOO_FAR = "too_far"
    BROKEN = "broken"
    """Its lamport does not grow along its chain."""
    FORGED = "forged"

    @property
    def is_bad(self) -> bool:
        """Whether no honest peer would have sent it."""
        return self in _BAD


_BAD = frozenset(
    {Verdict.MALFORMED, Verdict.FOREIGN, Verdict.TOO_FAR, Verdict.BROKEN, Verdict.FORGED}
)


@dataclass(slots=True)
class Chain:
    """The ids of one author's events in order, end to end, the last one's lamport, all sizes."""

    ids: bytearray = field(default_factory=bytearray)
    lamport: int = 0
    size_bytes: int = 0

    def __len__(self) -> int:
        return len(self.ids) // _ID_BYTES

    def id_at(self, seq: int) -> EventId:
        """The id of event `seq`; of event 0 it is what the first names as its predecessor."""
        return EventId(bytes(self.ids[(seq - 1) * _ID_BYTES : seq * _ID_BYTES])) or GENESIS


@dataclass(slots=True)
class _Transaction:
    state: State
    lamport: int
    touched: dict[NodeId, tuple[int, int, int]] = field(default_factory=dict)
    accepted: list[Event] = field(default_factory=list)
    applied: int = 0
    ready: set[NodeId] = field(default_factory=set)
    conflicts: dict[NodeId, Event] = field(default_factory=dict)


class Ledger:
    """One node's replica, without its storage. `accounts` say how much of each author is kept."""

    def __init__(
        self,
        hearth_id: str,
        rules: Rules,
        verify: Verify,
        clock: Clock,
        accounts: ResourceLedger | None = None,
    ) -> None:
        self.hearth_id = hearth_id
        self.accounts = ResourceLedger(clock, allowances.LOG) if accounts is None else accounts
        self.state = applying.empty(rules)
        self.lamport = 0
        self.pending = Pending(clock, self.accounts)
        self._rules = rules
        self._verify = verify
        self._chains: dict[NodeId, Chain] = {}
        self._open: _Transaction | None = None
        self._full: dict[NodeId, int] = {}
        self._stored: dict[NodeId, tuple[Hold, Hold]] = {}

    def restore(self, chains: Mapping[NodeId, Chain], state: State) -> None:
        """Start from what storage holds."""
        self._chains = dict(chains)
        self._count_stored(chains)
        self.lamport = max((chain.lamport for chain in chains.values()), default=0)
        self.state = state

    def close(self) -> None:
        """Nothing of this log is on anybody's account any more."""
        for holds in self._stored.values():
            for hold in holds:
                hold.close()
        self._stored.clear()
        self.pending.clear()

    # What others ask.

    def stored(self, author: NodeId) -> int:
        """The author's last sequence number here, whether it counts or not."""
        chain = self._chains.get(author)
        return 0 if chain is None else len(chain)

    def height(self, author: NodeId) -> int:
        """The author's last sequence number that is here and counts."""
        limit = self.state.limit(author)
        return self.stored(author) if limit is None else min(self.stored(author), limit)

    def is_full(self, author: NodeId) -> bool:
        """Whether the author's next event was refused because nothing more of it is kept."""
        return self._full.get(author) == self.stored(author)

    def id_at(self, author: NodeId, seq: int) -> EventId | None:
        """The id of an event here; None when it is not."""
        chain = self._chains.get(author)
        return chain.id_at(seq) if chain is not None and 0 < seq <= len(chain) else None

    def heads(self) -> dict[NodeId, tuple[int, EventId]]:
        """Each author's last event that counts: sequence number and id."""
        heights = {author: self.height(author) for author in self._chains}
        return {
            author: (height, self._chains[author].id_at(height))
            for author, height in heights.items()
            if height
        }

    def next_link(self, author: NodeId) -> tuple[int, EventId]:
        """Sequence number and predecessor of the author's next event."""
        height = self.stored(author)
        return height + 1, self.id_at(author, height) or GENESIS

    # Changing it.

    def begin(self) -> None:
        """Open a transaction; everything offered until `commit` can be taken back."""
        self._open = _Transaction(self.state, self.lamport)

    def rollback(self) -> None:
        """Forget everything since `begin`; held events that were used are not held again."""
        undo = self._transaction()
        for author, (height, lamport, size_bytes) in undo.touched.items():
            chain = self._chains[author]
            del chain.ids[height * _ID_BYTES :]
            chain.lamport, chain.size_bytes = lamport, size_bytes
            if not height:
                del self._chains[author]
        self.state, self.lamport = undo.state, undo.lamport
        self._open = None

    def commit(self) -> None:
        """Keep everything since `begin`."""
        self._count_stored(self._transaction().touched)
        self._open = None

    @property
    def state_at_begin(self) -> State:
        """The state before this transaction."""
        return self._transaction().state

    @property
    def accepted(self) -> list[Event]:
        """The events accepted in this transaction, in order."""
        return self._transaction().accepted

    @property
    def conflicts(self) -> dict[NodeId, Event]:
        """For each author whose fork showed up in this transaction, the event that is not ours."""
        return self._transaction().conflicts

    def offer(
        self, event: Event, source: NodeId | None = None, until: float | None = None
    ) -> Verdict:
        """Judge one event and take it in if it is valid and next in its chain."""
        verdict = self._judge_chain(event)
        if verdict is None:
            verdict = self._take_in(event)
        elif verdict is Verdict.FORKED:
            verdict = self._judge_conflict(event)
        if verdict is Verdict.HELD:
            self.pending.hold(event, source, until)
        return verdict

    def settle(self) -> list[tuple[NodeId | None, Verdict]]:
        """Apply what was accepted, and offer again what waited for it: sources and verdicts."""
        verdicts: list[tuple[NodeId | None, Verdict]] = []
        self._flush()
        while ready := self._transaction().ready:
            self._transaction().ready = set()
            for author in ready:
                while waiting := list(self.pending.take(author, self.stored(author) + 1)):
                    results = [self.offer(h.event, h.source, h.until) for h in waiting]
                    verdicts += [(h.source, v) for h, v in zip(waiting, results, strict=True)]
                    if Verdict.ACCEPTED not in results:
                        break
            self._flush()
        return verdicts

    def freeze(self, author: NodeId, seq: int) -> None:
        """Let nothing count that the author signed from `seq` on."""
        self._flush()
        self.state = applying.freeze(self._rules, self.state, author, seq - 1)

    def judge_proof(self, first: Event, second: Event) -> Verdict:
        """Whether two events prove a fork that is not known yet: FORKED, KNOWN, HELD or bad."""
        if (first.author, first.seq) != (second.author, second.seq) or first.id == second.id:
            return Verdict.MALFORMED
        if {first.hearth_id, second.hearth_id} != {self.hearth_id}:
            return Verdict.FOREIGN
        frozen = self.state.frozen.get(first.author)
        if frozen is not None and frozen < first.seq:
            return Verdict.KNOWN
        checks = [self._is_signed(first), self._is_signed(second)]
        if None in checks:
            return Verdict.HELD
        return Verdict.FORKED if all(checks) else Verdict.FORGED

    def refold(self, author: NodeId, chain: Iterable[Event]) -> None:
        """Fold a stale author's chain, as stored, again."""
        self.state = applying.refold(self.state, author, chain)

    # How an event is judged.

    def _judge_chain(self, event: Event) -> Verdict | None:
        """All that can be said without the signature; None when it is next in its chain."""
        if event.hearth_id != self.hearth_id:
            return Verdict.FOREIGN
        chain = self._chains.get(event.author)
        known = chain is not None and event.seq <= len(chain)
        if chain is not None and known and chain.id_at(event.seq) == event.id:
            return Verdict.KNOWN
        limit = self.state.limit(event.author)
        if limit is not None and event.seq > limit:
            return Verdict.VOID
        if event.lamport > min(self.lamport + MAX_LAMPORT_LEAP, MAX_INT63 - MAX_LAMPORT_LEAP):
            return Verdict.TOO_FAR
        return Verdict.FORKED if known else _judge_link(chain or Chain(), event)

    def _judge_conflict(self, event: Event) -> Verdict:
        signed = self._is_signed(event)
        if signed is None:
            return Verdict.VOID
        if not signed:
            return Verdict.FORGED
        known = self.conflicts.get(event.author)
        if known is None or event.seq < known.seq:
            self.conflicts[event.author] = event
        return Verdict.FORKED

    def _take_in(self, event: Event) -> Verdict:
        signed = self._is_signed(event)
        if not signed:
            return Verdict.HELD if signed is None else Verdict.FORGED
        transaction = self._transaction()
        chain = self._chains.get(event.author) or Chain()
        if not self._has_room(event, chain):
            self._full[event.author] = len(chain)
            return Verdict.FULL
        self._chains[event.author] = chain
        transaction.touched.setdefault(event.author, (len(chain), chain.lamport, chain.size_bytes))
        transaction.accepted.append(event)
        chain.ids += event.id
        chain.lamport = event.lamport
        chain.size_bytes += len(event.body)
        self.lamport = max(self.lamport, event.lamport)
        return Verdict.ACCEPTED

    def _has_room(self, event: Event, chain: Chain) -> bool:
        """The same answer on every node, whatever came in which order: chains are equal."""
        author, limit = of_peer(event.author), self.accounts.limit
        return event.seq <= limit(author, Resource.EVENTS_STORED) and chain.size_bytes + len(
            event.body
        ) <= limit(author, Resource.EVENT_BYTES_STORED)

    def _count_stored(self, authors: Iterable[NodeId]) -> None:
        for author in authors:
            with suppress(Busy):  # more authors than accounts: they are bounded all the same
                holds = self._stored.get(author) or self._holds(author)
                chain = self._chains[author]
                holds[0].charge(len(chain) - holds[0].size)
                holds[1].charge(chain.size_bytes - holds[1].size)

    def _holds(self, author: NodeId) -> tuple[Hold, Hold]:
        principal = of_peer(author)
        holds = self._stored[author] = (
            self.accounts.hold(principal, Resource.EVENTS_STORED),
            self.accounts.hold(principal, Resource.EVENT_BYTES_STORED),
        )
        return holds

    def _is_signed(self, event: Event) -> bool | None:
        signed = self._verify(event, self.state.membership)
        if signed is None and self._flush():
            # The event that introduces its author may have come just before it.
            signed = self._verify(event, self.state.membership)
        return signed

    def _flush(self) -> bool:
        """Apply what was accepted and note whose waiting events that may help; False if nothing."""
        transaction = self._transaction()
        fresh = transaction.accepted[transaction.applied :]
        if not fresh:
            return False
        transaction.applied = len(transaction.accepted)
        before = self.state.membership
        self.state = applying.apply(self._rules, self.state, fresh)
        introduced = self.state.membership is not before
        transaction.ready.update(
            self.pending.authors() if introduced else (event.author for event in fresh)
        )
        return True

    def _transaction(self) -> _Transaction:
        assert self._open is not None, "begin() comes first"  # noqa: S101  (our own invariant)
        return self._open


def _judge_link(chain: Chain, event: Event) -> Verdict | None:
    """Whether an event that is not in the chain can be its next; None when it can."""
    if event.seq > len(chain) + 1:
        return Verdict.HELD
    if event.prev != chain.id_at(len(chain)):
        return Verdict.DIVERGED
    return Verdict.BROKEN if event.lamport <= chain.lamport else None
