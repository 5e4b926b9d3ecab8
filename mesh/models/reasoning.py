"""What a model thinks before it answers, told apart from the answer by the marks of its template.

Only models whose chat template knows a pair of marks, or channels, have any; nothing is guessed
from an answer alone. Knows nothing of how tokens are chosen or sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mesh.models.answer_parts import BEGIN, END, FLUSH, TEXT, THINK, AnswerParts
from mesh.models.channels import CHANNEL, MESSAGE, ChannelMarks
from mesh.models.splitting import Splitter, first_of, joined, most_overlap, overlap
from mesh.models.template_marks import spelled_out


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """How a model says that it begins and ceases to think.

    `label` stands behind the opening mark and is no thought. `frame` is a pair of marks that may
    stand around the answer. `unseen` has the marks whose token ids decode to no text, because they
    are special.
    """

    opening: str
    closing: str
    label: str = ""
    frame: tuple[str, str] | None = None
    unseen: Mapping[int, str] = field(default_factory=dict)
    answers_with = ""
    """What stands before the text of an answer."""

    @property
    def opens_with(self) -> str:
        """The token that an answer begins with to think before what a grammar binds."""
        return self.opening

    @property
    def tokens(self) -> tuple[str, ...]:
        """The marks that a tokenizer may have special tokens for."""
        return (self.opening, self.closing, *(self.frame or ()))

    def are_in(self, template: str) -> bool:
        """Whether a chat template speaks of them. One tag is enough: that of Olmo 3 Think only
        opens, that of DeepSeek R1 0528 only looks for the end. Of sentences both are there."""
        found = self.opening + self.label in template, self.closing in template
        return all(found) or (any(found) and " " not in self.opening)

    def are_open_in(self, prompt: str) -> bool:
        """Whether a prompt ends with what opens them."""
        return prompt.rstrip().endswith(self.opening + self.label)

    def splitter(self, tail: str, *, is_begun: bool, calls: bool = True) -> Splitter:
        """For an answer behind a prompt with this end, which has begun with some of its text or
        not. Some templates open the marks themselves, at the end of the prompt."""
        del is_begun, calls
        thoughts = Thoughts(self, open_already=self.are_open_in(tail))
        are_tokens = {self.opening, self.closing} <= {*self.unseen.values()}
        return SpecialMarks(self, thoughts) if are_tokens else thoughts


@dataclass(frozen=True, slots=True)
class PartMarks(ReasoningMarks):
    """That a model answers in parts, each with a head."""

    opening: str = THINK
    closing: str = END
    answers_with = TEXT

    @property
    def tokens(self) -> tuple[str, ...]:
        """The marks that a tokenizer may have special tokens for."""
        return (THINK, END, BEGIN, TEXT, FLUSH)

    def splitter(self, tail: str, *, is_begun: bool, calls: bool = True) -> Splitter:
        """As that of the others."""
        del tail, is_begun, calls
        return AnswerParts()


_THINK = ReasoningMarks("<think>", "</think>")
_PAIRS = (
    _THINK,
    ReasoningMarks("<think:opensource>", "</think:opensource>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
    ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningMarks("<|channel>", "<channel|>", label="thought"),
    ReasoningMarks("<|inner_prefix|>", "<|inner_suffix|>"),
    ReasoningMarks("Here is my thought process:", "Here is my response:"),
    ReasoningMarks("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)
_FRAMES = (
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|START_TEXT|>", "<|END_TEXT|>"),
    ("<response>", "</response>"),
    ("<answer>", "</answer>"),
    ("", "[END FINAL RESPONSE]"),
)
"""Of Command R7B, of Cohere's later models, of Granite 3.3 and ERNIE 4.5, of Hunyuan, and of Apriel
1.5."""


def marks_in(template: str) -> ReasoningMarks | ChannelMarks | None:
    """The marks that a chat template speaks of, or None; without their tokens."""
    template = spelled_out(template)
    if f"{CHANNEL}analysis{MESSAGE}" in template:
        return ChannelMarks()
    if f"{BEGIN}assistant{THINK}" in template:
        return PartMarks()
    for marks in _PAIRS:
        if marks.are_in(template):
            found = (pair for pair in _FRAMES if all(mark in template for mark in pair))
            return replace(marks, frame=next(found, None))
    return None


class Thoughts:
    """Splits one answer's text, as it comes, into reasoning and answer, without the marks.

    Reasoning is what stands between the marks at the very start; marks later on are text like any
    other, but for those around all of the answer. `open_already` says that the prompt ended with
    the opening mark, which some models say once more. Line ends beside the marks belong to neither
    part.
    """

    def __init__(self, marks: ReasoningMarks, *, open_already: bool) -> None:
        self._marks = marks
        self._held = ""
        self._is_open: bool | None = True if open_already else None
        self._trims = self._may_repeat = open_already
        self._label = "" if open_already else marks.label
        self._frame = marks.frame
        """What may stand around the answer that has not begun."""
        self._frame_end = ""

    @property
    def is_open(self) -> bool | None:
        """Whether what comes now is reasoning; None while that is not known."""
        return self._is_open

    def push(self, text: str) -> tuple[str, str]:
        """More of the answer: what is certain now to be reasoning, and the rest."""
        self._held += text
        if self._is_open is None:
            self._decide()
        thought = self._think() if self._is_open else ""
        return thought, self._answer(is_over=False) if self._is_open is False else ""

    def flush(self) -> tuple[str, str]:
        """What was held back, once no more text comes."""
        if self._is_open:
            rest, self._held = self._held, ""
            return rest, ""
        return "", self._answer(is_over=True)

    def _decide(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(self._marks.opening):
            self._held = begun.removeprefix(self._marks.opening)
            self._is_open = self._trims = True
        elif not self._marks.opening.startswith(begun):
            self._is_open = False

    def _think(self) -> str:
        if self._may_repeat:
            opening, begun = self._marks.opening, self._held.lstrip()
            if len(begun) < len(opening) and opening.startswith(begun):
                return ""
            self._may_repeat = False
            if begun.startswith(opening):
                self._held, self._label = begun.removeprefix(opening), self._marks.label
        if self._label:
            if len(self._held) < len(self._label) and self._label.startswith(self._held):
                return ""
            self._held, self._label = self._held.removeprefix(self._label), ""
        thought, mark, rest = self._held.partition(self._marks.closing)
        if not mark:
            keep = overlap(self._held, self._marks.closing)
            return self._take(self._held[: len(self._held) - keep])
        thought = self._take(thought)
        self._held, self._is_open, self._trims = rest, False, True
        return thought

    def _answer(self, *, is_over: bool) -> str:
        if self._frame is not None:
            opening, closing = self._frame
            begun = self._held.lstrip()
            if not is_over and len(begun) < len(opening) and opening.startswith(begun):
                return ""
            self._frame = None
            if begun.startswith(opening):
                self._held = begun.removeprefix(opening)
                self._trims, self._frame_end = True, closing
        if not self._frame_end:
            return self._take(self._held)
        said, mark, rest = self._held.partition(self._frame_end)
        if mark:
            self._frame_end = ""
            said = self._take(said)
            self._held = rest
            return said + self._take(rest)
        keep = 0 if is_over else overlap(said, self._frame_end)
        return self._take(said[: len(said) - keep])

    def _take(self, text: str) -> str:
        """`text`, which is the beginning of what is held, without line ends beside a mark."""
        self._held = self._held[len(text) :]
        if self._trims:
            text = text.lstrip("\n")
            self._trims = not text
        return text


class SpecialMarks:
    """Splits as `thoughts` does where the marks are special tokens, which no text has in it.

    So an opening one is reasoning again wherever it stands, and of marks that open or close what is
    open or closed already, as Gemma 4 says them at times, nothing is shown.
    """

    def __init__(self, marks: ReasoningMarks, thoughts: Thoughts) -> None:
        self._marks = marks
        self._thoughts = thoughts
        self._both = (marks.opening, marks.closing)
        self._held = ""

    @property
    def is_open(self) -> bool | None:
        """Whether what comes now is reasoning; None while that is not known."""
        return self._thoughts.is_open

    def push(self, text: str) -> tuple[str, str]:
        """More of the answer: what is certain now to be reasoning, and the rest."""
        self._held += text
        parts: list[tuple[str, str]] = []
        while (found := first_of(self._held, self._both)) is not None:
            place, mark = found
            parts.append(self._thoughts.push(self._held[:place]))
            self._held = self._held[place + len(mark) :]
            parts += self._heed(mark)
        certain = len(self._held) - most_overlap(self._held, self._both)
        parts.append(self._thoughts.push(self._held[:certain]))
        self._held = self._held[certain:]
        return joined(parts)

    def flush(self) -> tuple[str, str]:
        """What was held back, once no more text comes."""
        parts = [self._thoughts.push(self._held), self._thoughts.flush()]
        self._held = ""
        return joined(parts)

    def _heed(self, mark: str) -> list[tuple[str, str]]:
        if mark == self._marks.closing:
            return [self._thoughts.push(mark)] if self._thoughts.is_open else []
        parts = []
        if self._thoughts.is_open is not None:
            parts.append(self._thoughts.flush())
            self._thoughts = Thoughts(self._marks, open_already=False)
        return [*parts, self._thoughts.push(mark)]
