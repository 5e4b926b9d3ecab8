"""The last events, newest last."""

from __future__ import annotations

from rich.text import Text

from tui.picture import Picture
from tui.widgets.drawn import Drawn
from tui.words import event_line

SHOWN = 5


class Latest(Drawn):
    """A line for each of the last events."""

    BORDER_TITLE = "last events"

    def text(self, picture: Picture, width: int) -> Text:
        lines = [Text(event_line(event)) for event in picture.events[-SHOWN:]]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return Text("\n").join(lines) if lines else Text("nothing has happened", "dim")
