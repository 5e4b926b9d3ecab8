"""This machine's memory, and what is being loaded into it."""

from __future__ import annotations

from rich.text import Text

from tui.picture import Picture
from tui.widgets.drawn import Drawn
from tui.words import loading


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
