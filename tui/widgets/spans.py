"""The spans of one deployment: which node, which layers, how far."""

from __future__ import annotations

from rich.text import Text
from textual.reactive import var

from tui.deployed import Deployed, DeployedSpan, deployed
from tui.picture import Picture
from tui.widgets.drawn import Drawn
from tui.widgets.progress import progress
from tui.words import COLOURS, GLYPHS


class Spans(Drawn):
    """A line for each span of the deployment `chosen`, a bar where bytes are counted."""

    BORDER_TITLE = "parts of the chosen one"
    IS_AWAY_WHEN_EMPTY = True
    chosen: var[str] = var("")

    def watch_chosen(self) -> None:
        """Another deployment is looked at."""
        self._draw()

    def text(self, picture: Picture, width: int) -> Text:
        found = next((each for each in deployed(picture) if each.key == self.chosen), None)
        if found is None:
            return Text()
        lines = [line for part in found.parts for line in _lines(found, part)]
        if not found.parts:
            lines.append(Text("no node holds a part of it", "dim"))
        if found.missing:
            lines.append(Text(f"· nobody serves layers {', '.join(found.missing)}", "bold red"))
        if found.why:
            lines.append(Text(f"planned anew: {found.why}", "dim"))
        return Text("\n").join(lines)


def _lines(found: Deployed, part: DeployedSpan) -> list[Text]:
    line = Text(f"{GLYPHS[part.state]} ", COLOURS[part.state])
    if found.wished > 1:
        line.append(f"replica {part.replica} · ", "dim")
    line.append(f"{part.node} {part.layers} · {part.words}", "default")
    return [line] if part.come is None else [line, Text("  ").append_text(progress(part.come))]
