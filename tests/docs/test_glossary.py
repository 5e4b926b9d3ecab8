"""Each term of docs/reference/glossary.md is a thing in the code, and stands there once."""

from __future__ import annotations

import re

from tests.docs.names import ROOT, exists

PAGE = ROOT / "docs/reference/glossary.md"
_ROW = re.compile(r"^\| ([^|`]+) \| ([^|]+) \| `([\w.]+)` \|$", re.MULTILINE)


def rows() -> list[tuple[str, str, str]]:
    """Term, meaning, and what it is in the code."""
    return _ROW.findall(PAGE.read_text(encoding="utf-8"))


def test_every_row_of_the_page_is_read() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    tables = [line for line in lines if line.startswith("| ") and not line.startswith("| term")]
    assert len(rows()) == len(tables) > 50


def test_each_term_is_something_in_the_code() -> None:
    assert {(term, name) for term, _, name in rows() if not exists(name)} == set()


def test_a_word_has_one_meaning() -> None:
    words = [word for term, *_ in rows() for word in term.split(", ")]
    assert sorted(words) == sorted(set(words))
