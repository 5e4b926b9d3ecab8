"""Keeps what happened in a run and what should never have: the trace and the broken promises."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable

from mesh.types import LayerRange


class Ledger:
    """One run's record. `now` reads the virtual clock."""

    def __init__(self, *, keep_lines: bool = False) -> None:
        self.now: Callable[[], float] = lambda: 0.0
        self.broken: list[str] = []
        self.lines: list[str] = []
        self.computed: dict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
        self._keep = keep_lines
        self._hash = hashlib.sha256()

    def note(self, what: str) -> None:
        """One event of the trace."""
        line = f"{self.now():.6f} {what}"
        self._hash.update(line.encode() + b"\n")
        if self._keep:
            self.lines.append(line)

    def broke(self, what: str) -> None:
        """A promise was broken."""
        self.note(f"BROKEN {what}")
        self.broken.append(f"at {self.now():.3f}: {what}")

    def ran(self, request: int, layers: LayerRange, position: int, rows: int) -> None:
        """A hop ran `rows` positions of a request through its layers."""
        counts = self.computed[request]
        for layer in range(layers.start, layers.stop):
            for offset in range(rows):
                counts[layer, position + offset] += 1

    def repeats(self, request: int, layer: int) -> int:
        """How often the most repeated position went through a layer."""
        counts = self.computed[request]
        return max((n for (at, _), n in counts.items() if at == layer), default=0)

    @property
    def trace_hash(self) -> str:
        """Equal for equal runs."""
        return self._hash.hexdigest()
