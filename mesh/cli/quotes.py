"""Triple quotes, which hold a text of several lines together, on a terminal and in a pipe."""

from __future__ import annotations

QUOTES = '"""'


def unquoted(text: str) -> tuple[str, bool]:
    """The text without the triple quotes around it, and whether these are closed."""
    if not text.startswith(QUOTES):
        return text, True
    inner = text.removeprefix(QUOTES)
    is_closed = inner.rstrip().endswith(QUOTES)
    if is_closed:
        inner = inner.rstrip().removesuffix(QUOTES)
    return inner.strip("\n"), is_closed
