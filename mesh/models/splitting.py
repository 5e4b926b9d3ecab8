"""What splits an answer as it comes: the parts, and a mark that may have begun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Splitter(Protocol):
    """Tells one answer's reasoning from the rest of it, which is text and calls."""

    @property
    def is_open(self) -> bool | None:
        """Whether what comes now is reasoning between marks; None while that is not known."""

    def push(self, text: str) -> tuple[str, str]:
        """More of the answer: what is certain now to be reasoning, and the rest."""

    def flush(self) -> tuple[str, str]:
        """What was held back, once no more text comes."""


def joined(parts: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """What several pushes gave, as if it had been one."""
    return "".join(thought for thought, _ in parts), "".join(said for _, said in parts)


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` begin `mark`, all of it excepted."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


def first_of(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of the marks stands, and which it is; None without any."""
    found = [(text.find(mark), mark) for mark in marks if mark in text]
    return min(found) if found else None


def most_overlap(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of `text` begin one of the marks."""
    return max(overlap(text, mark) for mark in marks)


def without(text: str, marks: Sequence[str]) -> str:
    """A text without marks and white space."""
    for mark in marks:
        text = text.replace(mark, "")
    return "".join(text.split())
