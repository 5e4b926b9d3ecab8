"""Mending a damaged log: every event that is still whole goes into a new file.

The damaged file is kept beside it, under another name, and never written to. A crash at any moment
leaves the old file in place or the finished new one, which the next start puts there.

The damaged file's pages are read one by one, without their index. The format is SQLite's
(sqlite.org/fileformat2.html, sections 1.6, 2.1 and 4.1). Whatever looks like a row is taken;
whether it is one is known from its content. Reading every page, also old ones of the write-ahead
log, is right only where rows never change once written.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from mesh.errors import BadEvent, LogCorrupt
from mesh.events import decision as decisions
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
    fork_row,
    note,
    own_head,
    place_note,
    put_note,
)
from mesh.events.types import GENESIS, MAX_EVENT_BYTES, Event, Place, decode
from mesh.private_files import sync
from mesh.types import NodeId

_MAGIC = b"SQLite format 3\0"
_LEAF = 13
_PAGE_BYTES = 4096
_WAL_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24
_MAX_ROW_BYTES = MAX_EVENT_BYTES + 4096
# Sizes of the integer and float serial types, by type.
_NUMBER_BYTES = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0)


def rows(path: Path) -> Iterator[list[bytes]]:
    """The raw columns of every row found in the file and its write-ahead log."""
    content = path.read_bytes()
    size = _page_bytes(content)
    pages = {at // size + 1: content[at : at + size] for at in range(0, len(content), size)}
    log = Path(f"{path}-wal")
    written = list(_frames(log.read_bytes(), size)) if log.exists() else []
    newest = {**pages, **dict(written)}
    for number, page in [*pages.items(), *written]:
        if len(page) == size and number > 1 and page[0] == _LEAF:
            yield from _leaf(page, newest)


def _page_bytes(content: bytes) -> int:
    """As the header says, if it is whole; else what SQLite chooses."""
    said = int.from_bytes(content[16:18], "big") if content.startswith(_MAGIC) else 0
    size = 65536 if said == 1 else said
    return size if size >= 512 and size.bit_count() == 1 else _PAGE_BYTES


def _frames(log: bytes, size: int) -> Iterator[tuple[int, bytes]]:
    step = _FRAME_HEADER_BYTES + size
    for at in range(_WAL_HEADER_BYTES, len(log) - step + 1, step):
        (number,) = struct.unpack_from(">I", log, at)
        yield number, log[at + _FRAME_HEADER_BYTES : at + step]


def _leaf(page: bytes, pages: dict[int, bytes]) -> Iterator[list[bytes]]:
    (cells,) = struct.unpack_from(">H", page, 3)
    for at in range(8, min(8 + 2 * cells, len(page) - 1), 2):
        (start,) = struct.unpack_from(">H", page, at)
        try:
            yield _record(_payload(page, start, pages))
        except (IndexError, KeyError, struct.error):
            continue  # what these bytes were once, nobody can say


def _payload(page: bytes, at: int, pages: dict[int, bytes]) -> bytes:
    """A cell's content, with the overflow pages it continues on."""
    total, at = _varint(page, at)
    if total > _MAX_ROW_BYTES:
        raise IndexError("the row is larger than any of ours")
    _, at = _varint(page, at)
    usable = len(page)
    local = total
    if total > usable - 35:
        least = (usable - 12) * 32 // 255 - 23
        local = least + (total - least) % (usable - 4)
        local = local if local <= usable - 35 else least
    content = bytearray(page[at : at + local])
    following = at + local
    if total > local:
        (number,) = struct.unpack_from(">I", page, following)
        while len(content) < total and number:
            more = pages[number]
            content += more[4 : 4 + total - len(content)]
            (number,) = struct.unpack_from(">I", more, 0)
    return bytes(content)


def _record(payload: bytes) -> list[bytes]:
    end, at = _varint(payload, 0)
    data = end
    columns = []
    while at < end:
        kind, at = _varint(payload, at)
        size = _NUMBER_BYTES[kind] if kind < 12 else (kind - 12) // 2
        columns.append(payload[data : data + size])
        data += size
    if data > len(payload):
        raise IndexError("the row ends before its last column")
    return columns


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for offset in range(8):
        byte = data[at + offset]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + offset + 1
    return value << 8 | data[at + 8], at + 9


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
    sync(draft)
    draft.replace(_done(path))
    return Repaired(kept, orphans, salvage.unreadable, _swap(path))


class _Salvage:
    """What can still be read; `unreadable` counts rows and tables that could not."""

    def __init__(self, path: Path, hearth_id: str) -> None:
        self.unreadable = 0
        self.events: dict[tuple[NodeId, Place], Event] = {}
        self.decisions: dict[DecisionId, SignedDecision] = {}
        self.forks: list[tuple[object, ...]] = []
        self.own_head: Place = (0, 0)
        self.restart = False
        for columns in rows(path):
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
            for row in source.execute("SELECT * FROM forks"):
                if fork_row(row) is None:
                    self.unreadable += 1
                else:
                    self.forks.append(row)
            for table, found in (("events", self.events), ("decisions", self.decisions)):
                query = f"SELECT count(*) FROM {table}"  # noqa: S608 - two names of ours
                (count,) = source.execute(query).fetchone()
                self.unreadable += max(0, (count or 0) - len(found))
            self.restart = bool(note(source, RESTART))
            self.own_head = own_head(source)
        except (sqlite3.DatabaseError, UnicodeDecodeError, LogCorrupt):
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
    put_note(target, OWN_HEAD, place_note(salvage.own_head))
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
    with suppress(FileNotFoundError):  # links, with which no moment is without it, FAT has not
        path.replace(aside)
    _done(path).replace(path)
    return aside


def _free_name(path: Path) -> Path:
    for number in range(1, 10_000):
        name = path.with_name(f"{path.name}.damaged-{number}")
        if not name.exists() and not Path(f"{name}-wal").exists():
            return name
    raise FileExistsError(f"there are 10000 damaged logs beside {path}")
