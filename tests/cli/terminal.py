"""A process on a terminal of its own: what it prints, and what then stands on the screen."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import termios
from collections.abc import Callable

import pyte

from tests.cli.conftest import COMMAND

COLUMNS, ROWS = 80, 24


def _take_terminal() -> None:
    """In the new process: Ctrl-C on this terminal is for us."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """Use as ``async with``; the process is killed at the end if it still runs."""

    def __init__(self, environment: dict[str, str], *arguments: str) -> None:
        self._arguments = arguments
        self._environment = environment
        self.seen = ""
        self.everything = ""
        self.screen = pyte.HistoryScreen(COLUMNS, ROWS, history=10_000, ratio=0.001)
        self._stream = pyte.ByteStream(self.screen)

    async def __aenter__(self) -> Terminal:
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.process = await asyncio.create_subprocess_exec(
            *COMMAND, *self._arguments,
            stdin=theirs, stdout=theirs, stderr=theirs, env=self._environment,
            start_new_session=True, preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(theirs)
        os.set_blocking(self._ours, False)
        self._news = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._ours, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._ours)
        os.close(self._ours)
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    def _read(self) -> None:
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # Linux' way to say that the other side has closed
            asyncio.get_running_loop().remove_reader(self._ours)
            data = b""
        self._stream.feed(data)
        self.seen += data.decode(errors="replace")
        self.everything += data.decode(errors="replace")
        self._news.set()

    async def until(self, text: str) -> None:
        """Wait for a text in what was printed since the last wait."""
        await self._wait(lambda: text in self.seen)
        self.seen = self.seen.partition(text)[2]

    async def until_screen(self, text: str) -> None:
        """Wait until the text stands on the screen."""
        await self._wait(lambda: text in self.shown())

    async def prompt(self) -> None:
        """Wait for an empty prompt at the cursor."""
        await self._wait(lambda: self._line() == ">>>" and self.screen.cursor.x == 4)
        self.seen = ""

    async def _wait(self, is_there: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(20):
                while not is_there():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"On the screen instead:\n{self.shown()}") from None

    def _line(self) -> str:
        return self.screen.display[self.screen.cursor.y].rstrip()

    def shown(self) -> str:
        """The lines on the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def scrolled(self) -> str:
        """The lines that have left the screen at its top, and those on it."""
        top = [
            "".join(line[x].data for x in range(COLUMNS)).rstrip()
            for line in self.screen.history.top
        ]
        return "\n".join([*top, self.shown()])

    def type(self, text: str) -> None:
        """As if typed; Enter is a carriage return."""
        os.write(self._ours, text.encode())
