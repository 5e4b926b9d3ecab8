"""What is held where: every model's bar, who holds which layers, gaps, memory, loads."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll

from tui.picture import Coverage, Picture, coverages, nodes
from tui.screens.screen import TopScreen
from tui.widgets.bars import bar
from tui.widgets.drawn import Drawn
from tui.widgets.people import node_style
from tui.words import COLOURS, GLYPHS, loading


class ModelsScreen(TopScreen):
    """A bar and a list of holders for each model, then this machine's memory."""

    def body(self) -> ComposeResult:
        """See `TopScreen`."""
        with VerticalScroll(can_focus=True):
            yield Holdings()
            yield NodeMemory()


class Holdings(Drawn):
    """Each model with its holders."""

    BORDER_TITLE = "models"

    def text(self, picture: Picture, width: int) -> Text:
        """See `Drawn`."""
        lines: list[Text] = []
        for coverage, row in zip(coverages(picture), picture.rows("models"), strict=True):
            lines += [_head(coverage), bar(coverage, width - 2)]
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


class NodeMemory(Drawn):
    """This machine's memory, what its shards take of it, and what is being loaded."""

    BORDER_TITLE = "this machine"

    def text(self, picture: Picture, width: int) -> Text:
        """See `Drawn`."""
        lines = []
        memory = picture.status.get("memory")
        if memory is not None:
            free, total = memory["free_mb"], memory["total_mb"]
            lines.append(Text(f"{free} of {total} MB are free ({memory['bound']})"))
        for shard in picture.rows("shards"):
            taken = shard.get("memory")
            line = f"{shard['model_id']} {shard['layers']}"
            if taken is not None:
                line += f" · {taken['weights_mb']} MB of weights, {taken['caches_mb']} MB of caches"
            lines.append(Text(line))
        lines += [Text(f"◌ loading {loading(load)}") for load in picture.rows("loads")]
        return Text("\n").join(lines) if lines else Text("holds nothing", "dim")


def _head(coverage: Coverage) -> Text:
    line = Text()
    line.append(f"{GLYPHS[coverage.state]} ", COLOURS[coverage.state])
    line.append(coverage.model, "bold")
    return line.append(f" · {len(coverage.holders)} layers · {coverage.words}")
