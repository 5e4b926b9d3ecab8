"""Opening the log's file: tables, integrity, decisions, chains, and the state from its snapshot.

Synchronous SQLite, for a worker thread; runs once per start. Every body is hashed and every link
of every chain followed. Raises LogCorrupt for damage; mending it is `mesh.events.repair`.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgpack

from mesh.errors import BadEvent, BadValue, LogCorrupt
from mesh.events import apply as applying
from mesh.events import decision as decisions
from mesh.events import snapshot as snapshots
from mesh.events.chains import Chain
from mesh.events.decision import SignedDecision
from mesh.events.docket import Docket, Signed
from mesh.events.migrations import migrate
from mesh.events.rules import Rules
from mesh.events.state import State
from mesh.events.types import GENESIS, Event, Place, decode
from mesh.types import NodeId

HEARTH = "hearth"
OWN_HEAD = "own_head"
RESTART = "restart"
SNAPSHOT = "snapshot"

# Stored rows were decoded once: this bounds msgpack where the file is damaged.
_MAX_ELEMENTS = 1024
_FOLD_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Contents:
    """What the file holds, without the bodies of events. `snapshot_events` are those the snapshot
    covers; `restart` says that this node's own chain is to begin again."""

    docket: Docket
    chains: dict[NodeId, Chain]
    state: State
    events: int
    snapshot_events: int
    own_head: Place
    restart: bool
    orphans: dict[NodeId, dict[Place, Signed]] = field(default_factory=dict)


def digest(body: bytes, signature: bytes) -> bytes:
    """What a row's `digest` column must be."""
    return hashlib.blake2b(body + signature, digest_size=8).digest()


def event_row(event: Event) -> tuple[object, ...]:
    """An event as it is stored."""
    check = digest(event.body, event.signature)
    return (
        event.author, event.generation, event.seq, event.lamport, event.id, check, event.body,
        event.signature,
    )  # fmt: skip


def decision_row(decision: SignedDecision) -> tuple[object, ...]:
    """A decision as it is stored."""
    body, signature = decision.body, decision.signature
    return decision.id, digest(body, signature), body, signature


def place_note(place: Place) -> bytes:
    """A place as a note."""
    return b"%d:%d" % place


def connect(path: Path) -> sqlite3.Connection:
    """A connection with the settings every connection to the log has. Raises sqlite3.Error."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=10)
    try:
        for pragma in PRAGMAS:
            connection.execute(pragma)
    except BaseException:
        connection.close()
        raise
    return connection


PRAGMAS = (
    "PRAGMA journal_mode=WAL",
    # An acknowledged event survives a power cut, not only a crash of this process.
    "PRAGMA synchronous=FULL",
    "PRAGMA journal_size_limit=4194304",
)


def read(path: Path, hearth_id: str, rules: Rules) -> Contents:
    """Open, bring up to date, check everything and load. Raises LogCorrupt, SchemaTooNew, BadValue.

    BadValue: the file belongs to another hearth.
    """
    try:
        with closing(connect(path)) as connection:
            _check_pages(connection)
            migrate(connection)
            _check_hearth(connection, path, hearth_id)
            return _load(connection, Docket(hearth_id, rules), rules)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError) and not is_damage(error):
            raise
        raise _corrupt(str(error)) from error
    except UnicodeDecodeError as error:  # SQLite's own message shows what the bytes say now
        raise _corrupt(str(error)) from error


def is_damage(error: sqlite3.Error) -> bool:
    """Whether SQLite says that the file's bytes are wrong: also a table that is not as it was made,
    and text that is none, for which there is no code."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    is_otherwise = isinstance(error, sqlite3.OperationalError) and code == sqlite3.SQLITE_ERROR
    return is_otherwise or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def put_aside(path: Path) -> Path:
    """Move a file that is damaged away, for people to look at; where it is then."""
    return path.replace(path.with_suffix(".damaged"))


def note(connection: sqlite3.Connection, name: str) -> bytes | None:
    """A single stored value. Raises LogCorrupt."""
    row = connection.execute("SELECT value FROM notes WHERE name = ?", (name,)).fetchone()
    if row is not None and type(row[0]) is not bytes:
        raise _corrupt(f"the note {name!r} is no note")
    return None if row is None else row[0]


def own_head(connection: sqlite3.Connection) -> Place:
    """The last place in its own chain that this node knows it has signed. Raises LogCorrupt."""
    generation, _, seq = (note(connection, OWN_HEAD) or b"0:0").partition(b":")
    if not generation.isdigit() or not seq.isdigit():
        raise _corrupt("how far this node has signed cannot be read")
    return int(generation), int(seq)


def fork_row(row: Sequence[Any]) -> tuple[NodeId, Place] | None:
    """Where the author of a row of `forks` forked its chain; None when that is not what its two
    events show."""
    author, generation, seq, *signed = row
    try:
        first, second = decode(*signed[:2]), decode(*signed[2:])
    except (BadEvent, TypeError):
        return None
    shown = [(event.author, *event.place) for event in (first, second)]
    is_fork = shown == [(author, generation, seq)] * 2 and first.id != second.id
    return (first.author, first.place) if is_fork else None


def put_note(connection: sqlite3.Connection, name: str, value: bytes) -> None:
    """Store a single value."""
    connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, value))


def _check_hearth(connection: sqlite3.Connection, path: Path, hearth_id: str) -> None:
    known = note(connection, HEARTH)
    if known is None:
        put_note(connection, HEARTH, hearth_id.encode())
    elif known != hearth_id.encode():
        if any(each.hearth_id == hearth_id for each in _check_decisions(connection)):
            raise _corrupt("the name of its hearth is another than its decisions'")
        raise BadValue(
            f"The event log {path} belongs to another hearth.",
            fix="Use another state directory for this hearth.",
        )


def _load(connection: sqlite3.Connection, docket: Docket, rules: Rules) -> Contents:
    docket.load(_check_decisions(connection))
    chains, count = _check_chains(connection)
    state = State(docket.membership, frozen=dict(_check_forks(connection)))
    saved = note(connection, SNAPSHOT)
    if saved is not None:
        state = _of_chains(snapshots.load(saved, state, rules.version), chains)
    covered = sum(fold.seq for fold in state.authors.values())
    state = _catch_up(connection, state, chains)
    orphans: dict[NodeId, dict[Place, Signed]] = {}
    for author, generation, seq, body, signature in connection.execute("SELECT * FROM orphans"):
        orphans.setdefault(NodeId(author), {})[generation, seq] = (body, signature)
    head, restart = own_head(connection), bool(note(connection, RESTART))
    return Contents(docket, chains, state, count, covered, head, restart, orphans)


def _check_pages(connection: sqlite3.Connection) -> None:
    """SQLite's own look at its pages, and whether tables and indexes say the same: what an index
    does not find would be withheld from peers."""
    (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if verdict != "ok":
        raise _corrupt(verdict)


def _check_forks(connection: sqlite3.Connection) -> Iterator[tuple[NodeId, Place]]:
    """The authors that forked, with the last place of each that counts."""
    for row in connection.execute("SELECT * FROM forks"):
        if (found := fork_row(row)) is None:
            raise _corrupt("the proof of a fork is damaged")
        author, (generation, seq) = found
        yield author, (generation, seq - 1)


def _check_decisions(connection: sqlite3.Connection) -> Iterator[SignedDecision]:
    for event_id, stored_digest, body, signature in connection.execute(
        "SELECT * FROM decisions ORDER BY rowid"
    ):
        try:
            decision = decisions.decode(body, signature)
        except (BadEvent, TypeError) as error:
            raise _corrupt("a decision is damaged") from error
        if decision.id != event_id or digest(body, signature) != stored_digest:
            raise _corrupt("a decision is damaged")
        yield decision


def _check_chains(connection: sqlite3.Connection) -> tuple[dict[NodeId, Chain], int]:
    chains: dict[NodeId, Chain] = {}
    ends: dict[str, tuple[int, bytes]] = {}
    count = 0
    sha256, blake2b, unpack = hashlib.sha256, hashlib.blake2b, msgpack.unpackb  # 100,000 times each
    rows = connection.execute(
        "SELECT author, generation, seq, id, digest, body, signature FROM events ORDER BY rowid"
    )
    for author, generation, seq, event_id, stored, body, signature in rows:
        count += 1
        chain = chains.get(author)
        if chain is None:
            chain = chains[author] = Chain(generation)
            ends[author] = 0, GENESIS
        if (
            type(body) is not bytes
            or type(signature) is not bytes
            or sha256(body).digest() != event_id
            or blake2b(body + signature, digest_size=8).digest() != stored
        ):
            raise _corrupt(f"event {seq} of {author} is damaged")
        fields = unpack(body, max_array_len=_MAX_ELEMENTS, max_map_len=_MAX_ELEMENTS)
        length, previous = ends[author]
        length += 1
        if seq != length or generation != chain.generation:
            raise _corrupt(f"event {seq} of {author} is not where its chain ends")
        if fields[2:6] != [author, generation, length, previous]:
            raise _corrupt(f"event {seq} of {author} does not continue its chain")
        ends[author] = length, event_id
        chain.ids += event_id
        chain.lamport = fields[6]
        chain.size_bytes += len(body)
    return chains, count


def _of_chains(state: State, chains: Mapping[NodeId, Chain]) -> State:
    """Without what a chain said that has begun again since the snapshot: what of that is still news
    the new one says."""
    generations = {author: chain.generation for author, chain in chains.items()}
    authors = {
        author: fold
        for author, fold in state.authors.items()
        if generations.get(author) == fold.generation
    }
    return replace(state, authors=authors)


def _catch_up(connection: sqlite3.Connection, state: State, chains: Iterable[NodeId]) -> State:
    """The state with what was stored after the snapshot."""
    for author in chains:
        before = state.authors.get(author)
        covered = before.seq if before is not None else 0
        batch: list[Event] = []
        for event in chain_after(connection, author, covered):
            batch.append(event)
            if len(batch) >= _FOLD_AT_ONCE:
                state = applying.apply(state, batch)
                batch = []
        state = applying.apply(state, batch)
    return state


def chain_after(connection: sqlite3.Connection, author: NodeId, seq: int) -> Iterator[Event]:
    """An author's stored events behind a sequence number, in order."""
    rows = connection.execute(
        "SELECT body, signature FROM events WHERE author = ? AND seq > ? ORDER BY seq",
        (author, seq),
    )
    return (decode(body, signature) for body, signature in rows)


def _corrupt(what: str) -> LogCorrupt:
    return LogCorrupt(
        f"The event log is damaged: {what}.",
        fix="Stop the node and start it again: it repairs the log from what is whole.",
    )
