"""Markdown that streams: finished blocks are printed once, only the last is drawn again.

A block is finished when another has begun after it; of the last one only lines that changed are
written, so nothing flickers and a long answer costs no more per token than a short one.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
import sys
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.markdown import Markdown

from mesh.cli.answers import Display, Thinking
from mesh.cli.output import note
from mesh.terminal_text import printable
from tui.markdown import parser

if TYPE_CHECKING:
    from collections.abc import Iterator

_PAUSE_S = 1 / 15
"""Between two drawings."""
_PADDING = re.compile(r" +$")


class LiveMarkdown(Display):
    """On a terminal. Needs a running event loop."""

    def __init__(self) -> None:
        self._thinking = Thinking()
        self._parser = parser()
        self._tail = Tail(sys.stdout)
        self._source = ""
        self._is_first = True
        self._drawn_at = 0.0
        self._due: asyncio.TimerHandle | None = None
        self._keys = ExitStack()
        self._keys.enter_context(_silent_keys())

    def thought(self, text: str) -> None:
        self._thinking.show(text)

    def text(self, text: str) -> None:
        self._thinking.end()
        self._source += printable(text)
        if self._due is None:
            loop = asyncio.get_running_loop()
            wait = self._drawn_at + _PAUSE_S - time.monotonic()
            self._due = loop.call_later(max(wait, 0), self._draw)

    def event(self, line: str) -> None:
        """See `Display`. The line stands above the block that is still open."""
        self._tail.clear()
        note(f"[{line}]")
        self._draw()

    def end(self) -> None:
        with self._keys:
            self._thinking.end()
            self._draw()
            self._tail.leave()

    def _draw(self) -> None:
        if self._due is not None:
            self._due.cancel()
        self._due, self._drawn_at = None, time.monotonic()
        width = shutil.get_terminal_size().columns
        *finished, last = self._blocks()
        for block in finished:
            if self._show(block, width):
                self._tail.leave()
                self._is_first = False
        self._source = last
        self._show(last, width)

    def _blocks(self) -> list[str]:
        """The source by top-level blocks; the last may still grow."""
        lines = re.split(r"(?<=\n)", self._source)
        tokens = self._parser.parse(self._source)
        starts = [token.map[0] for token in tokens if token.map and token.level == 0]
        cuts = [0, *starts[1:], len(lines)]
        return ["".join(lines[a:b]) for a, b in itertools.pairwise(cuts)]

    def _show(self, block: str, width: int) -> bool:
        lines = self._rendered(block, width)
        if lines and not self._is_first:
            lines = ["", *lines]
        self._tail.show(lines)
        return bool(lines)

    def _rendered(self, block: str, width: int) -> list[str]:
        # One column less: a cursor behind the last one is in a different line on some terminals.
        console = Console(width=max(width - 1, 1), file=sys.stdout, highlight=False)
        shown = Markdown("", hyperlinks=False)
        shown.parsed = self._parser.parse(block)
        with console.capture() as captured:
            console.print(shown)
        lines = [_PADDING.sub("", line) for line in captured.get().split("\n")]
        while lines and not lines[-1]:
            lines.pop()
        return lines


class Tail:
    """The last lines on a terminal, which may still change; the cursor stands at their end."""

    def __init__(self, to: TextIO) -> None:
        self._to = to
        self._lines: list[str] = []
        self._width = 0

    def show(self, lines: list[str]) -> None:
        """Make them look like this. What has left the screen at its top stays as it was."""
        columns, rows = shutil.get_terminal_size()
        if columns != self._width:
            self.leave()  # the terminal has broken the lines anew: where they are is not known
        self._width = columns
        old, first = self._lines, 0
        while first < min(len(old), len(lines)) and old[first] == lines[first]:
            first += 1
        first = max(first, len(old) - rows + 1)
        if first < len(old) or first < len(lines):
            rest = lines[first:] or [""]
            self._write(_change(old, rest, first))
            self._lines = old[:first] + rest

    def clear(self) -> None:
        """Take away what is still on the screen; the cursor stands where that began."""
        rows = shutil.get_terminal_size().lines
        if self._lines:
            self._write(_up(min(len(self._lines), rows) - 1) + "\x1b[J")
        self._lines = []

    def leave(self) -> None:
        """Go on below; these lines will not change any more."""
        if self._lines:
            self._write("\n")
        self._lines = []

    def _write(self, text: str) -> None:
        self._to.write(text)
        self._to.flush()


def _change(old: list[str], rest: list[str], first: int) -> str:
    """What turns the lines from number `first` on into `rest`."""
    if first == len(old):
        return ("\n" if old else "") + "\n".join(rest)
    if first == len(old) - 1 and rest[0].startswith(old[first]):
        return "\n".join([rest[0].removeprefix(old[first]), *rest[1:]])
    written = "\n".join(f"{line}\x1b[K" for line in rest)
    return _up(len(old) - 1 - first) + written + "\x1b[J"


def _up(lines: int) -> str:
    """To the beginning of the line so many further up."""
    return "\r" + (f"\x1b[{lines}A" if lines > 0 else "")


@contextmanager
def _silent_keys() -> Iterator[None]:
    """What is typed meanwhile is kept for the next prompt and not written into the answer."""
    import termios

    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    silent = termios.tcgetattr(descriptor)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
