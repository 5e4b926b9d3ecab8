"""Runs what came with a checkpoint within bounds of processor time and memory.

A chat template is a program of whoever published the model, and its sandbox keeps it from files and
code alone: it may loop for as long, and make as much text, as it likes. Where the platform cannot
say how much memory a process may have, or a thread has computed, that bound does not hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mesh.errors import BadRequest

T = TypeVar("T")
_TICK_S = 0.25
_STATM = Path("/proc/self/statm")
_DATA = 5
"""Where it says how many pages are data of the process' own, stacks among them: proc(5)."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """A chat of four million letters takes some tenths of a second and of this memory."""

    cpu_s: float = 20.0
    memory_bytes: int = 1 << 30


class _Overdue(BaseException):
    """Raised in the middle of what takes too long; nothing between catches it."""


def within(bounds: Bounds, what: str, work: Callable[[], T]) -> T:
    """What `work` gives, on this thread.

    Raises BadRequest, with `what` it is that takes so much, where it computes for longer or wants
    more memory. It cannot be ended within one operation of the interpreter.
    """
    try:
        with _LIMIT.held(bounds.memory_bytes), _ended_after(bounds.cpu_s):
            return work()
    except (MemoryError, _Overdue) as error:
        most = f"{bounds.memory_bytes >> 20} MiB" if isinstance(error, MemoryError) else (
            f"{bounds.cpu_s:g} s"
        )  # fmt: skip
        raise BadRequest(
            f"{what} takes more than {most}, and was ended.",
            fix="Ask for a completion of plain text, or use another revision of the model.",
            param="messages",
        ) from None


@contextlib.contextmanager
def _ended_after(cpu_s: float) -> Iterator[None]:
    """Raises `_Overdue` in this thread once it has computed for so long."""
    thread, is_over, is_raised = threading.get_ident(), threading.Event(), threading.Event()
    clock, lock = _clock_of(thread), threading.Lock()
    deadline_s = clock() + cpu_s

    def watch() -> None:
        while not is_over.wait(min(_TICK_S, cpu_s)):
            with lock:
                if not is_over.is_set() and clock() > deadline_s:
                    is_raised.set()
                    _raise_overdue(thread)
                    return

    threading.Thread(target=watch, name="bounded", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            is_over.set()
        # What was raised just now comes here and nowhere later. It is not taken back: the
        # interpreter would look for it before each of its steps from then on.
        while is_raised.is_set() and sys.exc_info()[0] is not _Overdue:
            time.sleep(0)


def _clock_of(thread: int) -> Callable[[], float]:
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    number = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(number)


def _raise_overdue(thread: int) -> None:
    """https://docs.python.org/3/c-api/threads.html#c.PyThreadState_SetAsyncExc"""
    raised = ctypes.py_object(_Overdue)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


class _DataLimit:
    """The process' own, held by whatever is bounded: so much above what it had at first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._before = (0, 0)

    @contextlib.contextmanager
    def held(self, more_bytes: int) -> Iterator[None]:
        """No more than `more_bytes` besides are to be had by anything in the process."""
        if not _STATM.exists():
            yield
            return
        with self._lock:
            if not self._holders:
                self._before = resource.getrlimit(resource.RLIMIT_DATA)
                pages = int(_STATM.read_text(encoding="ascii").split()[_DATA])
                self._set(pages * resource.getpagesize() + more_bytes)
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    resource.setrlimit(resource.RLIMIT_DATA, self._before)

    def _set(self, soft: int) -> None:
        before, hard = self._before
        allowed = [each for each in (before, hard) if each != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min([soft, *allowed]), hard))


_LIMIT = _DataLimit()
