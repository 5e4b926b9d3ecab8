"""What is on its way: deployments that come up, downloads, loads."""

from __future__ import annotations

from rich.text import Text

from tui.deployed import coming
from tui.picture import Picture
from tui.widgets.drawn import Drawn
from tui.words import COLOURS, GLYPHS, loading


class Coming(Drawn):
    """A line for each; away while there is nothing."""

    BORDER_TITLE = "on its way"
    IS_AWAY_WHEN_EMPTY = True

    def text(self, picture: Picture, width: int) -> Text:
        found = coming(picture)
        found += [("wait", f"loading {loading(load)}") for load in picture.rows("loads")]
        lines = []
        for state, words in found:
            line = Text(f"{GLYPHS[state]} ", COLOURS[state]).append(words, "default")
            line.truncate(width, overflow="ellipsis")
            lines.append(line)
        return Text("\n").join(lines)
