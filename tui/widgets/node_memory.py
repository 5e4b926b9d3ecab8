"""This machine's memory, and what is being loaded into it."""

from __future__ import annotations

from rich.text import Text

from mesh.units import memory_size
from tui.picture import Picture
from tui.widgets.drawn import Drawn
from tui.words import loading


class NodeMemory(Drawn):
    """This machine's memory, what its shards take of it, and what is being loaded."""

    BORDER_TITLE = "this machine"

    def text(self, picture: Picture, width: int) -> Text:
        lines = []
        several = picture.rows("devices")
        only = picture.status.get("memory")
        for memory in several or ([only] if only else []):
            free, total = (memory_size(memory[of] << 20) for of in ("free_mb", "total_mb"))
            where = f"{memory['device']}: " if several else ""
            lines.append(Text(f"{where}{free} of {total} are free ({memory['bound']})"))
        for shard in picture.rows("shards"):
            taken = shard.get("memory")
            line = f"{shard['model_id']} {shard['layers']}"
            if several:
                line += f" on {shard['device']}"
            if taken is not None:
                weights, caches = (
                    memory_size(taken[of] << 20) for of in ("weights_mb", "caches_mb")
                )
                line += f" · {weights} of weights, {caches} of caches"
            lines.append(Text(line))
        lines += [Text(f"◌ loading {loading(load)}") for load in picture.rows("loads")]
        return Text("\n").join(lines) if lines else Text("holds nothing", "dim")
