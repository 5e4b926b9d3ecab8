"""The events that were heard, and those of them that a filter lets through: both bounded.

What the filter shows is kept apart, so that a flood of other events pushes none of it out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from tui.words import event_line

KEPT = 10_000


class Journal:
    """Lines of events. `count` is how many passed the filter since it was set."""

    def __init__(self) -> None:
        self.filter = ""
        self.lines: deque[str] = deque(maxlen=KEPT)
        self.count = 0
        self._all: deque[str] = deque(maxlen=KEPT)

    def add(self, events: Iterable[Mapping[str, Any]], missed: int = 0) -> None:
        """Take in what was heard; a gap is a line that every filter shows."""
        if missed:
            gap = f"… {missed} events were missed: they are not kept any more"
            self._all.append(gap)
            self._pass(gap)
        for event in events:
            line = event_line(event)
            self._all.append(line)
            if self.filter in line.lower():
                self._pass(line)

    def set_filter(self, text: str) -> None:
        """Only lines with this text in them, in whatever case."""
        self.filter = text.lower()
        self.lines.clear()
        self.count = 0
        for line in self._all:
            if self.filter in line.lower():
                self._pass(line)

    def newest(self, count: int) -> list[str]:
        """The newest lines that passed, oldest first."""
        return list(self.lines)[-count:] if count > 0 else []

    def _pass(self, line: str) -> None:
        self.lines.append(line)
        self.count += 1
