"""Draws docs/pictures/peers.svg from what ``make bench-peers`` kept: ``python docs/plots.py``.

The numbers are in docs/pictures/peers.json, written by ``python -m tests.bench.peers --out``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).parent / "pictures"
MEASURES = {
    "decode": "one answer",
    "streams_2": "2 at once",
    "streams_4": "4 at once",
    "streams_8": "8 at once",
    "streams_16": "16 at once",
    "prefill": "prompt of 512",
}
FORMATS = {
    "bf16": ("16 bit", "#3b6ea5"),
    "q8_0": ("8 bit", "#d98032"),
    "q4_0": ("4 bit", "#5a9b56"),
}
SHAPES = {"0.16B": "0.16 B parameters", "qwen0.5B": "0.5 B parameters"}

WIDTH, PANEL, TOP, LEFT = 860, 250, 70, 50
HEIGHT = 170
"""Of a panel's bars."""
BAR = 30
GROUP = (WIDTH - LEFT - 20) / len(MEASURES)


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "middle") -> str:
    """One line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def panel(rows: Mapping[str, Mapping[str, Any]], name: str, top: float) -> Iterator[str]:
    """A shape's bars: its row by format, as far as they were measured."""
    highest = max(row[f"{measure} ratio"] for row in rows.values() for measure in MEASURES)
    scale = HEIGHT / (highest * 1.1)
    floor = top + HEIGHT
    yield text(LEFT, top - 8, name, 14, "start")
    for number, (measure, words) in enumerate(MEASURES.items()):
        start = LEFT + number * GROUP + (GROUP - BAR * len(FORMATS)) / 2
        for place, (key, (_, colour)) in enumerate(FORMATS.items()):
            if key not in rows:
                continue
            ratio = rows[key][f"{measure} ratio"]
            x, height = start + place * BAR, ratio * scale
            yield (
                f'<rect x="{x:.1f}" y="{floor - height:.1f}" width="{BAR - 3}" '
                f'height="{height:.1f}" fill="{colour}"/>'
            )
            yield text(x + BAR / 2 - 1.5, floor - height - 3, f"{ratio:.2f}", 10)
        yield text(LEFT + (number + 0.5) * GROUP, floor + 16, words)
    same = floor - scale
    yield f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{same:.1f}" y2="{same:.1f}" stroke="#333"/>'
    yield text(LEFT - 6, same + 4, "1 x", 12, "end")
    yield f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{floor}" y2="{floor}" stroke="#999"/>'


def drawn(kept: Mapping[str, Any]) -> str:
    """The whole picture."""
    body = [text(WIDTH / 2, 22, f"hearthnet beside llama.cpp RPC ({kept['cpu']})", 15)]
    for place, (words, colour) in enumerate(FORMATS.values()):
        x = LEFT + place * 90
        body.append(f'<rect x="{x}" y="34" width="12" height="12" fill="{colour}"/>')
        body.append(text(x + 18, 44, words, 12, "start"))
    for place, (shape, name) in enumerate(SHAPES.items()):
        rows = {row["format"]: row for row in kept["rows"] if row["shape"] == shape}
        body += panel(rows, name, TOP + 20 + place * PANEL)
    height = TOP + PANEL * len(SHAPES)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" fill="#222">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *body,
        "</svg>",
    ]) + "\n"  # fmt: skip


if __name__ == "__main__":
    found = json.loads((PICTURES / "peers.json").read_text(encoding="utf-8"))
    (PICTURES / "peers.svg").write_text(drawn(found), encoding="utf-8")
