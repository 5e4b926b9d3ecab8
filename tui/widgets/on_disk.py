"""What of models is on this machine's disk."""

from __future__ import annotations

from rich.text import Text

from tui.deployed import on_disk
from tui.picture import Picture
from tui.widgets.drawn import Drawn


class OnDisk(Drawn):
    """A line for each checkpoint; away while there is none."""

    BORDER_TITLE = "on this machine's disk"
    IS_AWAY_WHEN_EMPTY = True

    def text(self, picture: Picture, width: int) -> Text:
        lines = on_disk(picture)
        return Text("\n").join(map(Text, lines))
