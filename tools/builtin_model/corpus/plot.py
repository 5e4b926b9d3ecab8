"""The form of a plot: slots that are drawn, beats that follow one another, questions about it.

Knows no particular plot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot template.

    A slot key may name several slots at once ('thing|spot'); its values are then split the same
    way, so that things which belong together are drawn together. Each beat is a choice of
    wordings for one step of the story; an empty wording leaves the step out.
    """

    name: str
    slots: Mapping[str, tuple[str, ...]]
    beats: tuple[tuple[str, ...], ...]
    summary: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]
    wish: tuple[str, ...]
