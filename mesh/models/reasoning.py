"""What a model thinks before it answers, told apart from the answer by the marks of its template.

Only models whose chat template knows a pair of marks have any; nothing is guessed from an answer
alone. Knows nothing of how tokens are chosen or sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mesh.models.splitting import overlap

_PAIRS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """How a model says that it begins and ceases to think.

    `unseen` has the marks whose token ids decode to no text, because they are special.
    """

    opening: str
    closing: str
    unseen: Mapping[int, str] = field(default_factory=dict)


def marks_in(template: str) -> tuple[str, str] | None:
    """The marks that a chat template speaks of, or None."""
    for opening, closing in _PAIRS:
        if opening in template and closing in template:
            return opening, closing
    return None


class Thoughts:
    """Splits one answer's text, as it comes, into reasoning and answer, without the marks.

    Reasoning is what stands between the marks at the very start; marks later on are text like any
    other. `open_already` says that the prompt ended with the opening mark. Line ends beside the
    marks belong to neither part.
    """

    def __init__(self, marks: ReasoningMarks, *, open_already: bool) -> None:
        self._marks = marks
        self._held = ""
        self._is_open: bool | None = True if open_already else None
        self._trims = open_already

    @property
    def is_open(self) -> bool | None:
        """Whether what comes now is reasoning; None while that is not known."""
        return self._is_open

    def push(self, token_id: int | None, text: str) -> tuple[str, str]:
        """One token with the text it completes: what is certain now to be reasoning, and answer."""
        unseen = "" if token_id is None else self._marks.unseen.get(token_id, "")
        self._held += unseen + text
        if self._is_open is None:
            self._decide()
        thought = self._think() if self._is_open else ""
        return thought, self._take(self._held) if self._is_open is False else ""

    def flush(self) -> tuple[str, str]:
        """What was held back, once no more text comes."""
        rest, self._held = self._held, ""
        return (rest, "") if self._is_open else ("", rest)

    def _decide(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(self._marks.opening):
            self._held = begun.removeprefix(self._marks.opening)
            self._is_open = self._trims = True
        elif not self._marks.opening.startswith(begun):
            self._is_open = False

    def _think(self) -> str:
        thought, mark, rest = self._held.partition(self._marks.closing)
        if not mark:
            keep = overlap(self._held, self._marks.closing)
            return self._take(self._held[: len(self._held) - keep])
        thought = self._take(thought)
        self._held, self._is_open, self._trims = rest, False, True
        return thought

    def _take(self, text: str) -> str:
        """`text`, which is the beginning of what is held, without line ends beside a mark."""
        self._held = self._held[len(text) :]
        if self._trims:
            text = text.lstrip("\n")
            self._trims = not text
        return text
