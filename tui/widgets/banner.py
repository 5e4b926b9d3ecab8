"""The daemon is lost: why, what to do, and when the next attempt is made."""

from __future__ import annotations

from rich.text import Text
from textual.reactive import var
from textual.timer import Timer
from textual.widgets import Static

from tui.picture import Lost


class Banner(Static):
    """Shown while `lost` is set; counts the seconds down."""

    lost: var[Lost | None] = var(None)
    left_s: var[int] = var(0)

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._timer: Timer | None = None

    def on_mount(self) -> None:
        """Make the timer, which stands still while all is well."""
        self._timer = self.set_interval(1.0, self._tick, pause=self.lost is None)
        self.display = self.lost is not None

    def watch_lost(self, lost: Lost | None) -> None:
        """Begin to count, or go."""
        self.display = lost is not None
        if self._timer is not None:
            self._timer.pause() if lost is None else self._timer.reset()
            if lost is not None:
                self._timer.resume()
        if lost is not None:
            self.left_s = round(lost.retry_s)
            self._draw()

    def watch_left_s(self) -> None:
        """Draw the seconds."""
        self._draw()

    def _tick(self) -> None:
        self.left_s = max(0, self.left_s - 1)

    def _draw(self) -> None:
        if self.lost is None:
            return
        text = Text(f"✖ not connected · trying again in {self.left_s} s · ")
        text.append(f"{self.lost.why} {self.lost.fix}")
        self.update(text)
