"""Mending a damaged log: every event that is still whole goes into a new file.

The damaged file is kept beside it, under another name, and never written to. A crash at any moment
leaves either the old file or the finished new one in place.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from mesh.errors import BadEvent
from mesh.events import decision as decisions
from mesh.events import pages
from mesh.events.decision import DecisionId, SignedDecision
from mesh.events.migrations import migrate
from mesh.events.opening import (
    HEARTH,
    OWN_HEAD,
    RESTART,
    connect,
    decision_row,
    digest,
    event_row,
    note,
    put_note,
)
from mesh.events.types import GENESIS, Event, Place, decode
from mesh.types import NodeId

_SIDE_FILES = ("-wal", "-shm")
_EVENT_COLUMNS, _ORPHAN_COLUMNS, _DECISION_COLUMNS = 8, 5, 4


@dataclass(frozen=True, slots=True)
class Repaired:
    """What a repair kept: events in chains, valid ones whose predecessor is gone, and the file."""

    events: int
    orphans: int
    unreadable: int
    kept_at: Path


def finish_interrupted(path: Path) -> None:
    """Put a finished repair in place that a crash kept from its place."""
    if _done(path).exists():
        _swap(path)


def repair(path: Path, hearth_id: str) -> Repaired:
    """Replace the damaged file by one with every valid event. Raises OSError, sqlite3.Error."""
    draft = path.with_name(path.name + ".repairing")
    for leftover in (draft, *(Path(f"{draft}{end}") for end in _SIDE_FILES)):
        leftover.unlink(missing_ok=True)
    salvage = _Salvage(path, hearth_id)
    with closing(connect(draft)) as target:
        migrate(target)
        target.execute("BEGIN")
        kept, orphans = _write(target, salvage, hearth_id)
        target.execute("COMMIT")
        target.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        target.execute("PRAGMA journal_mode=DELETE")
    _sync(draft)
    draft.replace(_done(path))
    return Repaired(kept, orphans, salvage.unreadable, _swap(path))


class _Salvage:
    """What can still be read; `unreadable` counts rows and tables that could not."""

    def __init__(self, path: Path, hearth_id: str) -> None:
        self.unreadable = 0
        self.events: dict[tuple[NodeId, Place], Event] = {}
        self.decisions: dict[DecisionId, SignedDecision] = {}
        self.forks: list[tuple[object, ...]] = []
        self.own_head: bytes | None = None
        self.restart = False
        for columns in pages.rows(path):
            event, decision = _event(columns), _decision(columns)
            if event is not None and event.hearth_id == hearth_id:
                self.events.setdefault((event.author, event.place), event)
            if decision is not None and decision.hearth_id == hearth_id:
                self.decisions.setdefault(decision.id, decision)
        # Read-only also keeps SQLite from copying the write-ahead log into a damaged file.
        address = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, uri=True, isolation_level=None)) as source:
            self._read(source)

    def _read(self, source: sqlite3.Connection) -> None:
        try:
            self.own_head = note(source, OWN_HEAD)
            self.restart = bool(note(source, RESTART))
            self.forks = source.execute("SELECT * FROM forks").fetchall()
            for table, found in (("events", self.events), ("decisions", self.decisions)):
                query = f"SELECT count(*) FROM {table}"  # noqa: S608 - two names of ours
                (count,) = source.execute(query).fetchone()
                self.unreadable += max(0, (count or 0) - len(found))
        except sqlite3.DatabaseError:
            self.unreadable += 1


def _event(columns: list[bytes]) -> Event | None:
    """The event of a row of `events` or `orphans`; None for other rows and damaged ones."""
    if len(columns) not in (_EVENT_COLUMNS, _ORPHAN_COLUMNS):
        return None
    body, signature = columns[-2:]
    if len(columns) == _EVENT_COLUMNS and columns[5] != digest(body, signature):
        return None
    try:
        return decode(body, signature)
    except BadEvent:
        return None


def _decision(columns: list[bytes]) -> SignedDecision | None:
    """The decision of a row of `decisions`; None for other rows and damaged ones."""
    if len(columns) != _DECISION_COLUMNS or columns[1] != digest(*columns[2:]):
        return None
    try:
        return decisions.decode(*columns[2:])
    except BadEvent:
        return None


def _write(target: sqlite3.Connection, salvage: _Salvage, hearth_id: str) -> tuple[int, int]:
    put_note(target, HEARTH, hearth_id.encode())
    if salvage.own_head is not None:
        put_note(target, OWN_HEAD, salvage.own_head)
    if salvage.restart or salvage.unreadable:
        # How far this node had signed may not be known any more: it goes on in a new chain.
        put_note(target, RESTART, b"1")
    target.executemany("INSERT INTO forks VALUES (?, ?, ?, ?, ?, ?, ?)", salvage.forks)
    for decision in sorted(salvage.decisions.values(), key=lambda d: (d.depth, d.id)):
        target.execute("INSERT INTO decisions VALUES (?, ?, ?, ?)", decision_row(decision))
    newest = {author: generation for author, (generation, _) in sorted(salvage.events)}
    heads: dict[NodeId, tuple[int, bytes]] = {}
    kept = orphans = 0
    for (author, (generation, seq)), event in sorted(salvage.events.items()):
        if generation != newest[author]:
            continue  # replaced since; its page had not been used again
        height, head = heads.get(author, (0, GENESIS))
        if seq == height + 1 and event.prev == head:
            heads[author] = (seq, event.id)
            target.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)", event_row(event))
            kept += 1
        else:
            row = (author, generation, seq, event.body, event.signature)
            target.execute("INSERT INTO orphans VALUES (?, ?, ?, ?, ?)", row)
            orphans += 1
    return kept + len(salvage.decisions), orphans


def _done(path: Path) -> Path:
    return path.with_name(path.name + ".repaired")


def _swap(path: Path) -> Path:
    """Move the damaged file and its side files away and the repaired one in; safe to repeat."""
    aside = _free_name(path)
    # The old write-ahead log must be gone before the new file appears: SQLite would replay it.
    for end in _SIDE_FILES:
        with suppress(FileNotFoundError):
            Path(f"{path}{end}").replace(f"{aside}{end}")
    with suppress(FileNotFoundError):
        os.link(path, aside)
    _done(path).replace(path)
    return aside


def _free_name(path: Path) -> Path:
    for number in range(1, 10_000):
        name = path.with_name(f"{path.name}.damaged-{number}")
        if not name.exists() and not Path(f"{name}-wal").exists():
            return name
    raise FileExistsError(f"there are 10000 damaged logs beside {path}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
