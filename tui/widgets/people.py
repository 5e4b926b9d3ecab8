"""Who is here, with which layers, and how far away."""

from __future__ import annotations

from datetime import UTC, datetime

from rich.cells import cell_len
from rich.text import Text

from tui.picture import Picture, nodes
from tui.widgets.drawn import Drawn
from tui.words import COLOURS, GLYPHS, away, ms


class People(Drawn):
    """A line for each node."""

    BORDER_TITLE = "nodes"

    def text(self, picture: Picture, width: int) -> Text:
        seen = nodes(picture)
        wide = min(max(16, width // 4), max((cell_len(node.name) for node in seen), default=0))
        words = [node.word.partition(":")[0] for node in seen]
        said = max(map(len, words), default=0)
        lines = []
        for node, word in zip(seen, words, strict=True):
            line = Text()
            distance = ms(node.rtt_ms) if node.word == "up" else ""
            line.append(f"{node.letter} ", node_style(node.letter))
            line.append(f"{GLYPHS[node.state]} ", COLOURS[node.state])
            name = Text(node.name)
            name.truncate(wide, overflow="ellipsis", pad=True)
            line.append_text(name).append("  ")
            line.append(f"{word:<{said}} {distance:>8}  ", "dim")
            line.append(
                ", ".join(f"{model} {layers}" for model, layers in node.shards) or "no layers"
            )
            line.truncate(width, overflow="ellipsis")
            lines.append(line)
        if missing := away(picture.status.get("node", {}).get("away", ()), datetime.now(UTC)):
            lines.append(Text(f"  away: {', '.join(missing)}", "dim"))
            lines[-1].truncate(width, overflow="ellipsis")
        elif len(seen) == 1:
            lines.append(Text("  no other node is seen: `hearthnet invite` lets one in", "dim"))
        return Text("\n").join(lines)


_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")


def node_style(letter: str) -> str:
    """The style of a node's letter, on bars and beside its name."""
    colour = _COLOURS[ord(letter) % len(_COLOURS)] if letter.isalpha() else ""
    return f"reverse {colour}".strip()
