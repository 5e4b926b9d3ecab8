"""The file a job leaves its result in: made and sealed by the parent, read when the job is dead.

Its size cannot change, which is the quota. The parent trusts nothing in it but the bounds.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import sys
import tempfile

_HEADER = struct.Struct("<4sBQ")
_MAGIC = b"HNR1"
MAX_TEXT_BYTES = 16 << 10
_F_ADD_SEALS = 1033
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4


def _memory_file(name: str) -> int:
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # unlinked from the start
        return os.dup(file.fileno())


def _seal(fd: int, seals: int) -> None:
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        fcntl.fcntl(fd, _F_ADD_SEALS, seals)


def result_file(quota_bytes: int) -> int:
    """An empty result file for up to `quota_bytes` of result. The caller closes it."""
    fd = _memory_file("job-result")
    os.ftruncate(fd, _HEADER.size + max(quota_bytes, MAX_TEXT_BYTES))
    _seal(fd, _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW)
    return fd


def write_result(area: mmap.mmap, *, finished: bool, body: bytes) -> None:
    """Leave a result or, unless `finished`, the text of what went wrong. Called in the job."""
    room = len(area) - _HEADER.size
    if not finished:
        body = body[:MAX_TEXT_BYTES]
    elif len(body) > room:
        finished = False
        body = (
            f"The result has {len(body)} bytes, {room} are allowed. Save less, or ask whoever runs"
            " this node to raise jobs.result_mb."
        ).encode()
    area[_HEADER.size : _HEADER.size + len(body)] = body
    area[: _HEADER.size] = _HEADER.pack(_MAGIC, finished, len(body))


def read_result(fd: int) -> tuple[bool, bytes] | None:
    """What a dead job left: (it finished, result or text), or None when it left nothing usable."""
    size = os.fstat(fd).st_size
    header = os.pread(fd, _HEADER.size, 0)
    if len(header) < _HEADER.size:
        return None
    magic, finished, length = _HEADER.unpack(header)
    room = size - _HEADER.size if finished else MAX_TEXT_BYTES
    if magic != _MAGIC or length > room:
        return None
    return bool(finished), os.pread(fd, length, _HEADER.size)
