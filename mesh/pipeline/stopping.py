"""Cuts a growing text at the first stop string, without ever showing a part of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Feeds text through and holds back what may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now. After `hit` is set nothing more is."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            where, self.hit = min(found)
            shown, self._held = self._held[:where], ""
            return shown
        keep = max(self._overlap(stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """How many characters at the end of the held text begin `stop`."""
        for size in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:size]):
                return size
        return 0
