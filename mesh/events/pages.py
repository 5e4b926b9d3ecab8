"""Rows out of a damaged SQLite file: its pages read one by one, without their index.

The format is SQLite's (sqlite.org/fileformat2.html, sections 1.6, 2.1 and 4.1). Gives whatever
looks like a row; whether it is one, the caller has to know from its content. Reading every page,
also old ones of the write-ahead log, is right only where rows never change once written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_MAGIC = b"SQLite format 3\0"
_LEAF = 13
_PAGE_BYTES = 4096
_WAL_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24
# Sizes of the integer and float serial types, by type.
_NUMBER_BYTES = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0)


def rows(path: Path) -> Iterator[list[bytes]]:
    """The raw columns of every row found in the file and its write-ahead log."""
    content = path.read_bytes()
    size = _PAGE_BYTES
    if content.startswith(_MAGIC):
        size = struct.unpack_from(">H", content, 16)[0]
        size = 65536 if size == 1 else size
    pages = {at // size + 1: content[at : at + size] for at in range(0, len(content), size or 1)}
    log = Path(f"{path}-wal")
    written = list(_frames(log.read_bytes(), size)) if log.exists() else []
    newest = {**pages, **dict(written)}
    for number, page in [*pages.items(), *written]:
        if len(page) == size and number > 1 and page[0] == _LEAF:
            yield from _leaf(page, newest)


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
