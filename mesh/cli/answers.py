"""One streamed answer for `run` and `chat`: what has come of it, and how it is shown meanwhile."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from mesh.cli.output import note, say, summary_line
from mesh.terminal_text import printable

_DIM, _RESET = "\x1b[2m", "\x1b[0m"


@dataclass
class ReceivedAnswer:
    """An answer as received so far; complete once `extension` is set."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    extension: dict[str, Any] = field(default_factory=dict)
    tokens: list[dict[str, Any]] = field(default_factory=list)
    """A chat's tokens with their log-probabilities, where they were asked for."""
    seconds: float = 0.0

    @property
    def summary(self) -> str:
        """Where the answer came from and how fast."""
        return summary_line(self.extension, self.usage)

    def timings(self) -> str:
        """The summary, the whole time as it passed here, and each hop's times."""
        shown = self.extension["timings"]
        parts = [f"total {self.seconds:.2f} s"]
        new = self.usage["prompt_tokens"] - self.usage["prompt_tokens_details"]["cached_tokens"]
        if shown["first_token_ms"]:
            parts.append(f"prompt {new * 1e3 / shown['first_token_ms']:.1f} tok/s")
        if shown.get("drafted_tokens"):
            parts.append(f"{shown['accepted_tokens']} of {shown['drafted_tokens']} guesses right")
        hops = [
            f"  {hop['node']} {hop['layers']}: {hop['p50_ms']:.1f} ms a step, "
            f"{hop['compute_p50_ms']:.1f} of them computing"
            for hop in shown["hops"]
        ]
        return "\n".join([self.summary, " · ".join(parts), *hops])

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "text": self.text,
            **({"reasoning": self.reasoning} if self.reasoning else {}),
            "finish_reason": self.finish_reason,
            "usage": self.usage,
            "hearthnet": self.extension,
        }


class Display(Protocol):
    """Shows one answer as it comes. `end` is called once, whatever happened."""

    def thought(self, text: str) -> None:
        """More of what the model thinks before it answers."""

    def text(self, text: str) -> None:
        """More of the answer."""

    def event(self, line: str) -> None:
        """What happens to the route."""

    def end(self) -> None:
        """Nothing more comes: the line on the screen is ended."""


class Hidden(Display):
    """Shows what happens to the route only; the answer is printed as a whole afterwards."""

    def thought(self, text: str) -> None:
        """See `Display`."""

    def text(self, text: str) -> None:
        """See `Display`."""

    def event(self, line: str) -> None:
        note(f"[{line}]")

    def end(self) -> None:
        """See `Display`."""


class Plain(Display):
    """The text on stdout as it comes, all else on stderr."""

    def __init__(self) -> None:
        self._thinking = Thinking()
        self._last = "\n"

    def thought(self, text: str) -> None:
        self._thinking.show(text)

    def text(self, text: str) -> None:
        self._thinking.end()
        say(text, end="")
        self._last = text[-1:] or self._last

    def event(self, line: str) -> None:
        note(f"[{line}]")

    def end(self) -> None:
        self._thinking.end()
        if self._last != "\n":
            say()


class Thinking:
    """What a model thinks, on stderr: behind a bar, and dim where the terminal can."""

    def __init__(self) -> None:
        self._is_open = False

    def show(self, text: str) -> None:
        """More of it."""
        begin, end = (_DIM, _RESET) if styles(sys.stderr) else ("", "")
        opening = "" if self._is_open else "[thinking]\n| "
        self._is_open = True
        sys.stderr.write(begin + opening + printable(text).replace("\n", "\n| ") + end)
        sys.stderr.flush()

    def end(self) -> None:
        """The answer comes now, or nothing."""
        if self._is_open:
            note("\n")
        self._is_open = False


def styles(stream: TextIO) -> bool:
    """Whether what is written there may be dim or coloured."""
    from mesh.config import terminal_features

    return stream.isatty() and all(terminal_features())


def is_screen(stream: TextIO) -> bool:
    """Whether this is a terminal whose cursor can be moved."""
    from mesh.config import terminal_features

    return stream.isatty() and terminal_features()[0]


def display(*, markdown: bool) -> Display:
    """How an answer is shown on stdout: as Markdown on a terminal where wanted, else as it is."""
    if markdown and is_screen(sys.stdout):
        from mesh.cli.live import LiveMarkdown

        return LiveMarkdown()
    return Plain()


async def receive(
    chunks: AsyncGenerator[dict[str, Any], None], answer: ReceivedAnswer, shown: Display
) -> None:
    """Fill `answer` from a stream, showing the text as it comes.

    On cancellation and errors `answer` keeps what came before, and the line on the screen is
    ended.
    """
    from tui.words import cut_off

    started = time.monotonic()
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                _take(chunk, answer, shown)
    finally:
        answer.seconds = time.monotonic() - started
        shown.end()
    if cut := cut_off(answer.finish_reason, answer.extension):
        note(f"[{cut}]")


def _take(chunk: dict[str, Any], answer: ReceivedAnswer, shown: Display) -> None:
    extension = chunk.get("hearthnet", {})
    if "event" in extension:
        from tui.words import happened

        shown.event(happened(extension["event"]))
    elif extension:
        answer.extension = extension
    answer.usage = chunk.get("usage") or answer.usage
    for choice in chunk["choices"]:
        delta = choice.get("delta", {})
        answer.tokens += (choice.get("logprobs") or {}).get("content") or []
        if thought := delta.get("reasoning_content"):
            answer.reasoning += thought
            shown.thought(thought)
        text = choice["text"] if "text" in choice else delta.get("content") or ""
        answer.text += text
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        if text:
            shown.text(text)
