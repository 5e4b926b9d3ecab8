"""What the warm parent does to its memory: no holes are left, and libraries still work."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")

SCRIPT = """
import ctypes, hashlib, json, os, re, ssl, sqlite3, sys, tempfile
from pathlib import Path
from mesh.processes.shared_pages import settle

class Info(ctypes.Structure):
    _fields_ = [(str(number), ctypes.c_size_t) for number in range(8)] + [
        ("free", ctypes.c_size_t), ("top", ctypes.c_size_t)]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info

def small_holes():
    '''Bytes that Python's own allocator has free in what it handed out in part.'''
    with tempfile.TemporaryFile() as file:
        own = os.dup(2)
        os.dup2(file.fileno(), 2)
        sys._debugmallocstats()
        os.dup2(own, 2)
        file.seek(0)
        said = re.search(rb"bytes in available blocks *= *([0-9,]+)", file.read())
    return int(said[1].replace(b",", b""))

def seen():
    rows = (row.split() for row in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    kb = {row[0]: int(row[1]) for row in rows}
    info = libc.mallinfo2()
    return {"holes": info.free - info.top, "small": small_holes(),
        "file_kb": kb["Rss:"] - kb["Anonymous:"]}

blocks = [bytes(1000) for _ in range(20_000)]
small = [(number, str(number)) for number in range(20_000)]
del blocks[::2], small[::2]
before = seen()
settle()
after = seen()
context = ssl.create_default_context()
worked = hashlib.sha256(b"").hexdigest()[:4] + sqlite3.connect(":memory:").execute(
    "select 'all' || count(*) from sqlite_master").fetchone()[0]
print(json.dumps([before, after, worked, all(block == bytes(1000) for block in blocks)]))
"""


def test_no_holes_are_left_nor_pages_of_files_that_only_importing_needed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True
    )
    before, after, worked, kept = json.loads(done.stdout)
    assert before["holes"] > 5_000_000
    assert after["holes"] < 200_000
    assert before["small"] > 1_000_000
    assert after["small"] < 500_000  # what is left of pools that were begun
    assert after["file_kb"] < before["file_kb"] / 2
    assert (worked, kept) == ("e3b0all0", True)
