"""Beside an answer: its route, the times of its hops, what holds it up, what happened to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text
from textual.reactive import var

from tui.picture import Picture, bottleneck
from tui.widgets.answers import own_name
from tui.widgets.drawn import Drawn
from tui.words import ms, rate


class Beside(Drawn):
    """Of the running answer while there is one, then of the last.

    `shown` is the running one's name in the status, `ended` the ``hearthnet`` object of the last.
    """

    BORDER_TITLE = "route"
    shown: var[str] = var("")
    ended: var[Mapping[str, Any]] = var(dict)
    happened: var[tuple[str, ...]] = var(())

    def watch_ended(self) -> None:
        """An answer is complete."""
        self._draw()

    def watch_happened(self) -> None:
        """Something happened to the route."""
        self._draw()

    def text(self, picture: Picture, width: int) -> Text:
        rows = picture.rows("generations")
        live = next((row for row in rows if self.shown and row["id"] == self.shown), None)
        own_node = own_name(picture) if picture.status else ""
        lines = _lines(as_generation(self.ended) if live is None else live, own_node)
        lines += [Text(f"⚠ {line}", "yellow") for line in self.happened]
        return Text("\n").join(lines) if lines else Text("ask something", "dim")


def as_generation(ended: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The ``hearthnet`` object of an answer in the form that running generations have."""
    if not ended:
        return None
    timings = ended["timings"]
    return {
        "route": timings["hops"] or ended["route"],
        "tokens_per_second": timings["tokens_per_second"],
        "first_token_ms": timings["first_token_ms"],
        "tokens": len(ended["token_ids"]),
        "failovers": ended["failovers"],
    }


def _lines(running: Mapping[str, Any] | None, own_node: str) -> list[Text]:
    if running is None:
        return []
    timed = all(hop.get("p50_ms") is not None for hop in running["route"])
    slowest = bottleneck(running, own_node) if timed else None
    lines = []
    for place, hop in enumerate(running["route"]):
        is_slowest = slowest is not None and place == slowest.place and len(running["route"]) > 1
        mark = "▲" if is_slowest else " "
        line = Text(f"{mark}{hop['node']} {hop['layers']} ", "bold yellow" if is_slowest else "")
        lines.append(line.append(ms(hop.get("p50_ms")), "dim"))
    lines.append(Text(f"first token {ms(running.get('first_token_ms'))}"))
    lines.append(
        Text(f"{rate(running.get('tokens_per_second'))} · {running.get('tokens', 0)} tokens")
    )
    if slowest is not None:
        lines.append(Text(f"▲ {slowest.words}", "yellow"))
    return lines
