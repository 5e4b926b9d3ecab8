"""A bar of how much has come."""

from __future__ import annotations

from rich.text import Text

WIDTH = 16


def progress(come: float, width: int = WIDTH) -> Text:
    """`come`, from 0 to 1, as so many full cells of `width`; all are full only at 1."""
    full = int(come * width)
    return Text("█" * full, "green").append("░" * (width - full), "dim")
