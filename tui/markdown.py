"""How answers are read as Markdown, in the dashboard and in `chat`: nothing that they say is lost.

Knows nothing of how they are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt
from markdown_it.token import Token

from mesh.terminal_text import printable

if TYPE_CHECKING:
    from markdown_it.rules_core import StateCore


_PIECE_CHARS = 4000
_PIECE_ITEMS = 12
"""A piece of a text that is longer, or whose last list has more, is cut where it can be."""


@dataclass(frozen=True, slots=True)
class Division:
    """A place at which a text falls into two that read as it does: all before `end`, and `opening`
    with the rest. `is_within`: inside of a block, so that no gap belongs there."""

    end: int
    opening: str = ""
    is_within: bool = False


def cut(text: str) -> Division | None:
    """Where a text that still grows can be cut; None while it is short, or where nothing can."""
    if len(text) <= _PIECE_CHARS and text.count("\n") <= _PIECE_ITEMS:
        return None
    tokens = parser().parse(text)
    blocks = [each for each in tokens if each.level == 0 and each.map and each.nesting >= 0]
    if not blocks:
        return None
    last = blocks[-1]
    inside = tokens[tokens.index(last) :]
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    begins = starts[_line(last)]
    items = [each for each in inside if each.type == "list_item_open"]
    is_long = len(text) - begins > _PIECE_CHARS or len(items) > _PIECE_ITEMS
    found = _inside(text, last, items, starts) if is_long else None
    if found is None and begins and (is_long or len(text) > _PIECE_CHARS):
        return Division(begins)
    return found


def _inside(text: str, block: Token, items: list[Token], starts: list[int]) -> Division | None:
    """Where one block can be cut: before its last item, row or line, or behind a word."""
    first = _line(block)
    begins = starts[first]
    if block.type in ("bullet_list_open", "ordered_list_open"):
        last = max(starts[_line(each)] for each in items if each.level == 1)
        return Division(last, "", is_within=True) if last > begins else None
    if block.type == "paragraph_open":
        ends = text.rfind("\n", begins, -1) + 1 or text.rfind(" ", begins, -1) + 1
        return Division(ends, "", is_within=True) if ends > begins else None
    heads = {"fence": 1, "table_open": 2}.get(block.type)
    if heads is None or not block.map:
        return None
    if block.type == "fence" and text.rstrip().rpartition("\n")[2].strip() == block.markup:
        return Division(starts[block.map[1]])  # it is closed
    # The last line that is whole goes on with it: a mark that ends the block is not alone then.
    ends = text.rfind("\n", 0, text.rfind("\n")) + 1
    opening = text[begins : starts[first + heads]]
    return Division(ends, opening, is_within=True) if ends > begins + len(opening) else None


def _line(token: Token) -> int:
    return token.map[0] if token.map else 0


def parser() -> MarkdownIt:
    """Reads Markdown with tables. HTML stays text as it stands: taken for HTML it would be left
    out. What is written otherwise, as ``&#8238;`` or ``%1B`` in a link, acts on no terminal."""
    reads = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    reads.core.ruler.push("line_ends", _line_ends)
    reads.core.ruler.push("printable", _printable)
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


def _printable(state: StateCore) -> None:
    for token in state.tokens:
        for each in (token, *(token.children or ())):
            each.content = printable(each.content)


def _line_ends(state: StateCore) -> None:
    """Models mean the line ends that they write, which Markdown makes spaces of."""
    for token in state.tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
