"""A clock that moves when told to."""

from __future__ import annotations

from mesh.clock import SystemClock


class ManualClock(SystemClock):
    """Starts at an arbitrary moment, as monotonic clocks do."""

    def __init__(self) -> None:
        self.time = 1000.0

    def monotonic(self) -> float:
        return self.time
