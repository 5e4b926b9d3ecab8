"""The log's file while the node runs: one connection writes, one reads, both through aiosqlite.

A write is one transaction and is on the disk when `write` returns. Knows nothing of what an event
means or whether it is valid.
"""

from __future__ import annotations

import asyncio
import heapq
import sqlite3
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Self

import aiosqlite

from mesh.errors import EventLogError, LogCorrupt, LogFull
from mesh.events import opening, repair
from mesh.events.decision import SignedDecision
from mesh.events.docket import Signed
from mesh.events.opening import Contents
from mesh.events.rules import Rules
from mesh.events.types import Event, Order, Place, decode
from mesh.private_files import mending
from mesh.types import NodeId

MAX_PAGE_EVENTS = 512
MAX_PAGE_BYTES = 224 << 10
"""What one answer carries at most, so that it fits a control message with its framing."""

PROOF_OVERHEAD_BYTES = 256
"""What one proof takes in a page beside its two bodies."""

RECORD_OVERHEAD_BYTES = 80
"""What one event or decision takes in a page beside its body."""

_CLOSE_TIMEOUT_S = 10.0

_CHAIN = (
    "SELECT lamport, body, signature FROM events"
    " WHERE author = ? AND generation = ? AND seq BETWEEN ? AND ? ORDER BY seq LIMIT ?"
)

_SIZES = (
    "SELECT lamport, LENGTH(body) FROM events"
    " WHERE author = ? AND generation = ? AND seq BETWEEN ? AND ? ORDER BY seq LIMIT ?"
)
_AUTHORS = (
    "WITH RECURSIVE each(author) AS (SELECT MIN(author) FROM events UNION ALL SELECT"
    " (SELECT MIN(author) FROM events WHERE author > each.author) FROM each"
    " WHERE author IS NOT NULL) SELECT author FROM each WHERE author IS NOT NULL"
)
"""By the index, a look for each: all events would be read for what SELECT DISTINCT says."""
_NEWEST = (
    "SELECT lamport, author, seq, body, signature FROM events"
    " WHERE author = ?1 AND (lamport, author, seq) < (?2, ?3, ?4)"
    " ORDER BY generation DESC, seq DESC LIMIT ?5"
)
"""In the order of the chain, which is that of its lamports, so that no more is read than given."""
_PROOF = (
    "SELECT first_body, first_signature, second_body, second_signature FROM forks WHERE author = ?"
)

Range = tuple[NodeId, int, int, int]
"""An author, a generation, and the first and last sequence number."""

Proof = tuple[Event, Event]
"""Two events by one author with one sequence number."""


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """What one transaction writes."""

    events: Sequence[Event] = ()
    decisions: Sequence[SignedDecision] = ()
    proofs: Sequence[Proof] = ()
    adopted: Sequence[tuple[NodeId, Place]] = ()
    """Orphans that have found their place in a chain."""
    replaced: Sequence[tuple[NodeId, int]] = ()
    """Authors whose chain began again, with its generation: what was before goes."""
    notes: dict[str, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class _Unread:
    """What is left of one range: `rows` (lamport, size) were read ahead, `first` comes next."""

    author: NodeId
    generation: int
    first: int
    last: int
    taken: int = 0
    rows: deque[tuple[int, int]] = field(default_factory=deque)


class Store:
    """Owns the file. Use `open`, then `close`."""

    def __init__(self, writer: aiosqlite.Connection, reader: aiosqlite.Connection) -> None:
        self._writer = writer
        self._reader = reader

    @classmethod
    async def open(
        cls, path: Path, hearth_id: str, rules: Rules
    ) -> tuple[Self, Contents, repair.Repaired | None]:
        """Open or create the file, mend it if it is damaged, and read what it holds.

        Raises SchemaTooNew, BadValue (another hearth's file), LogFull when the disk is full or
        read-only, LogCorrupt when a repair fails.
        """
        try:
            contents, mended = await asyncio.to_thread(_read, path, hearth_id, rules)
            writer = await _connect(path)
            try:
                reader = await _connect(path)
            except BaseException:
                await writer.close()
                raise
        except (sqlite3.Error, OSError) as error:
            raise translate(error) from error
        return cls(writer, reader), contents, mended

    async def close(self) -> None:
        """Close both connections; the last one folds the write-ahead log into the file."""
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await self._reader.close()
            await self._writer.close()

    async def write(self, batch: WriteBatch) -> None:
        """Write everything or nothing, durably. Raises LogFull, LogCorrupt.

        Not for two tasks at a time.
        """
        try:
            await self._writer.execute("BEGIN IMMEDIATE")
            await self._write(batch)
            await self._writer.commit()
        except sqlite3.Error as error:
            await self._rollback()
            raise translate(error) from error

    async def compact(self) -> None:
        """Fold the write-ahead log into the file and cut it. Raises LogFull, LogCorrupt.

        Drops no event; `docs/decisions/compaction.md` says why.
        """
        try:
            await self._writer.execute_fetchall("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            raise translate(error) from error

    async def chain(self, where: Range) -> list[Event]:
        """An author's stored events of a range, in order; at most a page of them."""
        rows = await self._fetch(_CHAIN, (*where, MAX_PAGE_EVENTS))
        return [decode(body, signature) for _, body, signature in rows]

    async def newest(self, before: Order, count: int, author: NodeId | None) -> list[Event]:
        """Up to `count` stored events before that place, latest first; of one author, or of all."""
        authors = [(author,)] if author is not None else await self._fetch(_AUTHORS, ())
        found: list[sqlite3.Row] = []
        for (each,) in authors:
            found += await self._fetch(_NEWEST, (each, *before, count))
        found.sort(key=itemgetter(0, 1, 2), reverse=True)
        return [decode(body, signature) for *_, body, signature in found[:count]]

    async def page(self, ranges: Sequence[Range], room_bytes: int) -> list[Signed]:
        """The first events of these ranges in canonical order, as many as a page takes.

        In canonical order whoever reads the page can check each event by those before it. Reads no
        body that it does not give. Authors must be distinct.
        """
        page: list[tuple[int, NodeId, Signed]] = []
        for (author, generation, first, _), count in await self._fitting(ranges, room_bytes):
            where = (author, generation, first, first + count - 1, count)
            rows = await self._fetch(_CHAIN, where)
            page += [(lamport, author, (body, signature)) for lamport, body, signature in rows]
        page.sort(key=itemgetter(0, 1))
        return [signed for _, _, signed in page]

    async def proofs(
        self, authors: Sequence[NodeId], room_bytes: int
    ) -> list[tuple[Signed, Signed]]:
        """The fork proofs of these authors, where there are any, as many as fit."""
        found: list[tuple[Signed, Signed]] = []
        for author in authors:
            for a, a_signature, b, b_signature in await self._fetch(_PROOF, (author,)):
                room_bytes -= len(a) + len(b) + PROOF_OVERHEAD_BYTES
                if room_bytes < 0:
                    return found
                found.append(((a, a_signature), (b, b_signature)))
        return found

    async def _fitting(self, ranges: Sequence[Range], room_bytes: int) -> list[tuple[Range, int]]:
        """How many events of each range come first and fit one page, read from sizes alone."""
        ahead = max(4, MAX_PAGE_EVENTS // max(1, len(ranges)))
        unread = [_Unread(*whole) for whole in ranges]
        heap: list[tuple[int, NodeId, int, _Unread]] = []

        async def push(chain: _Unread) -> None:
            if not chain.rows and chain.first <= chain.last:
                where = (chain.author, chain.generation, chain.first, chain.last, ahead)
                rows = await self._fetch(_SIZES, where)
                chain.rows.extend((lamport, size) for lamport, size in rows)
                chain.first += ahead
            if chain.rows:
                lamport, size = chain.rows.popleft()
                heapq.heappush(heap, (lamport, chain.author, size, chain))

        for chain in unread:
            await push(chain)
        taken = 0
        while heap and taken < MAX_PAGE_EVENTS:
            _, _, size, chain = heapq.heappop(heap)
            room_bytes -= size + RECORD_OVERHEAD_BYTES
            if taken and room_bytes < 0:
                break
            chain.taken += 1
            taken += 1
            await push(chain)
        return [
            (whole, chain.taken) for whole, chain in zip(ranges, unread, strict=True) if chain.taken
        ]

    async def _fetch(self, query: str, values: Sequence[object]) -> list[sqlite3.Row]:
        try:
            return list(await self._reader.execute_fetchall(query, values))
        except sqlite3.Error as error:
            raise translate(error) from error

    async def _write(self, batch: WriteBatch) -> None:
        writer = self._writer
        if batch.decisions:
            await writer.executemany(
                "INSERT OR REPLACE INTO decisions VALUES (?, ?, ?, ?)",
                [opening.decision_row(decision) for decision in batch.decisions],
            )
        if batch.events:
            await writer.executemany(
                "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [opening.event_row(event) for event in batch.events],
            )
        for a, b in batch.proofs:
            await writer.execute(
                "INSERT OR REPLACE INTO forks VALUES (?, ?, ?, ?, ?, ?, ?)",
                (a.author, *a.place, a.body, a.signature, b.body, b.signature),
            )
        for author, generation in batch.replaced:
            for table in ("events", "forks"):
                await writer.execute(
                    f"DELETE FROM {table} WHERE author = ? AND generation < ?",  # noqa: S608 - two names of ours
                    (author, generation),
                )
        if batch.adopted:
            await writer.executemany(
                "DELETE FROM orphans WHERE author = ? AND generation = ? AND seq = ?",
                [(author, *place) for author, place in batch.adopted],
            )
        for name, value in batch.notes.items():
            await writer.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, value))

    async def _rollback(self) -> None:
        # After a full disk SQLite has often rolled back by itself.
        if self._writer.in_transaction:
            try:
                await self._writer.rollback()
            except sqlite3.Error as error:
                raise translate(error) from error


def translate(error: sqlite3.Error | OSError) -> EventLogError:
    """What an error of SQLite or of the file system means for the log."""
    if isinstance(error, sqlite3.Error) and opening.is_damage(error):
        return LogCorrupt(
            f"The event log is damaged: {error}.",
            fix="Restart the node: it repairs the log from what is whole.",
        )
    return LogFull(
        f"The event log cannot be written: {error}.",
        fix=mending(
            error,
            "Free space on the disk, or make the state directory writable; nothing is lost, and"
            " writing goes on as soon as the disk takes it.",
        ),
    )


def _read(path: Path, hearth_id: str, rules: Rules) -> tuple[Contents, repair.Repaired | None]:
    repair.finish_interrupted(path)
    path.touch(mode=0o600)
    try:
        return opening.read(path, hearth_id, rules), None
    except LogCorrupt:
        mended = repair.repair(path, hearth_id)
    return opening.read(path, hearth_id, rules), mended


async def _connect(path: Path) -> aiosqlite.Connection:
    connection = await aiosqlite.connect(path, isolation_level=None, timeout=10)
    try:
        for pragma in opening.PRAGMAS:
            await connection.execute_fetchall(pragma)
    except BaseException:
        await connection.close()
        raise
    return connection
