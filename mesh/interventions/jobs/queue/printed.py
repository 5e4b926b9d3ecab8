"""The latest lines that a job printed, for whoever looks later; bounded in number and size."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

MAX_LINES = 200
MAX_CHARACTERS = 64 << 10


@dataclass(slots=True)
class Printed:
    """The lines of one job. The oldest go first; `dropped` counts them."""

    lines: deque[str] = field(default_factory=deque)
    characters: int = 0
    dropped: int = 0

    def add(self, text: str) -> None:
        """Add what was printed: lines joined by newlines."""
        for line in text.split("\n"):
            self.lines.append(line)
            self.characters += len(line)
        while len(self.lines) > MAX_LINES or self.characters > MAX_CHARACTERS:
            self.characters -= len(self.lines.popleft())
            self.dropped += 1

    def shown(self) -> dict[str, Any]:
        """``{"lines", "dropped"}``"""
        return {"lines": list(self.lines), "dropped": self.dropped}
