"""The form of what an examination finds. Plain data; knows nothing of what is examined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from mesh.errors import MeshError


class Grade(StrEnum):
    """How it stands with one thing."""

    FINE = "fine"
    NOTE = "note"
    """As it may be, and worth knowing."""
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """`check` names what was looked at, always the same for machines; `said` is a sentence."""

    check: str
    state: Grade
    said: str
    fix: str = ""


def fine(check: str, said: str) -> Finding:
    """It works."""
    return Finding(check, Grade.FINE, said)


def note(check: str, said: str, fix: str = "") -> Finding:
    """It is as it may be."""
    return Finding(check, Grade.NOTE, said, fix)


def wrong(check: str, said: str, fix: str) -> Finding:
    """It does not work, and somebody has to do something."""
    return Finding(check, Grade.WRONG, said, fix)


def failed(check: str, error: MeshError) -> Finding:
    """What was tried raised an error."""
    return wrong(check, error.message, error.fix)


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings, in the order in which they were made."""

    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> int:
        """How much is wrong."""
        return sum(each.state is Grade.WRONG for each in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """``{"well": bool, "findings": [{"check", "state": fine, note or wrong, "said", "fix"}]}``;
        what is wrong first."""
        return {"well": not self.wrong, "findings": [asdict(each) for each in self._in_order()]}

    def to_lines(self) -> list[str]:
        """For people: what is wrong first, each with its fix below."""
        lines = []
        for each in self._in_order():
            lines.append(f"{_WORDS[each.state]}  {each.check}: {each.said}")
            if each.fix:
                lines.append(f"{' ' * 8}fix: {each.fix}" if each.state is Grade.WRONG
                             else f"{' ' * 8}{each.fix}")  # fmt: skip
        many = "1 thing is" if self.wrong == 1 else f"{self.wrong or 'no'} things are"
        return [*lines, "nothing is wrong" if not self.wrong else f"{many} wrong"]

    def _in_order(self) -> Iterable[Finding]:
        return sorted(self.findings, key=lambda each: _ORDER.index(each.state))


_ORDER = (Grade.WRONG, Grade.NOTE, Grade.FINE)
_WORDS = {Grade.WRONG: "WRONG ", Grade.NOTE: "note  ", Grade.FINE: "ok    "}
