"""What a process of the node logs: to its standard error, bounded whatever others do.

Who can cause a line can cause a million. So each place in the code that logs has a rate, and so has
each subject there (the first value of its text: a peer, an endpoint, a job): one that is noisy
hides neither other subjects nor itself altogether, for how many lines were left out is said. What
does not come through `logging`, such as a last word of the interpreter, passes as it is.

A thread of its own writes the lines: a terminal that was stopped (Ctrl-S), a pipe that nobody reads
and a disk that hangs hold up that thread, and no event loop.

A detached daemon and its children share one file as their standard error. Whichever finds it full
moves it aside, and each goes over to the new one before its next line.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO
from weakref import WeakSet

MAX_FILE_BYTES = 16 << 20
KEPT_FILES = 3
"""Moved aside, besides the one that is written."""
MAX_LINE_CHARACTERS = 8192
MAX_WAITING_LINES = 256
"""For what takes none at the moment; what is logged beyond that is lost, and counted."""
PATIENCE_S = 0.1
"""How long who logs a line waits until it is written: last words are to be out before the end."""
FORMAT = "%(asctime)s %(levelname)-7s %(name)s %(message)s"

_FIELDS = re.compile(
    r"(?P<time>[\d-]{10} [\d:]{8},\d{3}) (?P<level>[A-Z]+) +(?P<logger>[\w.]+) (?P<message>.*?)"
    r"(?: \[request (?P<request>[\w-]+)\])?"
)
"""What a line of that format says."""

PLACE_BURST, PLACE_PER_S = 60.0, 1.0
SUBJECT_BURST, SUBJECT_PER_S = 20.0, 0.1
MAX_SUBJECTS = 1024
"""Remembered; who is forgotten begins anew, within its place's rate."""

# httpx tells every address that is asked for; those of the hub's files are as good as a key.
# aiosqlite tells every statement twice, with all that is written.
_QUIET = ("uvicorn", "websockets", "zeroconf", "asyncio", "httpx", "aiosqlite")
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != ord("\t")}

REQUEST: ContextVar[str] = ContextVar("request", default="")
"""On behalf of which request of the HTTP API something is done; its lines say so. No secret."""

Place = tuple[str, int]
"""File and line."""


class _Bucket:
    """Lines that may be written: `burst` at once, then `per_s`."""

    __slots__ = ("_at", "_burst", "_level", "_per_s")

    def __init__(self, burst: float, per_s: float, now: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._level, self._at = burst, now

    def has_one(self, now: float) -> bool:
        """Whether one more may be written."""
        self._level = min(self._burst, self._level + (now - self._at) * self._per_s)
        self._at = now
        return self._level >= 1

    def take(self) -> None:
        """It is written."""
        self._level -= 1


class LineRates:
    """Which log records are written. For one thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._places: dict[Place, _Bucket] = {}
        self._subjects: OrderedDict[tuple[Place, str], _Bucket] = OrderedDict()
        self._left_out: dict[Place, int] = {}

    def admit(self, record: logging.LogRecord) -> int | None:
        """None if it is to be left out, else how many from its place were since the last."""
        now = self._clock()
        place = (record.pathname, record.lineno)
        buckets = [self._of_place(place, now), *self._of_subject(place, record, now)]
        if not all(bucket.has_one(now) for bucket in buckets):
            self._left_out[place] = self._left_out.get(place, 0) + 1
            return None
        for bucket in buckets:
            bucket.take()
        return self._left_out.pop(place, 0)

    def _of_place(self, place: Place, now: float) -> _Bucket:
        if place not in self._places:  # as many as the code has
            self._places[place] = _Bucket(PLACE_BURST, PLACE_PER_S, now)
        return self._places[place]

    def _of_subject(self, place: Place, record: logging.LogRecord, now: float) -> Iterator[_Bucket]:
        if not isinstance(record.args, tuple) or not record.args:
            return
        key = (place, str(record.args[0])[:200])
        bucket = self._subjects.pop(key, None) or _Bucket(SUBJECT_BURST, SUBJECT_PER_S, now)
        self._subjects[key] = bucket
        if len(self._subjects) > MAX_SUBJECTS:
            self._subjects.popitem(last=False)
        yield bucket


class _Lines(logging.Formatter):
    """One line for each message, whatever it quotes; a traceback has lines of its own below it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line; what it quotes cannot make lines or escapes of its own."""
        line, request = super().formatMessage(record), REQUEST.get()
        return (f"{line} [request {request}]" if request else line).translate(_CONTROLS)

    def formatException(self, ei: Any) -> str:
        """The traceback, its own line breaks kept."""
        lines = super().formatException(ei).split("\n")
        return "\n".join(line.translate(_CONTROLS) for line in lines)


class LogFile:
    """The file that descriptor `fd` writes to, shared with other processes."""

    def __init__(self, path: Path, fd: int, max_bytes: int | None = None) -> None:
        self.path = path
        self._max_bytes = max_bytes or MAX_FILE_BYTES
        self._fd = fd

    @property
    def is_here(self) -> bool:
        """Whether the descriptor is this very file."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._fd), self.path.stat())
        return False

    def tend(self) -> None:
        """Move the file aside if it is full; go over to the new one. Raises OSError."""
        if self.is_here and os.fstat(self._fd).st_size < self._max_bytes:
            return
        with _sole(self.path.parent) as alone:
            if not alone:
                return  # somebody is at it
            if self.is_here:
                move_aside(self.path)
            fresh = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.dup2(fresh, self._fd)
        finally:
            os.close(fresh)


class _Outlet:
    """A stream that writes lines to a descriptor, from a thread of its own."""

    def __init__(self, descriptor: int, file: LogFile | None) -> None:
        self._descriptor = descriptor
        self._file = file
        self._waiting: deque[tuple[str, int]] = deque()
        """Lines, each with how many before it were lost; the first is being written."""
        self.begin()
        _outlets.add(self)

    def begin(self) -> None:
        """With nothing to write, and no thread yet: as a process that was forked finds it, of which
        the thread is the other's, and may have held the lock."""
        self._waiting.clear()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._put = self._done = self._lost = 0
        self._is_stuck = False

    def write(self, text: str) -> None:
        """Have a line written, and wait a moment for it; not again while it takes none."""
        if sys.is_finalizing():  # threads no longer run
            self._write(text, 0)
            return
        with self._changed:
            if len(self._waiting) >= MAX_WAITING_LINES:
                self._lost += 1
                return
            self._waiting.append((text, self._lost))
            self._lost = 0
            self._put += 1
            number = self._put
            self._have_thread()
            self._changed.notify_all()
            if self._is_stuck or threading.current_thread() is self._thread:
                return
            self._is_stuck = not self._changed.wait_for(lambda: self._done >= number, PATIENCE_S)

    def flush(self) -> None:
        """Nothing is held back here, and nobody waits for what is."""

    def _have_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="log", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                text, lost = self._waiting[0]
            is_written = self._write(text, lost)
            with self._changed:
                self._waiting.popleft()
                self._done += 1
                self._lost += 0 if is_written else lost + 1
                self._is_stuck = self._is_stuck and bool(self._waiting)
                self._changed.notify_all()

    def _write(self, text: str, lost: int) -> bool:
        if lost:
            text = f"{text.rstrip()} [{lost} before it could not be written]\n"
        left = text.encode(errors="backslashreplace")
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk, say: what is open is still written to
                self._file.tend()
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            return False
        return True


_outlets: WeakSet[_Outlet] = WeakSet()


def _begin_in_child() -> None:
    for outlet in _outlets:
        outlet.begin()


os.register_at_fork(after_in_child=_begin_in_child)


class LogHandler(logging.StreamHandler[Any]):
    """Writes what its rates admit; `file` is what the stream writes to, where that is known."""

    def __init__(self, stream: TextIO, rates: LineRates, file: LogFile | None = None) -> None:
        try:
            super().__init__(_Outlet(stream.fileno(), file))
        except OSError:  # it has no descriptor: nothing to wait for
            super().__init__(stream)
        self.setFormatter(_Lines(FORMAT))
        self._rates = rates
        self.file = file
        self._left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line if its rate admits it; a file grown too large is moved aside before."""
        left_out = self._rates.admit(record)
        if left_out is not None:
            self._left_out = left_out
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """The line, cut to its limit; behind it, how many were left out."""
        text = super().format(record)
        if len(text) > MAX_LINE_CHARACTERS:
            more = len(text) - MAX_LINE_CHARACTERS
            text = f"{text[:MAX_LINE_CHARACTERS]} [and {more} characters more]"
        if self._left_out:
            text = f"{text} [{self._left_out} like it left out]"
        return text


def fields_of(line: str) -> dict[str, str]:
    """The ``time`` (ISO 8601, with the offset that this machine has now), ``level``, ``logger``,
    ``message`` and, if it has one, ``request`` of a line; of one that belongs to another above it,
    or was not logged, just the ``message``."""
    found = _FIELDS.fullmatch(line)
    if found is None:
        return {"message": line}
    fields = {name: text for name, text in found.groupdict().items() if text is not None}
    at = datetime.strptime(fields["time"], "%Y-%m-%d %H:%M:%S,%f").astimezone()
    return fields | {"time": at.isoformat(timespec="milliseconds")}


def log_to_stderr(level: str, path: Path | None = None) -> None:
    """Have this process log to its standard error from now on; once, as the process begins.

    Where that is the file at `path`, the file is kept small; anything else is left alone.
    """
    file = None if path is None else LogFile(path.absolute(), sys.stderr.fileno())
    if file is not None and not file.is_here:
        file = None
    handler = LogHandler(sys.stderr, LineRates(), file)
    is_set_up = bool(logging.getLogger().handlers)
    logging.basicConfig(handlers=[handler])
    set_levels(None if is_set_up else level)
    logging.captureWarnings(capture=True)


def set_levels(level: str | None) -> None:
    """How much is logged; None: only by libraries that say too much. What is so already stays
    untouched: to set a level, `logging` visits all loggers there are, and a forked process copies
    each page that it writes to."""
    levels = dict.fromkeys(_QUIET, logging.WARNING)
    if level is not None:
        levels[""] = logging.getLevelName(level.upper())
    for name, number in levels.items():
        logger = logging.getLogger(name)
        if logger.level != number:
            logger.setLevel(number)


def log_file() -> Path | None:
    """The file that this process's standard error is, if it is one that is kept small."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogHandler) and handler.file is not None:
            return handler.file.path
    return None


def log_files(path: Path) -> list[Path]:
    """The log at `path` and what was moved aside of it, newest first, as far as they are there."""
    files = [path, *(_aside(path, number) for number in range(1, KEPT_FILES + 1))]
    return [file for file in files if file.exists()]


def move_aside(path: Path) -> None:
    """Make room for a new file; the oldest of those kept is lost. Raises OSError."""
    for number in reversed(range(1, KEPT_FILES)):
        with contextlib.suppress(FileNotFoundError):
            _aside(path, number).replace(_aside(path, number + 1))
    path.replace(_aside(path, 1))


def _aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


@contextlib.contextmanager
def _sole(directory: Path) -> Iterator[bool]:
    """Whether this process alone may change names there meanwhile; never waits."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)
