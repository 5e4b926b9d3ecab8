"""How this process's heap treats large blocks.

glibc takes each of some megabytes from the kernel and gives it back when it is freed, until the
first was freed: from then on such sizes come out of its heap. Where weights flow through buffers,
to give them back costs as much as the encryption at a gigabyte a second: the kernel clears pages
again for the next. Where memory has a limit, what was freed and cannot be used again is what costs.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES = 64 << 20
_LARGEST_BYTES = 8 << 20
_OWN_BYTES = 1 << 20


def keep_buffers() -> None:
    """Have what is freed used again, up to `_KEPT_BYTES`. Does nothing where libc is another."""
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)  # what one thread frees is the next one's
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)


def part_with_blocks() -> None:
    """Have blocks from `_OWN_BYTES` on go back to the kernel as they are freed, always. Does
    nothing where libc is another."""
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _OWN_BYTES)


def give_back() -> None:
    """Give the kernel what is kept and not in use. Takes milliseconds."""
    malloc_trim = getattr(_libc(), "malloc_trim", None)  # glibc has it, musl does not
    if malloc_trim is not None:
        malloc_trim(0)


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
