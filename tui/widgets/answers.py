"""The generations that run: how fast, over which route, and what holds each up."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import wrap
from typing import Any

from rich.text import Text

from tui.picture import Picture, bottleneck
from tui.widgets.drawn import Drawn
from tui.words import count, ms, rate


class Answers(Drawn):
    """Three lines for each generation: numbers, route, bottleneck."""

    BORDER_TITLE = "answers"

    def text(self, picture: Picture, width: int) -> Text:
        lines: list[Text] = []
        for running in picture.rows("generations"):
            lines += generation(running, width, own_name(picture))
        return Text("\n").join(lines) if lines else Text("none runs", "dim")


def own_name(picture: Picture) -> str:
    """This node's."""
    name: str = picture.status["node"]["name"]
    return name


def generation(running: Mapping[str, Any], width: int, own_node: str) -> list[Text]:
    """Its lines."""
    head = Text(f"{running['model']} · {rate(running.get('tokens_per_second'))}", "bold")
    first = running.get("first_token_ms")
    said = "reading the prompt" if first is None else f"first token {ms(first)}"
    if running.get("queued"):
        said = f"waits for room, number {running['queued']} in line"
    head.append(f" · {said} · {running.get('tokens', 0)} tokens", "not bold")
    if running["failovers"]:
        head.append(f" · ⚠ {count(running['failovers'], 'failover')}", "yellow")
    slowest = bottleneck(running, own_node)
    lines = [head, route(running)]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    if slowest is not None:
        first, *others = wrap(slowest.words, max(20, width - 4))
        lines.append(Text(f"  ▲ {first}", "yellow"))
        lines += [Text(f"    {other}", "yellow") for other in others]
    return lines


def route(running: Mapping[str, Any]) -> Text:
    """``sofa 0-3 1.2 ms ▸ ▲attic 4-7 8.0 ms``; ▲ marks the slowest hop."""
    slowest = bottleneck(running)
    text = Text("  ")
    for place, hop in enumerate(running["route"]):
        is_slowest = slowest is not None and place == slowest.place and len(running["route"]) > 1
        text.append(" ▸ " if place else "", "dim")
        mark = "▲" if is_slowest else ""
        text.append(f"{mark}{hop['node']} {hop['layers']}", "bold yellow" if is_slowest else "")
        if hop.get("p50_ms"):
            text.append(f" {ms(hop['p50_ms'])}", "dim")
    return text
