"""Memory in whole pages that weights lie in: mapped files, and room for what is made of them.

Tensors keep the pages that they lie in alive, and nothing else has to. Pages can be made read-only:
whatever writes there afterwards, through whichever pointer, is ended with its process by SIGSEGV,
before anybody computes with what it wrote.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

PAGE_BYTES = mmap.PAGESIZE

NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""Of a mapping for which no memory is set aside. Python 3.11 and 3.12 do not name it."""


class Pages(mmap.mmap):
    """One mapping, private to this process."""

    @classmethod
    def of_file(cls, file: Path) -> Pages:
        """The file as it is; no write reaches it. Raises OSError, ValueError for an empty one."""
        with file.open("rb") as stream:
            # Not read-only from the start: torch would warn about every tensor. And no memory is
            # set aside for what nobody writes: Linux refuses that for files larger than it has.
            flags, prot = mmap.MAP_PRIVATE | NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            return cls(stream.fileno(), 0, flags=flags, prot=prot)

    @classmethod
    def empty(cls, size: int) -> Pages:
        """Zeros, which take memory as they are written."""
        return cls(-1, max(size, 1))

    @property
    def address(self) -> int:
        """Where it begins."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def forget(self) -> None:
        """Give the memory of a mapped file back; it is read again where somebody looks.

        Only for pages that nothing was written to.
        """
        self.madvise(mmap.MADV_DONTNEED)

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int) -> torch.Tensor:
        """The contiguous tensor at `offset` bytes; a copy where that suits no such element."""
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        if offset % dtype.itemsize:
            raw = torch.frombuffer(
                self, dtype=torch.uint8, count=count * dtype.itemsize, offset=offset
            )
            return raw.clone().view(dtype).view(shape)
        return torch.frombuffer(self, dtype=dtype, count=count, offset=offset).view(shape)


def set_writable(address: int, size: int, *, writable: bool) -> bool:
    """Allow or forbid writes to whole pages; whether that was done, which not all systems can."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    answer = _libc().mprotect(
        ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(protection)
    )
    return bool(answer == 0)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
