"""The facts of the log in memory: every author's chain of ids, what waits, what forked, the state.

Decides on each event that is offered and never does I/O; whoever stores the events brackets the
offers with `begin` and `commit` or `rollback`, so that memory never says more than the disk.
Checks that cost nothing come before the signature.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from mesh.accounts import allowances
from mesh.accounts.ledger import Hold, Resource, ResourceLedger, of_peer
from mesh.clock import Clock
from mesh.errors import Busy
from mesh.events import apply as applying
from mesh.events.pending import PendingEvents
from mesh.events.rules import Membership, Verify
from mesh.events.state import State
from mesh.events.types import GENESIS, MAX_EVENT_BYTES, MAX_INT63, Event, EventId, Place
from mesh.events.verdict import EventVerdict
from mesh.types import NodeId

MAX_LAMPORT_LEAP = 1 << 20
"""How far ahead of everything known an event's lamport may be."""

_ID_BYTES = 32


@dataclass(slots=True)
class Chain:
    """The ids of one author's events in order, end to end, the last one's lamport, all sizes."""

    generation: int = 1
    ids: bytearray = field(default_factory=bytearray)
    lamport: int = 0
    size_bytes: int = 0

    def __len__(self) -> int:
        return len(self.ids) // _ID_BYTES

    def id_at(self, seq: int) -> EventId:
        """The id of event `seq`; of event 0 it is what the first names as its predecessor."""
        return EventId(bytes(self.ids[(seq - 1) * _ID_BYTES : seq * _ID_BYTES])) or GENESIS


@dataclass(frozen=True, slots=True)
class _Undo:
    """A chain as it was before a transaction."""

    chain: Chain
    height: int
    lamport: int
    size_bytes: int


@dataclass(slots=True)
class _Transaction:
    state: State
    lamport: int
    touched: dict[NodeId, _Undo] = field(default_factory=dict)
    accepted: list[Event] = field(default_factory=list)
    applied: int = 0
    ready: set[NodeId] = field(default_factory=set)
    conflicts: dict[NodeId, Event] = field(default_factory=dict)


class Chains:
    """One node's replica of the facts, without its storage.

    `accounts` say how much of each author is kept.
    """

    def __init__(
        self,
        hearth_id: str,
        membership: Membership,
        verify: Verify,
        clock: Clock,
        accounts: ResourceLedger | None = None,
    ) -> None:
        self.hearth_id = hearth_id
        self.accounts = ResourceLedger(clock, allowances.LOG) if accounts is None else accounts
        self.state = State(membership)
        self.lamport = 0
        self.pending = PendingEvents(clock, self.accounts)
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

    def generation(self, author: NodeId) -> int:
        """The generation of the author's chain here; 0 without any."""
        chain = self._chains.get(author)
        return 0 if chain is None else chain.generation

    def height(self, author: NodeId) -> int:
        """The author's last sequence number that is here and counts."""
        limit, chain = self.state.limit(author), self._chains.get(author)
        if chain is None:
            return 0
        if limit is None or limit[0] > chain.generation:
            return len(chain)
        return min(len(chain), limit[1]) if limit[0] == chain.generation else 0

    def last_for(self, reader: NodeId | None, author: NodeId) -> int:
        """The author's last sequence number that a reader gets: what counts, and of what it said
        itself all that is here."""
        return self.stored(author) if reader == author else self.height(author)

    def is_full(self, author: NodeId) -> bool:
        """Whether the author's next event was refused because nothing more of it is kept."""
        return self._full.get(author) == self.stored(author)

    def is_full_for(self, author: NodeId) -> bool:
        """Whether nothing more of this author would be kept, but in a new chain."""
        chain = self._chains.get(author)
        return chain is not None and not self._has_room(author, chain, MAX_EVENT_BYTES)

    def id_at(self, author: NodeId, seq: int) -> EventId | None:
        """The id of an event here; None when it is not."""
        chain = self._chains.get(author)
        return chain.id_at(seq) if chain is not None and 0 < seq <= len(chain) else None

    def heads(self) -> dict[NodeId, tuple[int, int, EventId]]:
        """Each author's last event that counts: generation, sequence number and id; who was heard
        of last comes first."""
        newest = sorted(self._chains, key=lambda author: self._chains[author].lamport, reverse=True)
        heights = {author: self.height(author) for author in newest}
        return {
            author: (self._chains[author].generation, height, self._chains[author].id_at(height))
            for author, height in heights.items()
            if height
        }

    def next_link(self, author: NodeId) -> tuple[int, int, EventId]:
        """Generation, sequence number and predecessor of the author's next event."""
        height = self.stored(author)
        return (
            max(1, self.generation(author)), height + 1, self.id_at(author, height) or GENESIS
        )  # fmt: skip

    def is_signed(self, event: Event) -> bool | None:
        """Whether its author signed it; None while nobody has let that one in."""
        return self._verify(event, self.state.membership)

    # Changing it.

    def begin(self) -> None:
        """Open a transaction; everything offered until `commit` can be taken back."""
        self._open = _Transaction(self.state, self.lamport)

    def rollback(self) -> None:
        """Forget everything since `begin`; held events that were used are not held again."""
        transaction = self._transaction()
        for author, undo in transaction.touched.items():
            chain = self._chains[author] = undo.chain
            del chain.ids[undo.height * _ID_BYTES :]
            chain.lamport, chain.size_bytes = undo.lamport, undo.size_bytes
            if not undo.height:
                del self._chains[author]
        self.state, self.lamport = transaction.state, transaction.lamport
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
    def replaced(self) -> list[NodeId]:
        """The authors whose chain began again in this transaction."""
        return [
            author
            for author, undo in self._transaction().touched.items()
            if undo.chain is not self._chains[author] and undo.height
        ]

    @property
    def conflicts(self) -> dict[NodeId, Event]:
        """For each author whose fork showed up in this transaction, the event that is not ours."""
        return self._transaction().conflicts

    def offer(
        self, event: Event, source: NodeId | None = None, until: float | None = None
    ) -> EventVerdict:
        """Judge one event and take it in if it is valid and next in its chain."""
        verdict = self._judge_chain(event)
        if verdict is None:
            verdict = self._take_in(event)
        elif verdict is EventVerdict.FORKED:
            verdict = self._judge_conflict(event)
        if verdict is EventVerdict.HELD:
            self.pending.hold(event, source, until)
        return verdict

    def settle(self) -> list[tuple[NodeId | None, EventVerdict]]:
        """Apply what was accepted, and offer again what waited for it: sources and verdicts."""
        verdicts: list[tuple[NodeId | None, EventVerdict]] = []
        self._flush()
        while ready := self._transaction().ready:
            self._transaction().ready = set()
            for author in ready:
                while waiting := list(self.pending.take(author, self.stored(author) + 1)):
                    results = [self.offer(h.event, h.source, h.until) for h in waiting]
                    verdicts += [(h.source, v) for h, v in zip(waiting, results, strict=True)]
                    if EventVerdict.ACCEPTED not in results:
                        break
            self._flush()
        return verdicts

    def follow(self, membership: Membership) -> None:
        """Members came, went or changed."""
        self._flush()
        self.state = applying.with_membership(self.state, membership)
        self._transaction().ready.update(self.pending.authors())

    def freeze(self, author: NodeId, forked_at: Place) -> None:
        """Let nothing count that the author signed from there on in that generation."""
        self._flush()
        generation, seq = forked_at
        if generation >= self.generation(author):
            self.state = applying.freeze(self.state, author, (generation, seq - 1))

    def judge_proof(self, first: Event, second: Event) -> EventVerdict:
        """Whether two events prove a fork that is not known yet: FORKED, KNOWN, HELD or bad."""
        if (first.author, first.place) != (second.author, second.place) or first.id == second.id:
            return EventVerdict.MALFORMED
        if {first.hearth_id, second.hearth_id} != {self.hearth_id}:
            return EventVerdict.FOREIGN
        frozen = self.state.frozen.get(first.author)
        if frozen is not None and frozen < first.place:
            return EventVerdict.KNOWN
        checks = [self.is_signed(first), self.is_signed(second)]
        if None in checks:
            return EventVerdict.HELD
        if not all(checks):
            return EventVerdict.FORGED
        has_begun_again = first.generation < self.generation(first.author)
        return EventVerdict.VOID if has_begun_again else EventVerdict.FORKED

    # How an event is judged.

    def _judge_chain(self, event: Event) -> EventVerdict | None:
        """All that can be said without the signature; None when it is next in its chain."""
        if event.hearth_id != self.hearth_id:
            return EventVerdict.FOREIGN
        chain = self._chains.get(event.author)
        if chain is not None and event.generation != chain.generation:
            if event.generation < chain.generation or event.seq > 1:
                return EventVerdict.VOID
            chain = None
        known = chain is not None and event.seq <= len(chain)
        if chain is not None and known and chain.id_at(event.seq) == event.id:
            return EventVerdict.KNOWN
        if self._is_beyond(event):
            return EventVerdict.VOID
        if event.lamport > min(self.lamport + MAX_LAMPORT_LEAP, MAX_INT63 - MAX_LAMPORT_LEAP):
            return EventVerdict.TOO_FAR
        return EventVerdict.FORKED if known else _judge_link(chain or Chain(), event)

    def _is_beyond(self, event: Event) -> bool:
        """Whether an event comes after its author was put out, or forked this chain."""
        cut = self.state.membership.limit(event.author)
        frozen = self.state.frozen.get(event.author, (0, 0))
        forked = frozen[0] == event.generation and event.seq > frozen[1]
        return forked or (cut is not None and event.place > cut)

    def _judge_conflict(self, event: Event) -> EventVerdict:
        signed = self.is_signed(event)
        if signed is None:
            return EventVerdict.VOID
        if not signed:
            return EventVerdict.FORGED
        known = self.conflicts.get(event.author)
        if known is None or event.seq < known.seq:
            self.conflicts[event.author] = event
        return EventVerdict.FORKED

    def _take_in(self, event: Event) -> EventVerdict:
        signed = self.is_signed(event)
        if not signed:
            return EventVerdict.HELD if signed is None else EventVerdict.FORGED
        transaction = self._transaction()
        before = self._chains.get(event.author) or Chain(event.generation)
        chain = before if before.generation == event.generation else Chain(event.generation)
        if not self._has_room(event.author, chain, len(event.body)):
            self._full[event.author] = len(chain)
            return EventVerdict.FULL
        if chain is not before or self.state.frozen.get(event.author, event.place) < (
            event.generation, 0
        ):  # fmt: skip
            self._flush()
            self.state = applying.begin_again(self.state, event.author)
        self._chains[event.author] = chain
        if event.author not in transaction.touched:
            undo = _Undo(before, len(before), before.lamport, before.size_bytes)
            transaction.touched[event.author] = undo
        transaction.accepted.append(event)
        chain.ids += event.id
        chain.lamport = event.lamport
        chain.size_bytes += len(event.body)
        self.lamport = max(self.lamport, event.lamport)
        return EventVerdict.ACCEPTED

    def _has_room(self, author: NodeId, chain: Chain, size_bytes: int) -> bool:
        """The same answer on every node, whatever came in which order: chains are equal."""
        principal, limit = of_peer(author), self.accounts.limit
        return len(chain) < limit(
            principal, Resource.EVENTS_STORED
        ) and chain.size_bytes + size_bytes <= limit(principal, Resource.EVENT_BYTES_STORED)

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

    def _flush(self) -> None:
        """Apply what was accepted and note whose waiting events that may help."""
        transaction = self._transaction()
        fresh = transaction.accepted[transaction.applied :]
        transaction.applied = len(transaction.accepted)
        if fresh:
            self.state = applying.apply(self.state, fresh)
            transaction.ready.update(event.author for event in fresh)

    def _transaction(self) -> _Transaction:
        assert self._open is not None, "begin() comes first"  # noqa: S101  (our own invariant)
        return self._open


def _judge_link(chain: Chain, event: Event) -> EventVerdict | None:
    """Whether an event that is not in the chain can be its next; None when it can."""
    if event.seq > len(chain) + 1:
        return EventVerdict.HELD
    if event.prev != chain.id_at(len(chain)):
        return EventVerdict.DIVERGED
    return EventVerdict.BROKEN if event.lamport <= chain.lamport else None
