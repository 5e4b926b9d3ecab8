"""Answers in parts with heads that say what each is, as Solar Open writes them.

`<|think|>...<|end|><|begin|>assistant<|content|>...`, and calls behind a head of their own. All
marks are special tokens, so no text has them in it.
"""

from __future__ import annotations

from mesh.models.splitting import first_of, joined, most_overlap

THINK, TEXT, END, BEGIN, FLUSH = "<|think|>", "<|content|>", "<|end|>", "<|begin|>", "<|flush|>"
"""`FLUSH` ends an answer, where it is no end token as well."""
_ROLE = f"{BEGIN}assistant"
_MARKS = (THINK, TEXT, END, _ROLE, FLUSH)


class AnswerParts:
    """Splits one answer's text, as it comes, into reasoning and the rest, without heads."""

    def __init__(self) -> None:
        self._held = ""
        self._is_open: bool | None = None

    @property
    def is_open(self) -> bool | None:
        """Whether what comes now is reasoning; None while that is not known."""
        return self._is_open

    def push(self, text: str) -> tuple[str, str]:
        """More of the answer: what is certain now to be reasoning, and the rest."""
        self._held += text
        parts: list[tuple[str, str]] = []
        while (found := first_of(self._held, _MARKS)) is not None:
            place, mark = found
            parts.append(self._take(place))
            self._held = self._held[len(mark) :]
            self._is_open = mark == THINK
        parts.append(self._take(len(self._held) - most_overlap(self._held, _MARKS)))
        return joined(parts)

    def flush(self) -> tuple[str, str]:
        """What was held back, once no more text comes: a head that was cut off is none of it."""
        return self._take(0 if self._held.startswith(BEGIN) else len(self._held))

    def _take(self, count: int) -> tuple[str, str]:
        text, self._held = self._held[:count], self._held[count:]
        if self._is_open:
            return text, ""
        self._is_open = False if text else self._is_open
        return "", text
