"""What the names of colours are on a screen: each stands out from the ground it is on."""

from __future__ import annotations

from rich.terminal_theme import TerminalTheme

_Colour = tuple[int, int, int]
_BLACK, _WHITE = (0, 0, 0), (247, 247, 247)
_DARK_COLOURS = (
    (165, 40, 40),
    (30, 105, 20),
    (125, 80, 0),
    (40, 75, 170),
    (115, 50, 150),
    (0, 95, 130),
)
"""Red, green, yellow, blue, magenta, cyan on light ground; Textual's yellow is too pale there."""


def _palette(ground: _Colour, text: _Colour, colours: tuple[_Colour, ...]) -> TerminalTheme:
    eight = [_BLACK, *colours, _WHITE]
    return TerminalTheme(ground, text, eight, eight)


ON_LIGHT = _palette(_WHITE, _BLACK, _DARK_COLOURS)
GREY_ON_LIGHT = _palette(_WHITE, _BLACK, ((70, 70, 70),) * 6)
GREY_ON_DARK = _palette(_BLACK, _WHITE, ((200, 200, 200),) * 6)
"""Without colours each would be a grey as dark as it is: red all but black, on dark ground."""
