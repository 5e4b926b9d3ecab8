"""What the warm parent (`nursery`) does with its memory before it forks, so that its children share
the most of it, and it keeps mapped what they need alone.

Linux with glibc; elsewhere nothing is done. `settle` is only safe in a process with one thread.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_MADV_DONTNEED = 4
_PAGE_BYTES = 4096
_SMALL_BYTES, _SMALL_STEP = 512, 16
"""What Python's own allocator hands out; anything larger comes from malloc."""
_MOST_HOLES = 1 << 16
_HOLES = (*(1 << power for power in range(17, 9, -1)), 768, 528, 256, 128, 64, 24)
"""Bytes of what holes are filled with, largest first: the last is what malloc gives least."""


class _MallInfo(ctypes.Structure):
    """See mallinfo2(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def settle() -> None:
    """Give back what is free, so that what children allocate lies behind all that they share."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return
    unmap_files()
    libc.malloc_trim(0)
    _fill_small_holes()
    _fill_holes(libc)  # last: what is freed behind it is a hole again


def _fill_holes(libc: ctypes.CDLL) -> None:
    """A child that allocates into a hole between shared blocks copies the page around it: thousands
    of small holes are several MB in each child. What they hold now is never freed."""
    libc.mallinfo2.restype = _MallInfo
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    for size in _HOLES:
        found = libc.mallinfo2()
        end = int(libc.sbrk(0) or 0) - int(found.keepcost)  # behind it is nothing but room
        for _ in range((found.fordblks - found.keepcost) // size + 1):
            block = int(libc.malloc(size) or 0)
            if not 0 < block < end:
                libc.free(block)
                break


def _fill_small_holes() -> None:
    """The same for Python's objects: of each size until a page of them comes in one row, which is
    where no hole was left."""
    allocate = ctypes.pythonapi.PyObject_Malloc
    allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    for size in range(_SMALL_STEP, _SMALL_BYTES + 1, _SMALL_STEP):
        row, before = 0, 0
        for _ in range(_MOST_HOLES):
            block = int(allocate(size) or 0)
            row = row + size if block == before + size else 0
            before = block
            if row >= _PAGE_BYTES:
                break


def unmap_files() -> None:
    """Of libraries, the pages that only importing or loading needed: whoever touches one finds it
    where it is kept for all processes, the page cache. What was written to is no longer the file's,
    and stays. Takes milliseconds; safe beside other threads.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with Path("/proc/self/smaps").open(encoding="ascii", errors="replace") as lines:
        for start, end in [*_clean_files(lines)]:  # a hint: when refused, nothing is lost
            libc.madvise(start, end - start, _MADV_DONTNEED)


def _clean_files(lines: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Addresses of the private mappings of files that cannot be, and have not been, written to."""
    addresses = ""
    for line in lines:
        match line.split(None, 5):
            case [found, ("r--p" | "r-xp"), _, _, _, path] if path.startswith("/"):
                addresses = found
            case ["Anonymous:", kilobytes, _]:  # each mapping has one such line
                if addresses and kilobytes == "0":
                    start, _, end = addresses.partition("-")
                    yield int(start, 16), int(end, 16)
                addresses = ""
