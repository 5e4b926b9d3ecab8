"""How many bytes one intervention session holds on a shard, and the most that it may.

Knows numbers only: what is counted is `guard`'s business for tensors, `session`'s for the rest.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NoReturn

from mesh.errors import LimitReached

ENTRY_BYTES = 1024
"""What anything kept by name or number counts besides its contents: an empty tensor, too, has an
object in Python, one in torch, and its places in the tables of both."""


class MemoryMeter:
    """Counts for any thread: messages arrive on the event loop, tensors live on the compute thread
    and die wherever their last reference is dropped."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._held = 0
        self._lock = threading.Lock()
        # A tensor may die while the lock is held, on the very thread that holds it.
        self._dead: deque[int] = deque()

    @property
    def held_bytes(self) -> int:
        """What the session holds now."""
        with self._lock:
            return self._settle()

    def take(self, size: int) -> None:
        """Hold so much more. Raises LimitReached, and is then as before."""
        with self._lock:
            held = self._settle() if self._dead else self._held
            if held + size <= self.limit_bytes:
                self._held = held + size
                return
        self._refuse(held + size)

    def require(self, size: int) -> None:
        """Raise LimitReached when so much more could not be held."""
        # Asked before every operation. Without the lock it says too much rather than too little:
        # what died is taken off later.
        if self._held + size > self.limit_bytes and (held := self.held_bytes) + size > (
            self.limit_bytes
        ):
            self._refuse(held + size)

    def give(self, size: int) -> None:
        """Hold so much less. Never blocks and may be called from a finalizer."""
        self._dead.append(size)

    def _refuse(self, wanted: int) -> NoReturn:
        raise LimitReached(
            f"The job would hold {wanted} bytes on a shard, more than the {self.limit_bytes} that"
            " one job may (host.tap_memory_mb there).",
            fix="Read fewer points in one trace, use fewer or shorter prompts, or let go of graphs"
            " and caches of earlier traces.",
            param="tap_bytes",
        )

    def _settle(self) -> int:
        while self._dead:
            self._held -= self._dead.popleft()
        return self._held


class Tally:
    """One thing that a session holds, of which only the present size is known."""

    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter
        self._size = 0

    def set(self, size: int) -> None:
        """It holds `size` bytes now. Raises LimitReached, and is then as before."""
        if size > self._size:
            self._meter.take(size - self._size)
        else:
            self._meter.give(self._size - size)
        self._size = size

    def grow(self, size: int) -> None:
        """It holds `size` bytes more. Raises LimitReached, and is then as before."""
        self.set(self._size + size)
