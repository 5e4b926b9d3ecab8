"""What a job prints, as lines that are safe to show: bounded in rate and amount, no control codes.

Reads the job's pipe on the event loop, slowly on purpose: a job that prints faster than the rate
waits in its own `print`, which a line says once, and however short its lines are, what it printed
is handed on ten times a second at most. What exceeds the total is dropped, and hardly waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
from collections.abc import Callable

MAX_LINE_CHARACTERS = 4096
_CHUNK_BYTES = 16 << 10
_BETWEEN_READS_S = 0.1
_BETWEEN_DROPS_S = 0.01
_PIPE_BYTES = 64 << 10
_DROPPED_BYTES = 1 << 20
_SET_PIPE_SIZE = getattr(fcntl, "F_SETPIPE_SZ", None)  # Linux
# C0 and C1 controls, line separators, and the marks that reorder text on a screen.
_UNSAFE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_DROPPED = "(the output limit is reached; the rest is dropped)"
_WAITS = "(it prints more than {} KiB a second: its prints wait, and so does the job)"


def safe_line(text: str) -> str:
    """`text` without what could move a cursor, forge a line or reorder characters."""
    return _UNSAFE.sub("", text)


class LogPump:
    """Hands a pipe's lines to `on_text`, joined by newlines, until it ends. Owns the descriptor."""

    def __init__(
        self, fd: int, on_text: Callable[[str], None], total_bytes: int, bytes_per_s: int
    ) -> None:
        self._fd = fd
        self._on_text = on_text
        self._left = total_bytes
        self._bytes_per_s = bytes_per_s
        self._partial = b""
        self._unbroken_bytes = 0
        self._has_said_it_waits = False
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._on_readable)

    def close(self) -> None:
        """Take what is still in the pipe, within the total, and let go of it. Idempotent."""
        if self._fd < 0:
            return
        self._pause()
        while self._left > 0 and self._read():
            pass
        if self._partial and self._left > 0:
            self._on_text("\n".join(_shown(self._partial)))
        os.close(self._fd)
        self._fd = -1

    def _pause(self) -> None:
        self._loop.remove_reader(self._fd)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_readable(self) -> None:
        was_told = self._left > 0
        count = self._read()
        self._loop.remove_reader(self._fd)
        if not count:
            return
        if self._left > 0:
            self._say_if_it_waits(count)
            wait_s = max(count / self._bytes_per_s, _BETWEEN_READS_S)
        else:
            wait_s = _BETWEEN_DROPS_S
            if was_told:
                self._widen()
        self._timer = self._loop.call_later(wait_s, self._resume)

    def _say_if_it_waits(self, count: int) -> None:
        """Once, when it has printed more without a pause than its pipe holds."""
        self._unbroken_bytes = self._unbroken_bytes + count if count == _CHUNK_BYTES else 0
        if self._unbroken_bytes > _PIPE_BYTES and not self._has_said_it_waits:
            self._has_said_it_waits = True
            self._on_text(_WAITS.format(self._bytes_per_s >> 10))

    def _widen(self) -> None:
        """Have room for more at a time, where the system has any to give."""
        if _SET_PIPE_SIZE is not None:
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._fd, _SET_PIPE_SIZE, _DROPPED_BYTES)

    def _resume(self) -> None:
        self._timer = None
        self._loop.add_reader(self._fd, self._on_readable)

    def _read(self) -> int:
        """Take one chunk; the number of bytes, 0 when there are none or the writer is gone."""
        try:
            data = os.read(self._fd, _CHUNK_BYTES if self._left > 0 else _DROPPED_BYTES)
        except BlockingIOError:
            return 0
        self._take(data)
        return len(data)

    def _take(self, data: bytes) -> None:
        if self._left <= 0 or not data:
            return
        kept = data[: self._left]
        self._left -= len(kept)
        *lines, self._partial = (self._partial + kept).split(b"\n")
        while len(self._partial) > MAX_LINE_CHARACTERS:
            lines.append(self._partial[:MAX_LINE_CHARACTERS])
            self._partial = self._partial[MAX_LINE_CHARACTERS:]
        if self._left <= 0:
            lines.append(self._partial)
            self._partial = b""
        shown = [piece for line in lines for piece in _shown(line)]
        if self._left <= 0:
            shown.append(_DROPPED)
        if shown:
            self._on_text("\n".join(shown))


def _shown(line: bytes) -> list[str]:
    text = safe_line(line.decode("utf-8", "replace"))
    starts = range(0, max(len(text), 1), MAX_LINE_CHARACTERS)
    return [text[start : start + MAX_LINE_CHARACTERS] for start in starts]
