"""The warmed parent's memory in huge pages, where the kernel makes them on request.

A fork copies, and a child's end takes down, one entry for each page: with small ones that is most
of what a job costs that does little. Knows addresses, and nothing of what is there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

_HUGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
"""linux/mman.h, since 6.1; it needs no setting of the system's."""


class HugePages:
    """Collapses the ordinary memory that this process has when it is made, a piece at a time."""

    def __init__(self) -> None:
        self._left = _pieces(_mappings())
        self._libc = ctypes.CDLL(None)

    def step(self) -> bool:
        """One piece, which takes a few milliseconds; whether there was one.

        What is left as it was (no memory there, none to be had, a kernel that cannot) works too.
        """
        for place in self._left:
            self._libc.madvise(
                ctypes.c_void_p(place), ctypes.c_size_t(_HUGE_BYTES), ctypes.c_int(_MADV_COLLAPSE)
            )
            return True
        return False


def _pieces(mappings: list[str]) -> Iterator[int]:
    """The addresses of whole huge pages in private writable memory that is no file's."""
    for line in mappings:
        span, rights, _, _, inode, *name = line.split(maxsplit=5)
        is_ordinary = rights[1] == "w" and rights[3] == "p" and inode == "0"
        if is_ordinary and not (name and name[0].startswith(("[stack", "[v"))):
            start, stop = (int(end, 16) for end in span.split("-"))
            first = -(-start // _HUGE_BYTES) * _HUGE_BYTES
            yield from range(first, stop - _HUGE_BYTES + 1, _HUGE_BYTES)


def _mappings() -> list[str]:
    """Lines of proc_pid_maps(5); none where there is no such file."""
    try:
        return Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
