"""Is it working? In one line."""

from __future__ import annotations

from rich.text import Text

from tui.picture import Picture, readiness
from tui.widgets.drawn import Drawn
from tui.words import COLOURS, GLYPHS


class Headline(Drawn):
    """The readiness, with a glyph, a word and a colour."""

    def text(self, picture: Picture, width: int) -> Text:
        found = readiness(picture)
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{GLYPHS[found.state]} ", COLOURS[found.state])
        line.append(found.words, "bold")
        line.truncate(width, overflow="ellipsis")
        return line
