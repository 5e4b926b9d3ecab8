"""Each model's bar, who holds which layers of it, and gaps."""

from __future__ import annotations

from rich.text import Text

from tui.picture import Picture, coverages, nodes
from tui.widgets.bars import bar, head
from tui.widgets.drawn import Drawn
from tui.widgets.people import node_style


class ModelHolders(Drawn):
    """Each model with its holders."""

    BORDER_TITLE = "models"

    def text(self, picture: Picture, width: int) -> Text:
        lines: list[Text] = []
        for coverage, row in zip(coverages(picture), picture.rows("models"), strict=True):
            lines += [head(coverage), bar(coverage, width - 2)]
            for node in nodes(picture):
                spans = [str(span) for model, span in node.shards if model == coverage.model]
                if spans:
                    line = Text("  ")
                    line.append(node.letter, node_style(node.letter))
                    line.append(f" {node.name}: layers {', '.join(spans)}")
                    lines.append(line)
            if coverage.missing:
                gap = f"  · nobody: layers {', '.join(coverage.missing)}"
                lines.append(Text(gap, "bold red"))
            if row.get("context"):
                lines.append(Text(f"  context {row['context']} tokens", "dim"))
        return Text("\n").join(lines) if lines else Text("no models", "dim")
