"""Long answers fall into pieces that read as they do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tui.markdown import cut, parser

LONGEST = 4000
WORDS = "the quick brown fox jumps over the lazy dog, "
LONG = {
    "words": WORDS * 250,
    "lines": (WORDS + "\n") * 150,
    "paragraphs": (WORDS * 4 + "\n\n") * 40,
    "list": "".join(f"- item {n}\n" for n in range(200)),
    "numbers": "Do this:\n\n" + "".join(f"{n}. step {n}\n   and more\n\n" for n in range(1, 200)),
    "nested": "".join(f"- a {n}\n  - b {n}\n    - c {n}\n" for n in range(100)),
    "code": "So:\n\n```python\n" + "x = f(1)  # and so on\n" * 300 + "```\n\nThat is all.\n",
    "table": "| a | b |\n|---|---|\n" + "| left cell | right cell |\n" * 300,
}


def pieces(text: str, step: int, last: str = "") -> list[str]:
    """What stands one below the other once it has come in so many characters at a time, behind
    `last`."""
    found = []
    for start in range(0, len(text), step):
        last += text[start : start + step]
        while (place := cut(last)) is not None:
            found.append(last[: place.end])
            last = place.opening + last[place.end :]
    return [*found, last]


def words(text: str) -> list[tuple[str, str]]:
    """What is read of it, and as what; the head of a table is read again in each piece."""
    return [
        (token.type, each)
        for token in parser().parse(text)
        if token.type in ("inline", "fence") and token.content not in ("a", "b")
        for each in token.content.split()
    ]


@pytest.mark.parametrize("kind", LONG)
@settings(max_examples=5)
@given(step=st.integers(40, 700))
def test_pieces_are_short_and_read_as_the_whole(kind: str, step: int) -> None:
    found = pieces(LONG[kind], step)
    assert len(found) > 1
    assert max(map(len, found)) <= LONGEST + 2 * step + 300
    assert [each for piece in found for each in words(piece)] == words(LONG[kind])


@pytest.mark.parametrize("text", ["", "short", "- a\n" * 3, "a " * 2000, "```\nx\n```\n"])
def test_what_is_short_is_one_piece(text: str) -> None:
    assert cut(text) is None


@pytest.mark.parametrize("length", range(LONGEST - 3, LONGEST + 1))
def test_no_piece_of_code_is_empty(length: int) -> None:
    code = ("```python\n" + "x = f(1)\n" * 999)[: length - 1] + "\n"
    for piece in pieces("```", 1, code):
        assert all(token.content for token in parser().parse(piece) if token.type == "fence")
