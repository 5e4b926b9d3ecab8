"""What a job may use and how it ended. Plain data, shared by both sides of the wall."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class JobLimits:
    """Bounds of one job; none can be raised from inside.

    wall_s runs from the fork, cpu_s (whole seconds) counts computing only. memory_bytes is what
    may be mapped beyond what the warmed parent maps already.
    """

    wall_s: float = 60.0
    cpu_s: int = 60
    memory_bytes: int = 1 << 30
    result_bytes: int = 16 << 20
    log_bytes: int = 1 << 20
    log_bytes_per_s: int = 64 << 10
    open_files: int = 64


class ToldError(Exception):
    """Raised by an entry point whose text is already what the job's author should read."""


class Ending(StrEnum):
    """Why a job's process ended."""

    FINISHED = "finished"  # the entry point returned
    FAILED = "failed"  # it raised; the text says what
    WALL_LIMIT = "wall_limit"
    CPU_LIMIT = "cpu_limit"
    FORBIDDEN_CALL = "forbidden_call"  # a system call only an attack makes
    KILLED = "killed"  # by its owner
    CRASHED = "crashed"  # by a signal, or it left without a word


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended, and what it left.

    `result` is what the entry point returned, as opaque bytes from an untrusted process: nothing
    in this process may unpickle or evaluate it. It is empty unless `ending` is FINISHED; then
    `text` is empty, else a sentence or a traceback for whoever sent the job.
    """

    ending: Ending
    result: bytes
    text: str
    wall_s: float
    cpu_s: float
    peak_memory_bytes: int
