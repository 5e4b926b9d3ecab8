"""How far a load has come: counted by the thread that loads, looked at by any other."""

from __future__ import annotations

Counted = tuple[str, int, int]
"""What is being done (``reading``, ``packing``, ``rounding``, or nothing yet), bytes of it done,
and in all."""


class Progress:
    """Of one load. `now` is replaced whole: whoever looks sees what belongs together."""

    def __init__(self) -> None:
        self.now: Counted = ("", 0, 0)

    def begin(self, phase: str, total_bytes: int) -> None:
        """From now on this is done."""
        self.now = (phase, 0, total_bytes)

    def add(self, count: int) -> None:
        """So many bytes more are done."""
        phase, done, total = self.now
        self.now = (phase, done + count, total)
