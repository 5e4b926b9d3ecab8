"""Answers of gpt-oss, told apart by their channels: OpenAI's harmony format
(https://github.com/openai/harmony/blob/main/docs/format.md).

An answer is messages, each with a header that says its channel and, if it is a call, whom it is to.
All marks are special tokens that make no text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mesh.models.splitting import Splitter, overlap

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_CLOSING = (END, CALL, RETURN)
_ENDS = (*_CLOSING, START, CHANNEL)
_HEADER_BEGINS = (*_CLOSING, START, CHANNEL, MESSAGE, CONSTRAIN, "to=")
_LONGEST_HEADER = 512
"""Characters; a function's name has 64."""
_TO = re.compile(r"to=([^\s<]+)")
_PEOPLE = ("assistant", "user")
"""To whom the model writes at times, and then in the channel that the header names last."""
_CALLED = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")

THOUGHT, TEXT = "analysis", "final"
_APART = "\n\n"
"""Between two messages that are both reasoning, or both text."""


@dataclass(frozen=True, slots=True)
class ChannelMarks:
    """That a model answers in channels. `unseen` has the marks whose token ids decode to no text,
    because they are special."""

    unseen: Mapping[int, str] = field(default_factory=dict)
    tokens = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
    opens_with = ""
    """No token begins a reasoning that no grammar binds: a grammar has the channels in it."""
    answers_with = f"{CHANNEL}{TEXT}{MESSAGE}"
    """What stands before the text of an answer."""

    closing = END

    def are_open_in(self, prompt: str) -> bool:
        """False: a prompt ends before the channel is chosen."""
        del prompt
        return False

    def splitter(self, tail: str, *, is_begun: bool, calls: bool = True) -> Splitter:
        """For an answer behind a prompt with this end, which has begun with some of its text or
        not; `calls`: whether somebody reads those."""
        del tail
        return Channels(is_begun=is_begun, calls=calls)


def call_to(recipient: str) -> str:
    """The header of a call, as it is handed on to what reads calls."""
    return f"{CHANNEL}commentary to={recipient} {CONSTRAIN}json{MESSAGE}"


class Channels:
    """Splits one answer's text, as it comes, into reasoning and the rest, without headers.

    The rest is text, and calls as they were written, each with the one header that `call_to` gives
    and `CALL` behind it; without `calls` they are text, as is what is to no function. What stands
    in no message is text. A header that is cut off has nothing of an answer in it.
    """

    def __init__(self, *, is_begun: bool, calls: bool = True) -> None:
        """`is_begun`: the prompt ended within the text of the answer, and not with its header."""
        self._held = ""
        self._calls = calls
        self._body = TEXT if is_begun else ""
        """The kind of message that is under way, `CALL` for a call; empty in a header."""
        self._has_said: set[str] = set()
        self._gap = ""
        self._parts: dict[str, list[str]] = {THOUGHT: [], TEXT: []}

    @property
    def is_open(self) -> bool | None:
        """False: what binds an answer has the channels in it, and knows when it is bound."""
        return False

    def push(self, text: str) -> tuple[str, str]:
        """More of the answer: what is certain now to be reasoning, and the rest."""
        self._held += text
        return self._advance(is_over=False)

    def flush(self) -> tuple[str, str]:
        """What was held back, once no more text comes."""
        return self._advance(is_over=True)

    def _advance(self, *, is_over: bool) -> tuple[str, str]:
        while self._go_on(is_over) if self._body else self._read_header(is_over):
            pass
        thought, said = ("".join(self._parts[kind]) for kind in (THOUGHT, TEXT))
        for parts in self._parts.values():
            parts.clear()
        return thought, said

    def _read_header(self, is_over: bool) -> bool:
        header, mark, rest = self._held.partition(MESSAGE)
        begun = header.lstrip()
        if (ended := next(filter(begun.startswith, _CLOSING), None)) is not None:
            self._held = self._held.lstrip().removeprefix(ended)
            return True
        may_be_one = not begun or any(
            begun.startswith(each) or (each.startswith(begun) and not mark)
            for each in _HEADER_BEGINS
        )
        if not may_be_one or len(header) > _LONGEST_HEADER:
            self._begin(TEXT)
            self._say(self._held[:1])  # which may begin a mark
            self._held = self._held[1:]
            return True
        if mark:
            self._held = rest
            self._open(header)
            return True
        if is_over:
            self._held = ""
        return False

    def _open(self, header: str) -> None:
        to = _TO.search(header)
        if self._calls and to is not None and to[1] not in _PEOPLE:
            self._begin(CALL)
            self._parts[TEXT].append(call_to(to[1]))
        else:
            self._begin(THOUGHT if _CALLED.findall(header)[-1:] == [THOUGHT] else TEXT)

    def _begin(self, body: str) -> None:
        self._body = body
        self._gap = _APART if body in self._has_said else ""

    def _go_on(self, is_over: bool) -> bool:
        """More of a message."""
        places = {end: self._held.find(end) for end in _ENDS}
        found = {place: end for end, place in places.items() if place >= 0}
        if found:
            place = min(found)
            self._say(self._held[:place])
            # The other two begin the next header.
            is_end = found[place] in _CLOSING
            self._held = self._held[place + (len(found[place]) if is_end else 0) :]
            if self._body == CALL:
                self._say(CALL)
            self._body = ""
            return True
        keep = 0 if is_over else max(overlap(self._held, end) for end in _ENDS)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(certain) :]
        self._say(certain)
        return False

    def _say(self, text: str) -> None:
        if text:
            kind = THOUGHT if self._body == THOUGHT else TEXT
            self._parts[kind].append(self._gap + text)
            self._gap = ""
            self._has_said.add(self._body)
