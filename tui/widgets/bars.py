"""Each model's layers as a bar over the nodes that hold them, gaps named."""

from __future__ import annotations

from rich.text import Text

from tui.picture import GAP, Coverage, Picture, coverages
from tui.widgets.drawn import Drawn
from tui.widgets.people import node_style
from tui.words import COLOURS, GLYPHS


class Bars(Drawn):
    """Two lines for each model: what it is and its bar. Letters are those of the nodes."""

    BORDER_TITLE = "models"

    def text(self, picture: Picture, width: int) -> Text:
        lines = []
        for coverage in coverages(picture):
            line = head(coverage)
            line.truncate(width, overflow="ellipsis")
            lines += [line, bar(coverage, width - 2)]
        return Text("\n").join(lines) if lines else Text("no models", "dim")


def head(coverage: Coverage) -> Text:
    """A model's name, its state and how much of it is held."""
    line = Text()
    line.append(f"{GLYPHS[coverage.state]} ", COLOURS[coverage.state])
    line.append(coverage.model, "bold")
    return line.append(f" · {len(coverage.holders)} layers · {coverage.words}")


def bar(coverage: Coverage, width: int) -> Text:
    """A coloured cell for each layer or few, with the letter of its node; underlined where another
    one holds it as well."""
    text = Text("  ")
    for cell in coverage.cells(width):
        style = "bold red" if cell == GAP else node_style(cell[0])
        text.append(cell[0], f"{style} underline" if len(cell) > 1 else style)
    return text
