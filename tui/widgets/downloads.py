"""What is fetched to this machine and to others, how far, how fast and from whom."""

from __future__ import annotations

from rich.text import Text

from tui.deployed import downloads
from tui.picture import Picture
from tui.widgets.drawn import Drawn
from tui.widgets.progress import progress


class Downloads(Drawn):
    """A line for each transfer, and its bar; away while there is none."""

    BORDER_TITLE = "downloads"
    IS_AWAY_WHEN_EMPTY = True

    def text(self, picture: Picture, width: int) -> Text:
        found = downloads(picture)
        lines = []
        for download in found:
            lines.append(Text("◌ ", "yellow").append(download.words, "default"))
            if download.come is not None:
                lines.append(Text("  ").append_text(progress(download.come, min(40, width - 4))))
        return Text("\n").join(lines)
