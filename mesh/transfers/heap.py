"""How this process's heap treats the buffers through which weights flow.

glibc takes each of a megabyte from the kernel and gives it back when it is let go of; the kernel
clears its pages again for the next. At a gigabyte a second that costs as much as the encryption.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES = 64 << 20
_LARGEST_BYTES = 8 << 20


def keep_buffers() -> None:
    """Have what is freed used again, up to `_KEPT_BYTES`. Does nothing where libc is another."""
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)  # what one thread frees is the next one's
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)


def give_back() -> None:
    """Give the kernel what is kept and not in use."""
    malloc_trim = getattr(_libc(), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
