"""The log's file while the node runs: one connection writes, one reads, both through aiosqlite.

A write is one transaction and is on the disk when `write` returns. Knows nothing of what an event
means or whether it is valid.
"""

from __future__ import annotations

import asyncio
import heapq
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import aiosqlite

from mesh.errors import EventLogError, LogCorrupt, LogFull
from mesh.events import opening, repair
from mesh.events.opening import Contents, Signed
from mesh.events.rules import Rules
from mesh.events.types import Event, decode
from mesh.types import NodeId

MAX_PAGE_EVENTS = 512
MAX_PAGE_BYTES = 224 << 10
"""What one answer carries at most, so that it fits a control message with its framing."""

_EVENT_OVERHEAD_BYTES = 80
_CLOSE_TIMEOUT_S = 10.0

_CHAIN = (
    "SELECT lamport, body, signature FROM events WHERE author = ? AND seq BETWEEN ? AND ?"
    " ORDER BY seq LIMIT ?"
)

Range = tuple[NodeId, int, int]
"""An author and the first and last sequence number."""

Proof = tuple[Event, Event]
"""Two events by one author with one sequence number."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one transaction writes."""

    events: Sequence[Event] = ()
    proofs: Sequence[Proof] = ()
    adopted: Sequence[tuple[NodeId, int]] = ()
    """Orphans that have found their place in a chain."""
    notes: dict[str, bytes] = field(default_factory=dict)


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
            writer, reader = await _connect(path), await _connect(path)
        except (sqlite3.Error, OSError) as error:
            raise translate(error) from error
        return cls(writer, reader), contents, mended

    async def close(self) -> None:
        """Close both connections; the last one folds the write-ahead log into the file."""
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await self._reader.close()
            await self._writer.close()

    async def write(self, batch: Batch) -> None:
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

    async def event(self, author: NodeId, seq: int) -> Event | None:
        """One stored event."""
        events = await self.chain(author, seq, seq)
        return events[0] if events else None

    async def chain(self, author: NodeId, first: int, last: int) -> list[Event]:
        """An author's stored events of a range, in order; at most a page of them."""
        rows = await self._fetch(_CHAIN, (author, first, last, MAX_PAGE_EVENTS))
        return [decode(body, signature) for _, body, signature in rows]

    async def page(self, ranges: Sequence[Range], room_bytes: int) -> list[Signed]:
        """The first events of these ranges in canonical order, as many as a page takes.

        In canonical order whoever reads the page can check each event by those before it.
        """
        chains = []
        for author, first, last in ranges:
            rows = await self._fetch(_CHAIN, (author, first, last, MAX_PAGE_EVENTS))
            chains.append([(row[0], author, (row[1], row[2])) for row in rows])
        page: list[Signed] = []
        for _, _, row in heapq.merge(*chains, key=lambda entry: entry[:2]):
            room_bytes -= len(row[0]) + _EVENT_OVERHEAD_BYTES
            if page and (room_bytes < 0 or len(page) >= MAX_PAGE_EVENTS):
                break
            page.append(row)
        return page

    async def proofs(self, authors: Sequence[NodeId]) -> list[tuple[Signed, Signed]]:
        """The fork proofs of these authors, where there are any."""
        found = []
        for author in authors:
            query = (
                "SELECT first_body, first_signature, second_body, second_signature"
                " FROM forks WHERE author = ?"
            )
            for a, a_signature, b, b_signature in await self._fetch(query, (author,)):
                found.append(((a, a_signature), (b, b_signature)))
        return found

    async def _fetch(self, query: str, values: Sequence[object]) -> list[sqlite3.Row]:
        try:
            return list(await self._reader.execute_fetchall(query, values))
        except sqlite3.Error as error:
            raise translate(error) from error

    async def _write(self, batch: Batch) -> None:
        writer = self._writer
        if batch.events:
            await writer.executemany(
                "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", [_row(e) for e in batch.events]
            )
        for a, b in batch.proofs:
            await writer.execute(
                "INSERT OR REPLACE INTO forks VALUES (?, ?, ?, ?, ?, ?)",
                (a.author, a.seq, a.body, a.signature, b.body, b.signature),
            )
        if batch.adopted:
            await writer.executemany(
                "DELETE FROM orphans WHERE author = ? AND seq = ?", batch.adopted
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


def _row(event: Event) -> tuple[object, ...]:
    check = opening.digest(event.body, event.signature)
    return (
        event.author, event.seq, event.lamport, event.id, check, event.body, event.signature,
    )  # fmt: skip


def translate(error: sqlite3.Error | OSError) -> EventLogError:
    """What an error of SQLite or of the file system means for the log."""
    if isinstance(error, sqlite3.Error) and opening.is_damage(error):
        return LogCorrupt(
            f"The event log is damaged: {error}.",
            fix="Restart the node: it repairs the log from what is whole.",
        )
    return LogFull(
        f"The event log cannot be written: {error}.",
        fix="Free space on the disk, or make the state directory writable; nothing is lost, and"
        " writing goes on as soon as the disk takes it.",
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
    for pragma in opening.PRAGMAS:
        await connection.execute_fetchall(pragma)
    return connection
