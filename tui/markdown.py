"""How answers are read as Markdown, in the dashboard and in `chat`: nothing that they say is lost.

Knows nothing of how they are drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from markdown_it import MarkdownIt
from markdown_it.token import Token

if TYPE_CHECKING:
    from markdown_it.rules_core import StateCore


def parser() -> MarkdownIt:
    """Reads Markdown with tables. HTML stays text as it stands: taken for HTML it would be left
    out."""
    reads = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    reads.core.ruler.push("line_ends", _line_ends)
    return reads


def spelled() -> MarkdownIt:
    """As `parser`, with where a link leads behind it, for what draws only its text."""
    reads = parser()
    reads.core.ruler.push("targets", _targets)
    return reads


def _targets(state: StateCore) -> None:
    for token in state.tokens:
        told: list[Token] = []
        target = ""
        for child in token.children or ():
            told.append(child)
            if child.type == "link_open":
                target = str(child.attrs["href"])
            elif child.type == "link_close" and told[-2].content != target:
                told.append(Token("text", "", 0, content=f" ({target})"))
        if token.children:
            token.children = told


def _line_ends(state: StateCore) -> None:
    """Models mean the line ends that they write, which Markdown makes spaces of."""
    for token in state.tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
