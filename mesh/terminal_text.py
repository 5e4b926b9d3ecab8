"""Text that acts on no terminal, whoever wrote it."""

from __future__ import annotations

import re

# C0 but for newline and tab, DEL, C1, and the controls that reorder text.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """`text` without what could move the cursor, change colours or reorder the line."""
    return _CONTROLS.sub("", text)
